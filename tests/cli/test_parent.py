"""Ranks whose launcher is gone end too."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

RANK = """
import os, platform, sys, time
if sys.argv[1] == "elsewhere":
    platform.system = lambda: "Darwin"
from layerwise.cli.parent import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(30)
"""
LAUNCHER = """
import os, subprocess, sys
os.environ.update(word.split("=") for word in sys.argv[2:])
subprocess.Popen([sys.executable, "-c", sys.argv[1], os.environ["SYSTEM"]])
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.stdin.read()
"""
START_S = 120.0
"""Seconds in which a rank has to print its process id; it needs less than one."""


def ends_within(seconds: float, *environment: str, rank: str = RANK, start_s: float = START_S) -> bool:
    """Whether a rank ends soon after its launcher was killed, once it has asked to. A rank that dies or hangs before fails the test."""
    words = [sys.executable, "-c", LAUNCHER, rank, *environment]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as launcher:
        assert launcher.stdout is not None
        try:
            # the rank alone holds the pipe, once the launcher has let go of it: its end is that of the rank
            assert select.select([launcher.stdout], [], [], start_s)[0], f"the rank says nothing for {start_s:g} s"
            said = launcher.stdout.readline()
            assert said.strip().isdigit(), f"the rank died before it could ask, and said {said!r}"
            launcher.kill()
            return bool(select.select([launcher.stdout], [], [], seconds)[0])
        finally:
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.parametrize("system", ["here", "elsewhere"])
def test_a_rank_ends_when_its_launcher_is_killed(system: str) -> None:
    """By a signal of the kernel, and on systems without one by a look at the parent."""
    assert ends_within(20.0, "TORCHELASTIC_RUN_ID=none", f"SYSTEM={system}")


def test_a_process_that_no_launcher_started_stays() -> None:
    assert not ends_within(1.5, "SYSTEM=here")


def test_a_rank_ends_whose_launcher_was_gone_before_it_could_ask() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "none", "LAYERWISE_LAUNCHER": str(gone.pid)}
    done = subprocess.run([sys.executable, "-c", RANK, "here"], env=environment, capture_output=True, timeout=25)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")
    here = subprocess.run(
        [sys.executable, "-c", RANK.replace("sleep(30)", "sleep(0)"), "here"],
        env={**environment, "LAYERWISE_LAUNCHER": str(os.getpid())},
        timeout=25,
    )
    assert here.returncode == 0


@pytest.mark.parametrize(
    ("rank", "start_s", "said"),
    [
        ("import a_module_that_nobody_has", START_S, "the rank died before it could ask"),
        ("import time; time.sleep(600)", 1.0, "the rank says nothing for 1 s"),
    ],
)
def test_a_rank_that_never_gets_to_ask_fails_a_test_and_does_not_hang_it(rank: str, start_s: float, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        ends_within(20.0, "SYSTEM=here", rank=rank, start_s=start_s)

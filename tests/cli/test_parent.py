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
sys.stdin.read()
"""


def ends_within(seconds: float, *environment: str) -> bool:
    """Whether a rank ends soon after its launcher was killed, once it has asked to."""
    words = [sys.executable, "-c", LAUNCHER, RANK, *environment]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        launcher.kill()
        # the rank alone holds the pipe now: its end is that of the rank
        ended = bool(select.select([launcher.stdout], [], [], seconds)[0])
        if not ended:
            os.kill(rank, signal.SIGKILL)
    return ended


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

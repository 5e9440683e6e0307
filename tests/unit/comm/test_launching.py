"""torchrun in a process of ours, with ranks that are shells: what it returns, and who waits for whom."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from signal import SIGINT, SIGTERM, SIGUSR1
from layerwise.comm.launching import launch
numbers = (SIGINT, SIGTERM, SIGUSR1)
start = ["--standalone", "--nproc-per-node", "1", "--signals-to-handle", ",".join(number.name for number in numbers)]
code, summary = launch([*start, "--no-python", "sh", "-c", sys.argv[1]], numbers)
print("summary" if "Root Cause" in summary else "nothing to say", flush=True)
sys.exit(code)
"""
# The first second is for torchrun: it passes nothing on before it has noted down which rank it started.
SLOW_TO_STOP = "trap 'ends=1' INT TERM USR1; sleep 1; for n in $(seq {storm}); do kill -{name} $PPID; sleep 0.05; done; sleep 1; test $ends && echo saved"


def launched(rank: str) -> tuple[int, list[str], str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, rank], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize(
    ("name", "storm", "code"),
    [
        ("INT", 20, 130),
        pytest.param("INT", 1, 130, marks=pytest.mark.slow),
        pytest.param("TERM", 1, 143, marks=pytest.mark.slow),
        pytest.param("USR1", 1, 138, marks=pytest.mark.slow),
    ],
)
def test_a_signal_is_passed_on_and_ranks_are_waited_for_without_a_traceback(name: str, storm: int, code: int) -> None:
    """Also where more signals come before ranks have ended, each of which torchrun raises anew."""
    found, said, errors = launched(SLOW_TO_STOP.format(name=name, storm=storm))
    assert (found, said) == (code, ["saved", "nothing to say"]), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("rank", "code", "told"),
    [("exit 5", 1, "summary"), pytest.param("exit 0", 0, "nothing to say", marks=pytest.mark.slow)],
)
def test_ranks_that_fail_are_told_of_in_the_words_of_torchrun(rank: str, code: int, told: str) -> None:
    found, said, errors = launched(rank)
    assert (found, said) == (code, [told]), errors
    assert "Traceback" not in errors

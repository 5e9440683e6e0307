"""Exit codes, and how errors are written: on stderr, whole, and with the rank when it is not the first."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

OK, FAILED, BAD_INPUT, ENVIRONMENT = 0, 1, 2, 3
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 and the number of SIGINT."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What errors of files say when nothing more can be written, wherever it would go."""


def rank_from_environment(variable: str = "RANK") -> int:
    """This process's rank (or LOCAL_RANK) as its launcher set it; 0 without one."""
    value = os.environ.get(variable, "0")
    return int(value) if value.isdigit() else 0


def complain(text: str) -> None:
    """Write an error. Each line names the rank, so that the lines of several ranks can be told apart."""
    rank = rank_from_environment()
    prefix = f"[rank {rank}] " if rank > 0 else ""
    lines = [f"{prefix}{line}\n" for line in text.rstrip("\n").split("\n")]
    with suppress(OSError):  # whoever would read it may be gone: that ends no training
        sys.stderr.write("".join(lines))  # at once: other ranks write there, too
        sys.stderr.flush()


def write_nowhere(descriptor: int) -> None:
    """What is still written there is lost, and fails nobody: also what is left in buffers when the process ends."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def announce_torch() -> None:
    """Say that torch is imported next, which may take longer than people wait without a word. Once, by the first rank."""
    if "torch" not in sys.modules and rank_from_environment() == 0:
        note("importing torch")


def note(text: str) -> None:
    """Say something on stderr that is not a result."""
    print(text, file=sys.stderr, flush=True)

"""torchrun in this process: it starts ranks of this machine, watches them, and passes signals on to them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

_LEFT_S = 30.0
"""For ranks that torchrun has left behind, when signals come faster than it can pass them on; it gives them as long itself."""


def launch(words: Sequence[str], numbers: Sequence[signal.Signals]) -> tuple[int, str]:
    """Run torchrun with these arguments. Returns an exit code and what is to be said: 0; or 1 and torchrun's summary, where a rank
    failed; or 128 + the number of the first of these signals, as shells have it, once ranks have ended."""
    try:
        torchrun(list(words))
    except ChildFailedError as failed:
        return 1, str(failed)
    except SignalException as stopped:
        _end_quietly(numbers)
        return 128 + stopped.sigval, ""
    return 0, ""


def _end_quietly(numbers: Sequence[signal.Signals]) -> None:
    """Wait for ranks that are still at work, whatever signals come meanwhile: torchrun raises each of them anew, wherever it is."""
    while True:
        with suppress(SignalException):
            for number in numbers:
                signal.signal(number, signal.SIG_IGN)
            break
    deadline = time.monotonic() + _LEFT_S
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)

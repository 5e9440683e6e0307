"""Ranks end with the launcher that started them: nobody would pass signals on to them any more, or see that they hang."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import threading
import time

LAUNCHER = "LAYERWISE_LAUNCHER"
"""Environment variable in which `layerwise train --nproc` tells its ranks the id of its process."""
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Have this rank sent a SIGTERM when torchrun, which started it, is gone: while it trains, it finishes its step, saves and ends.
    A process that torchrun did not start stays as it is. Call it before torch is imported, which takes seconds."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if not (platform.system() == "Linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) == 0):
        threading.Thread(target=_end_without, args=(parent,), daemon=True).start()
    if os.getppid() != parent or _is_gone(os.environ.get(LAUNCHER, "")):  # before it could be asked for
        signal.raise_signal(signal.SIGTERM)


def _end_without(parent: int) -> None:
    """Look at the parent every second, on systems without such a signal."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_gone(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OSError):  # not told, or not ours to signal
        return False
    return False

"""Leaving in order: a process that ends must have sent what other ranks may still wait for.

New weights travel after `step()` has returned. A rank that has nothing more to do and ends, while another one evaluates
or saves, would take its part of them along.
"""

from __future__ import annotations

import os
import time
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

_PATIENCE_S = 60.0
"""How long a process that ends waits for ranks that may be gone themselves."""


class Leaves(Protocol):
    """Who has something under way."""

    def leave(self, deadline_s: float) -> None:
        """Wait until it has arrived, or until `time.monotonic()` is this. Raises nothing."""


_LIVE: weakref.WeakSet[Leaves] = weakref.WeakSet()
_PREPARED: set[int] = set()
"""Processes that know what to do when they end; one that is forked is another one."""


def before_exit(one: Leaves) -> None:
    """Have it leave in order when this process ends."""
    _LIVE.add(one)
    if os.getpid() not in _PREPARED:
        _PREPARED.add(os.getpid())
        # Not atexit, which processes of multiprocessing do not run.
        Finalize(None, _leave_all, exitpriority=10)


def _leave_all() -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    for one in list(_LIVE):
        one.leave(deadline_s)

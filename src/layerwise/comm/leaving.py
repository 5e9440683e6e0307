"""Leaving in order: a process that ends must have sent what other ranks may still wait for, and must have its tensors back.

New weights travel after `step()` has returned. A rank that has nothing more to do and ends, while another one evaluates
or saves, would take its part of them along.

[Note: Tensors that a backend still holds]
A thread of gloo's says that a collective is done, and lets go of its tensors afterwards. To let go of a tensor that Python
knows it takes the GIL, and a thread that waits for the GIL when the interpreter is finalized ends the process with SIGABRT:
a run that was finished counts as failed. Groups join these threads, but only when the last reference to them goes, and a
model that is still there has some. So a collective gets aliases of tensors, which nobody else keeps, and a process that ends
waits until all aliases are gone.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from multiprocessing.util import Finalize
from typing import Protocol

from torch import Tensor

_PATIENCE_S = 60.0
"""How long a process that ends waits for ranks that may be gone themselves."""


class Leaves(Protocol):
    """Who has something under way."""

    def leave(self, deadline_s: float) -> None:
        """Wait until it has arrived, or until `time.monotonic()` is this. Raises nothing."""


_LIVE: weakref.WeakSet[Leaves] = weakref.WeakSet()
_PREPARED: set[int] = set()
"""Processes that know what to do when they end; one that is forked is another one."""


_LENT: dict[weakref.ref[Tensor], tuple[weakref.ref[object], ...]] = {}
"""Aliases that collectives of this process got, and the works that these return."""


def before_exit(one: Leaves) -> None:
    """Have it leave in order when this process ends."""
    _LIVE.add(one)
    _prepare()


def blocking(collective: Callable[..., object], *tensors: Tensor | list[Tensor], **more: object) -> None:
    """Call a blocking collective of torch's over aliases of tensors. Every rank of the group calls this."""
    aliases = [one.detach() if isinstance(one, Tensor) else [each.detach() for each in one] for one in tensors]
    collective(*aliases, **more)
    lend(chain.from_iterable([one] if isinstance(one, Tensor) else one for one in aliases))


def lend(aliases: Iterable[Tensor], works: Sequence[object] = ()) -> None:
    """A collective got these aliases, and has returned: its backend may hold them a while longer.

    See [Note: Tensors that a backend still holds]. Nobody else may keep the aliases, except for `works`: an alias counts only
    once all of these are gone, since the backend's threads are not the last to let go of it before.
    """
    _prepare()
    told = tuple(map(weakref.ref, works))
    for alias in aliases:
        # Called in the backend's thread, which must not give the GIL away before the alias is gone: no Python function.
        _LENT[weakref.ref(alias, _LENT.pop)] = told


def _prepare() -> None:
    """Have this process leave in order, as it is not the one that prepared before."""
    if os.getpid() not in _PREPARED:
        _LENT.clear()  # of the process that this one was forked from, whose threads are not here
        _PREPARED.add(os.getpid())
        # Not atexit, which processes of multiprocessing do not run.
        Finalize(None, _leave_all, exitpriority=10)


def _leave_all() -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    for one in list(_LIVE):
        one.leave(deadline_s)
    while _are_held() and time.monotonic() < deadline_s:
        time.sleep(0.001)  # which lets go of the GIL


def _are_held() -> bool:
    """Whether a backend still holds an alias that nobody else does."""
    return any(alias() is not None and not any(work() for work in works) for alias, works in list(_LENT.items()))

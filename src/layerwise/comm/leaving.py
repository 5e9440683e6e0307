"""Leaving in order: a process that ends must have sent what other ranks may still wait for, and must have its tensors back.

New weights travel after `step()` has returned. A rank that has nothing more to do and ends, while another one evaluates
or saves, would take its part of them along.

[Note: Tensors that a backend still holds]
A thread of gloo's says that a collective is done, and lets go of its tensors afterwards. To let go of a tensor that Python
knows it takes the GIL, and a thread that waits for the GIL when the interpreter is finalized ends the process with SIGABRT:
a run that was finished counts as failed. Groups join these threads, but only when the last reference to them goes, and a
model that is still there has some. So a collective gets aliases of tensors, which nobody else keeps, and a process that ends
waits until threads have let go of all of them.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from multiprocessing.util import Finalize
from typing import Protocol

import torch
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


_LENT: deque[Tensor] = deque()
"""Aliases that collectives of this process got, and that their backend may still hold."""


def before_exit(one: Leaves) -> None:
    """Have it leave in order when this process ends."""
    _LIVE.add(one)
    _prepare()


def blocking(collective: Callable[..., object], *tensors: Tensor | list[Tensor], **more: object) -> None:
    """Call a blocking collective of torch's over aliases of tensors. Every rank of the group calls this."""
    aliases = [one.detach() if isinstance(one, Tensor) else [each.detach() for each in one] for one in tensors]
    collective(*aliases, **more)
    lend(chain.from_iterable([one] if isinstance(one, Tensor) else one for one in aliases))
    aliases.clear()
    take_back()


def lend(aliases: Iterable[Tensor]) -> None:
    """Keep CPU aliases that a collective got until its backend has let go of them. The caller keeps none of them.

    See [Note: Tensors that a backend still holds]. This list holds them meanwhile: a backend's thread that were the last to let
    go of a tensor would take the GIL a second time, unseen.
    """
    _prepare()
    _LENT.extend(
        alias for alias in aliases if alias.device.type == "cpu"
    )  # a device's backend has streams in place of threads


def take_back() -> None:
    """Forget the aliases that nobody holds any more."""
    for _ in range(len(_LENT)):
        try:
            alone = (_LENT.popleft(),)
        except IndexError:  # another thread was here
            return
        if not _is_back(alone):
            _LENT.append(alone[0])


def wait_for_backends(patience_s: float) -> None:
    """Return when backends hold no tensor of a collective that was waited for, or after so many seconds."""
    deadline_s = time.monotonic() + patience_s
    take_back()
    while _LENT and time.monotonic() < deadline_s:
        time.sleep(0.001)  # which lets go of the GIL
        take_back()


def _is_back(alone: tuple[Tensor]) -> bool:
    """Whether a tensor has no owner but this tuple, in C++ and in Python."""
    return alone[0]._use_count() == 1 and sys.getrefcount(alone[0]) == _ONE  # type: ignore[attr-defined]


_ONE = (lambda alone: sys.getrefcount(alone[0]))((torch.empty(0, device="cpu"),))
"""Reference count that Python reports for a tensor with a tuple as its only owner."""


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
    wait_for_backends(deadline_s - time.monotonic())

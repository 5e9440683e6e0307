"""What ranks do together beside training: in a thread of its own, over a group of its own, one errand after another."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist

from layerwise.comm.groups import Groups
from layerwise.comm.lifetimes import check_alive, named_alike


@dataclass
class Errand:
    """Something that was begun."""

    _future: Future[None]
    _is_seen: bool = False

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended in an error."""
        return self._future.done() and self._future.exception() is not None

    def wait(self) -> None:
        """Return when it is done; raise what it raised."""
        self._is_seen = True
        self._future.result()

    def wait_unless_seen(self) -> None:
        """The same for whoever comes after it: an error that somebody was told of is told once."""
        if self._is_seen:
            self._future.exception()
        else:
            self.wait()


class Errands:
    """Those of one rank; every rank begins the same ones in the same order.

    One at a time: the next waits for the one before it. A process that ends does so when they are done, also if its groups were
    destroyed before: whoever is still sending has a group of its own, and holds it.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._last: Errand | None = None

    def begin(self, do: Callable[[Groups], None]) -> Errand:
        """Have a thread do it, over groups that nobody else uses meanwhile. Every rank calls this."""
        self.finish()
        self._last = Errand(self._thread.submit(do, self._aside))
        return self._last

    def finish(self) -> None:
        """Wait for the last one; raise what it raised, unless somebody was told already."""
        last = self._last
        if last is None:
            return
        try:
            last.wait_unless_seen()
        finally:
            if last.is_done:  # however it has ended, on every rank; a wait may be interrupted
                self._last = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for; the same on all ranks."""
        return self._last is None

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="layerwise errands")

    @cached_property
    def _aside(self) -> Groups:
        """The same ranks with another group for small facts. Training may be in the middle of anything."""
        groups = self._groups
        if groups.training is None:
            return groups
        check_alive(groups.training, "saving in the background")
        like = None if dist.get_world_size() == groups.world else groups.control
        with named_alike(like):
            ranks = None if like is None else dist.get_process_group_ranks(like)
            found = replace(groups, control=groups.made.new_group(ranks, backend="gloo", like=like))
        _ = found.rank, found.world  # known from now on: torch forgets it once the user has destroyed all groups
        return found

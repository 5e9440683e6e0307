"""How long process groups live: made for one model, and destroyed once no rank has that model any more.

Each group keeps threads and connections. `unwrap()` destroys a model's groups at once, since every rank calls it. A model
that was only dropped goes at another time on every rank, whenever Python collects it, and destroying a group may have to
wait for its other ranks. So its groups are put aside, and the next model that is built, which all ranks do together, is
the moment to ask who has put aside what.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from layerwise.comm.facts import gather_facts
from layerwise.errors import StateError

_RETIRED: list[tuple[list[dist.ProcessGroup], Counter[str]]] = []
"""Groups whose model is gone on this rank, with what it had issued over each."""


class Made:
    """The process groups that were made for one model. Whoever may still send something over them holds this."""

    def __init__(self) -> None:
        self._groups: list[dist.ProcessGroup] = []
        self.issued: Counter[str] = Counter()
        """How many collectives this rank has launched over each group, by its name. Those that it waits for on the spot
        need no count: they leave nothing under way."""
        # Not for a process that ends: that leaves all of its groups anyway.
        weakref.finalize(self, _RETIRED.append, (self._groups, self.issued)).atexit = False

    def new_group(
        self, ranks: Sequence[int] | None = None, backend: str | None = None, like: dist.ProcessGroup | None = None
    ) -> dist.ProcessGroup:
        """A group that waits as long as the user's own does: torch would give it half an hour, whatever was asked for.

        Where the user gave a group (`like`), only its members are here to make another one.
        """
        own: Any = dist.group.WORLD if like is None else like
        if dist.get_backend(own) == "fake":  # ranks that are not there cannot be met in any other way
            backend = None
        timeout = getattr(getattr(own._get_backend(own._device_types[0]), "options", None), "_timeout", None)
        group: dist.ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks),
            timeout=timeout,
            backend=backend,
            use_local_synchronization=like is not None,
        )
        self._groups.append(group)
        _LIVE.add(self)
        return group

    def destroy(self) -> None:
        """Leave all of them. Every rank does, in one order."""
        while self._groups:
            group = self._groups.pop()
            if _is_alive(group):  # else the user left all groups before
                dist.destroy_process_group(group)


_LIVE: weakref.WeakSet[Made] = weakref.WeakSet()
"""Whoever made some, and is not put aside."""


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch still knows a group, and this rank is in it."""
    return group in distributed_c10d._world.pg_map


def check_alive(group: dist.ProcessGroup, what: str) -> None:
    """Raise if the user has left a group since a model was built on it. torch notices that in some calls only; over gloo others
    still go through."""
    if not _is_alive(group):
        raise StateError(
            f"the model belongs to a process group that is gone, and {what} would go over it: destroy_process_group() was called after "
            "its layerwise.DataParallel or layerwise.Optimizer was built. Build the module and these anew, over the process group "
            "that there is now, and load a checkpoint."
        )


def collect_dropped() -> None:
    """Have models go that nobody has any more: their params, in turn, know how they are brought up to date, and only
    Python's collector sees through that."""
    if _LIVE:
        gc.collect()


def destroy_retired(control: dist.ProcessGroup) -> None:
    """Destroy the groups that all of their ranks have put aside. Every rank of `control` calls it.

    A rank that still has its model keeps the group for all. So does one that had launched more than the others when it
    dropped its own: what it sent still waits for them, and destroying the group would wait as well.
    """
    found = {
        group.group_name: (group, issued) for groups, issued in list(_RETIRED) for group in groups if _is_alive(group)
    }
    told = dict(
        zip(
            dist.get_process_group_ranks(control),
            gather_facts({name: issued[name] for name, (_, issued) in found.items()}, control),
            strict=True,
        )
    )
    for name, (group, issued) in sorted(found.items()):
        if all(told.get(rank, {}).get(name) == issued[name] for rank in dist.get_process_group_ranks(group)):
            dist.destroy_process_group(group)
    for one in list(_RETIRED):  # which may grow at any time
        if not any(map(_is_alive, one[0])):
            _RETIRED.remove(one)


@contextmanager
def named_alike(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Have groups that only the members of a process group make bear one name on all of them. Every member calls it.

    torch names such a group after a number that a rank has counted for itself, and offers no other name: groups that it
    knows (up to 2.14), or groups that it has made (2.15). Ranks that are in different numbers of groups would wait for each
    other under different names.
    """
    if process_group is None:
        yield
        return
    own: Any = process_group
    kinds = [device.type for device in own._device_types]
    first, *_ = gather_facts(uuid4().hex, process_group, torch.device("cpu" if "cpu" in kinds else kinds[0]))
    numbers, torchs = count(), cast(Any, distributed_c10d)
    name_of = torchs._process_group_name
    torchs._process_group_name = lambda *_, **__: f"layerwise {first} {next(numbers)}"
    try:
        yield
    finally:
        torchs._process_group_name = name_of

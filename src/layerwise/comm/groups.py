"""Process groups: who takes part, and whether all of them planned the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from layerwise.comm.facts import gather_facts
from layerwise.errors import PlanMismatchError
from layerwise.layout.plan import first_difference

T = TypeVar("T")


@dataclass(frozen=True)
class Groups:
    """One group per concern: training moves tensors, control moves small facts and never waits behind a gradient."""

    training: dist.ProcessGroup | None
    control: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.training) if self.training is not None else 0

    @property
    def world(self) -> int:
        return dist.get_world_size(self.training) if self.training is not None else 1


NO_GROUPS = Groups(training=None, control=None)
"""A single process without torch.distributed."""


def default_world() -> int:
    """How many ranks the default process group has; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_ranks() -> Groups:
    """Groups over every rank of the default process group; none at all where there is no such group."""
    if not dist.is_available() or not dist.is_initialized():
        return NO_GROUPS
    # Not the default group itself: a bucket may be reduced in backward on one rank and in step() on another, and
    # whatever the user sends in between over the default group must not be taken for it.
    return Groups(training=dist.new_group(), control=dist.new_group(backend="gloo"))


_ERROR = "error"


def agree(groups: Groups, what: str, facts: Mapping[str, object]) -> None:
    """Raise on every rank, naming the first difference, unless all ranks have the same facts.

    Equal ranks exchange 32 bytes and no more. A rank that could not come up with facts says so with `failure(error)`.
    """
    if groups.control is None or groups.world == 1:
        return
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":"), default=repr).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(groups.world)]
    dist.all_gather(everyone, mine, group=groups.control)
    other = next((rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, everyone[0])), None)
    if other is None:
        return
    gathered = gather_facts(dict(facts), groups.control)
    for rank, theirs in enumerate(gathered):
        if _ERROR in theirs:
            raise PlanMismatchError(f"rank {rank} failed where others did not: {theirs[_ERROR]}")
    raise PlanMismatchError(
        f"ranks 0 and {other} derived different {what}: {first_difference(gathered[0], gathered[other])}. "
        "Build the same model with the same settings on every rank."
    )


def failure(error: Exception) -> dict[str, object]:
    """What a rank with an error brings to `agree` in place of facts."""
    return {_ERROR: f"{type(error).__name__}: {error}"}


def agree_despite(groups: Groups, what: str, error: Exception | None, facts: Mapping[str, object]) -> None:
    """`agree`, and then raise this rank's own error if it has one: an error on any rank ends in an error on all, and
    none of them hangs."""
    try:
        agree(groups, what, facts if error is None else failure(error))
    except PlanMismatchError:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error


def derive_together(
    groups: Groups, what: str, derive: Callable[[], T], facts_of: Callable[[T], Mapping[str, object]]
) -> T:
    """What `derive` returns, once all ranks have derived the same."""
    error: Exception | None = None
    derived: list[T] = []
    facts: Mapping[str, object] = {}
    try:
        derived.append(derive())
        facts = facts_of(derived[0])
    except Exception as caught:
        error = caught
    agree_despite(groups, what, error, facts)
    return derived[0]

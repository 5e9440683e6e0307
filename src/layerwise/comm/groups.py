"""Process groups: who takes part, and whether all of them planned the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from layerwise.errors import PlanMismatchError
from layerwise.layout.plan import first_difference


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
    return Groups(training=dist.group.WORLD, control=dist.new_group(backend="gloo"))


def agree(groups: Groups, what: str, facts: Mapping[str, object]) -> None:
    """Raise on every rank, naming the first difference, unless all ranks have the same facts. Equal ranks exchange 32
    bytes and no more."""
    if groups.control is None or groups.world == 1:
        return
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":"), default=repr).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(groups.world)]
    dist.all_gather(everyone, mine, group=groups.control)
    other = next((rank for rank, theirs in enumerate(everyone) if not torch.equal(theirs, everyone[0])), None)
    if other is None:
        return
    gathered: list[Mapping[str, object]] = [{} for _ in range(groups.world)]
    dist.all_gather_object(gathered, dict(facts), group=groups.control)
    raise PlanMismatchError(
        f"ranks 0 and {other} derived different {what}: {first_difference(gathered[0], gathered[other])}. "
        "Build the same model with the same settings on every rank."
    )

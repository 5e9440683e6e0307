"""Process groups: who takes part, and whether all of them planned the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from layerwise.comm.device_mesh import MESH_DIMS, default_world, places_of, ranks_by
from layerwise.comm.facts import gather_facts
from layerwise.comm.leaving import blocking
from layerwise.comm.lifetimes import Made, collect_dropped, destroy_retired, named_alike
from layerwise.comm.waiting import PATIENCE_S, impatient
from layerwise.config.debug import VARIABLE, Check, checks_on
from layerwise.errors import PlanMismatchError, StateError
from layerwise.layout.difference import first_difference
from layerwise.routing.spec import DENSE, DOMAINS, EXPERT

T = TypeVar("T")

Mesh: TypeAlias = DeviceMesh
"""What users arrange ranks with."""
ProcessGroup: TypeAlias = dist.ProcessGroup
"""What users choose ranks with."""


@dataclass(frozen=True)
class Domain:
    """The ranks that hold copies of the same params, seen from one of them."""

    group: dist.ProcessGroup | None
    """None where the rank is alone."""
    control: dist.ProcessGroup | None
    """For comparing collectives; None unless LAYERWISE_DEBUG checks them."""
    rank: int
    world: int


_ALONE = Domain(group=None, control=None, rank=0, world=1)


@dataclass(frozen=True)
class Groups:
    """One group per concern: training moves tensors, control moves small facts and never waits behind a gradient."""

    training: dist.ProcessGroup | None
    """All ranks, for what they decide together."""
    control: dist.ProcessGroup | None
    domains: Mapping[str, Domain]
    stages: tuple[tuple[int, ...], ...] = ((0,),)
    """Every pipeline stage's ranks, in the order of the dense domain: the same place on two stages is the same place in
    all of their domains."""
    expert_place: int = 0
    """Which part of the experts this rank has."""
    made: Made = field(default_factory=Made)
    """All groups that were made for a model."""
    checks: frozenset[Check] = frozenset()
    """Checks that LAYERWISE_DEBUG names, the same on every rank."""

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.training) if self.training is not None else 0

    @cached_property
    def world(self) -> int:
        return dist.get_world_size(self.training) if self.training is not None else 1

    @cached_property
    def stage(self) -> int:
        """The pipeline stage of this rank."""
        return next(stage for stage, ranks in enumerate(self.stages) if self.rank in ranks)

    @property
    def place(self) -> list[int]:
        """The pipeline stage of this rank, and its place among the ranks that share out experts."""
        return [self.stage, self.expert_place]

    @property
    def expert_places(self) -> int:
        """Into how many parts the experts are shared out."""
        return len(self.stages[self.stage]) // self.domains[EXPERT].world

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The pipeline stage of every rank."""
        found = {rank: stage for stage, ranks in enumerate(self.stages) for rank in ranks}
        return tuple(found[rank] for rank in range(self.world))


NO_GROUPS = Groups(training=None, control=None, domains=dict.fromkeys(DOMAINS, _ALONE))
"""A single process without torch.distributed."""


def alone() -> Groups:
    """A single process without torch.distributed; refused where a launcher started several, each of which would train a
    model of its own without a word."""
    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdigit() and int(launched) > 1:
        raise StateError(
            f"a launcher started {launched} ranks (WORLD_SIZE={launched}), but there is no process group: every rank would "
            "train a model of its own. Call layerwise.init() before the model is wrapped."
        )
    return NO_GROUPS


def check_still_alone(groups: Groups) -> None:
    """Raise if ranks have met since a model was wrapped for a single process: nobody would average its gradients."""
    if groups.training is None and default_world() > 1:
        raise StateError(
            f"the model was wrapped for a single process, and now there is a process group of {default_world()} ranks: nobody "
            "would average gradients over them. Call layerwise.init() first, then wrap the model."
        )


def device_of(groups: Groups) -> torch.device:
    """Where tensors may lie that all ranks exchange."""
    kinds = _kinds(groups)
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _kinds(groups: Groups) -> list[str]:
    """The types of devices between which the training group moves tensors."""
    own: Any = groups.training
    return ["cpu"] if own is None else [device.type for device in own._device_types]


def check_reach(groups: Groups, device: torch.device) -> None:
    """Raise unless ranks can exchange what lies on a device: with CPU offload params are where the group may not reach."""
    if groups.world > 1 and device.type not in _kinds(groups):
        raise ValueError(
            f"params are on {device.type} (CPU offload?), and the process group moves tensors on {' and '.join(_kinds(groups))} only: "
            "expected a group with a backend for both. Call init_process_group('cpu:gloo,cuda:nccl')."
        )


def check_process_group(process_group: object) -> None:
    """Raise unless a process group (or None) is one that this rank is in."""
    if process_group is None:
        return
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group must be a torch ProcessGroup that this rank is in, got {type(process_group).__name__}. Wrap the "
            "model on the ranks of the group only, or leave it out for all ranks."
        )
    if process_group not in distributed_c10d._world.pg_map:
        raise ValueError("process_group was destroyed: expected one that its ranks can still meet in. Make a new one.")


def members(process_group: dist.ProcessGroup) -> list[int]:
    """The ranks of a process group, by their numbers in the default one."""
    return dist.get_process_group_ranks(process_group)


def all_ranks(process_group: dist.ProcessGroup | None = None) -> Groups:
    """Every rank of a process group (the default one) as data parallel; a single process where there is no such
    group."""
    if not dist.is_available() or not dist.is_initialized():
        return alone()
    if process_group is dist.group.WORLD:
        process_group = None
    # Not the user's group itself: a bucket may be reduced in backward on one rank and in step() on another, and
    # whatever the user sends in between over that group must not be taken for it.
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    collect_dropped()
    made = Made()
    with named_alike(process_group):
        training = made.new_group(ranks, like=process_group)
        control = made.new_group(ranks, backend="gloo", like=process_group)
    destroy_retired(control)
    world = dist.get_world_size(training)
    everyone = Domain(group=training, control=control, rank=dist.get_rank(training), world=world)
    groups = Groups(
        training=training,
        control=control,
        domains=dict.fromkeys(DOMAINS, everyone if world > 1 else _ALONE),
        stages=(tuple(range(world)),),
        made=made,
    )
    checks = derive_together(groups, "environments", checks_on, lambda found: {VARIABLE: ",".join(sorted(found))})
    return replace(groups, checks=checks)


def arranged(everyone: Groups, mesh: DeviceMesh | None, *, dims: Sequence[str] = MESH_DIMS) -> Groups:
    """Arrange the ranks of `everyone` as these dims of a mesh do. Every rank calls it."""
    if mesh is None or everyone.training is None:
        return everyone
    places = places_of(mesh, dims)
    stages = ranks_by(places, ("pp",))
    shared = {stages[0]: (everyone.training, everyone.control)} if len(stages) == 1 else {}
    domains = {
        DENSE: my_domain(stages, shared, everyone),
        EXPERT: my_domain(ranks_by(places, ("pp", "ep")), shared, everyone),
    }
    return replace(everyone, domains=domains, stages=stages, expert_place=places[everyone.rank].get("ep", 0))


def my_domain(
    sets: Sequence[tuple[int, ...]],
    shared: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup | None]],
    groups: Groups,
) -> Domain:
    """The set that this rank is in. Every rank makes all groups, in the same order: torch asks for that."""
    for ranks in sets:
        if ranks not in shared and len(ranks) > 1:
            control = _group_to_compare_over(ranks, groups)
            shared[ranks] = groups.made.new_group(ranks), control
    rank = dist.get_rank()
    mine = next(ranks for ranks in sets if rank in ranks)
    if len(mine) == 1:
        return _ALONE
    group, control = shared[mine]
    return Domain(group=group, control=control, rank=mine.index(rank), world=len(mine))


def _group_to_compare_over(ranks: tuple[int, ...], groups: Groups) -> dist.ProcessGroup | None:
    """A control group of these ranks where LAYERWISE_DEBUG checks collectives, else None. Every rank calls it."""
    return groups.made.new_group(ranks, backend="gloo") if "collectives" in groups.checks else None


def tie_groups(groups: Groups, stages_by_tie: Mapping[str, Sequence[int]]) -> dict[str, Domain]:
    """For each tie that this rank's stage has a part in: the ranks at the same place of all its stages."""
    found = {}
    for tie, stages in sorted(stages_by_tie.items()):
        for ranks in zip(*(groups.stages[stage] for stage in stages), strict=True):
            control = _group_to_compare_over(ranks, groups)
            group = groups.made.new_group(ranks)
            if groups.rank in ranks:
                found[tie] = Domain(group=group, control=control, rank=ranks.index(groups.rank), world=len(ranks))
    return found


_ERROR = "error"


def agree(groups: Groups, what: str, facts: Mapping[str, object], *, across_stages: bool = False) -> None:
    """Raise on every rank, naming the first difference, unless all ranks of each pipeline stage have the same facts, or
    all ranks of all stages.

    Equal ranks exchange 32 bytes and no more. A rank that could not come up with facts says so with `failure(error)`.
    """
    if groups.control is None or groups.world == 1:
        return
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":"), default=repr).encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device="cpu")
    everyone = [torch.empty_like(mine) for _ in range(groups.world)]
    with _waiting(groups, what):
        blocking(dist.all_gather, everyone, mine, group=groups.control)
    compared = [0 if across_stages else min(groups.stages[stage]) for stage in groups.stage_of]
    pairs = [(first, rank) for rank, first in enumerate(compared) if not torch.equal(everyone[first], everyone[rank])]
    # Every rank of a stage may have failed alike: then its peers agree, and only the other stages do not know.
    if not pairs and (len(groups.stages) == 1 or not any_rank(groups, _ERROR in facts)):
        return
    gathered = gather_facts(dict(facts), groups.control)
    for rank, theirs in enumerate(gathered):
        if _ERROR in theirs:
            raise PlanMismatchError(f"rank {rank} failed where others did not: {theirs[_ERROR]}")
    first, other = pairs[0]
    raise PlanMismatchError(
        f"ranks {first} and {other} derived different {what}: {first_difference(gathered[first], gathered[other])}. "
        "Build the same model with the same settings on every rank."
    )


def _waiting(groups: Groups, what: str) -> AbstractContextManager[None]:
    """Where ranks meet to compare something: one that comes alone says so."""
    return impatient(
        f"rank {groups.rank} has waited {PATIENCE_S:.0f} s for other ranks, to compare {what} with theirs: every rank has to make this "
        "call, and none must skip it, as after 'if rank == 0:'."
    )


def any_rank(groups: Groups, flag: bool) -> bool:
    """Whether the flag is set on any rank; all of them ask."""
    if groups.control is None:
        return flag
    count = torch.tensor([int(flag)], device="cpu")
    blocking(dist.all_reduce, count, group=groups.control)
    return bool(count)


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


def share(groups: Groups, derive: Callable[[], Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Every rank's facts, in order of rank. If any rank fails to derive its own, all of them raise."""
    try:
        mine: Mapping[str, object] = derive()
        error = None
    except Exception as caught:
        mine, error = failure(caught), caught
    if groups.control is None:
        if error is not None:
            raise error
        return [mine]
    with _waiting(groups, "facts"):
        gathered = gather_facts(dict(mine), groups.control)
    if error is not None:
        raise error
    for rank, theirs in enumerate(gathered):
        if _ERROR in theirs:
            raise PlanMismatchError(f"rank {rank} failed where others did not: {theirs[_ERROR]}")
    return gathered

"""How buckets are reduced: by collectives of their own, over all ranks that hold copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import layerwise
from layerwise.comm import groups
from layerwise.comm.collectives import Communicator
from layerwise.dtypes import DType
from layerwise.engine import reducer, reductions
from layerwise.layout import buckets
from layerwise.layout import plan as plan_module
from layerwise.layout.buckets import BucketPlan
from layerwise.layout.reduce_groups import ReduceGroup
from layerwise.memory.replicas import Replica
from layerwise.parallel import data_parallel
from layerwise.parallel.data_parallel import DataParallel
from tests import worlds
from tests.arrangements import Arrangement
from tests.ranks import raised
from tests.reference.oracle import Hyper
from tests.regressions.cases import (
    Case,
    Mistake,
    arranged,
    collectives_noted,
    compared,
    in_place_of,
    key_of,
)
from tests.worlds import rules

# ------------------------------------------------------------------------------------------------ their collectives


def unmixed_launches(rank: int, world: int) -> list[str]:
    """Later chunks launch all their buckets together, and such a group held buckets to be reduce-scattered beside
    buckets to be all-reduced.

    Here reduce groups are split by each bucket's own plan, and a chunk whose buckets agree is one group.
    """

    def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        plan = model.plan
        found = []
        for group in plan.reduce_groups:
            kinds = {(plan.buckets[index].domain, plan.buckets[index].reducer) for index in group.buckets}
            if kinds != {(group.domain, group.reducer)}:
                found.append(f"reduce group {group.buckets} mixes {sorted(kinds)}")
        later = {bucket.index for buffer in plan.buffers if buffer.key.chunk for bucket in buffer.buckets}
        kinds = {(plan.buckets[index].domain, plan.buckets[index].reducer) for index in later}
        num_groups = sum(group.buckets[0] in later for group in plan.reduce_groups)
        expected = 4 if plan.options.layout == "compact" else 2  # dense and expert, and of each two families
        if len(kinds) != expected or num_groups != expected:
            found.append(f"the later chunk has {num_groups} reduce groups for {sorted(kinds)}")
        if sorted(index for group in plan.reduce_groups for index in group.buckets) != list(range(len(plan.buckets))):
            found.append("a bucket is in no reduce group, or in two")
        return found

    for layout in ("compact", "flat"):
        if found := arranged(rank, world, Arrangement(chunks=2, layouts=(layout,), steps=2), also):
            return found
    return []


def launched_by_chunk(rank: int) -> Any:
    def reduce_groups(buffers: Any) -> tuple[ReduceGroup, ...]:
        members: dict[tuple[int, int], list[BucketPlan]] = {}
        for buffer in buffers:
            for bucket in buffer.buckets:
                alone = -1 if buffer.key.chunk else bucket.index
                members.setdefault((buffer.key.chunk, alone), []).append(bucket)
        together = [sorted(found, key=lambda bucket: bucket.index) for found in members.values()]
        found = [ReduceGroup(b[0].domain, b[0].reducer, tuple(bucket.index for bucket in b)) for b in together]
        return tuple(sorted(found, key=lambda group: group.buckets[-1]))

    return mock.patch.object(plan_module, "reduce_groups", reduce_groups)


def own_collectives(rank: int, world: int) -> list[str]:
    """One global flag decided how all buckets were reduced, though buffers differed: matrices all-reduced, the rest
    reduce-scattered.

    Here the collective is a field of the bucket, and every call is compared with it.
    """
    with collectives_noted() as names:

        def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
            issued = sorted(name for name in names if name.startswith("reduce"))
            names.clear()
            kind_of = {"matrix": "all_reduce", "other": "reduce_scatter"}
            expected = sorted(
                f"reduce {kind_of[key_of(model.plan, bucket).family]} of {bucket.label}"
                for bucket in model.plan.buckets
            )
            return [] if issued == expected else [f"reduced by {issued}, expected {expected}"]

        return compared(rank, world, worlds.Case(layout="compact", steps=2), also)


def planned_by_one_flag(rank: int) -> Any:
    facts = {layout: replace(facts, reduces="all_reduce") for layout, facts in buckets.FACTS_BY_LAYOUT.items()}
    return mock.patch.object(buckets, "FACTS_BY_LAYOUT", facts)


def reduced_by_one_flag(rank: int) -> Any:
    def everywhere(replica: Replica, grad_dtype: DType, communicator: Communicator, divide: int) -> Any:
        return reductions._Everywhere(replica, grad_dtype, communicator, divide)

    return mock.patch.object(reducer, "reduction_of", everywhere)


# ------------------------------------------------------------------------------------------------ meshes


def all_ranks_reduce(rank: int, world: int) -> list[str]:
    """Several instances of an optimizer, each over part of the data-parallel ranks, beside a layout that sums over one
    instance only: gradients were summed over too few ranks. It has to be refused.

    Here there is one optimizer per model, and a mesh has to hold every rank along dims whose meaning is known. Anything
    else is refused, on all ranks.
    """
    found = arranged(rank, world, Arrangement(ep=2, layouts=("compact",), steps=2))
    meshes = {
        "instances": init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("instance", "dp")),
        "part of the ranks": DeviceMesh("cpu", torch.arange(world // 2), mesh_dim_names=("dp",)),
    }
    for name, mesh in meshes.items():
        text = raised(lambda mesh=mesh: DataParallel(worlds.Few(), layout="compact", mesh=mesh))
        if not text.startswith("ValueError: mesh has the"):
            return [*found, f"rank {rank}: a mesh of {name} is not refused: {text}"]
    model = DataParallel(worlds.Few(), layout="compact")
    first = layerwise.Optimizer(model, **rules(Hyper()))
    text = raised(lambda: layerwise.Optimizer(model, **rules(Hyper())))
    del first  # until now it has the model
    return found + ([] if text.startswith("StateError") else [f"a second optimizer is not refused: {text}"])


def any_mesh_will_do(rank: int) -> Any:
    return mock.patch.object(data_parallel, "check_mesh", return_value=None)


def dense_over_dp_only(rank: int) -> Any:
    """Dense params are reduced over the ranks that share experts: a part of those that hold copies of them."""

    def narrowed(real: Callable[..., Any]) -> Callable[..., Any]:
        def ranks_by(places: Any, dims: Sequence[str]) -> Any:
            return real(places, ("pp", "ep"))

        return ranks_by

    def one_stage(real: Callable[..., Any]) -> Callable[..., Any]:
        def arranged(*given: Any, **more: Any) -> Any:
            with in_place_of(groups, "ranks_by", narrowed):
                made = real(*given, **more)
            return replace(made, stages=(tuple(range(dist.get_world_size())),))

        return arranged

    return in_place_of(data_parallel, "arranged", one_stage)


CASES = (
    Case(
        name="R29",
        title="buckets that are launched together are reduced alike",
        world=2,
        check=unmixed_launches,
        mistakes=(
            Mistake(
                what="later chunks launch reduce-scatters and all-reduces together",
                put_in=launched_by_chunk,
                seen_as="reduce group .* mixes",
            ),
        ),
    ),
    Case(
        name="R30",
        title="a bucket's collective is its own",
        world=2,
        check=own_collectives,
        mistakes=(
            Mistake(
                what="one flag plans the collective of all buckets",
                put_in=planned_by_one_flag,
                seen_as="reduced by .*, expected",
            ),
            Mistake(
                what="one flag chooses the collective of all buckets",
                put_in=reduced_by_one_flag,
                seen_as="ContractError: .*the schedule has a reduce_scatter here, the call is a all_reduce",
            ),
        ),
    ),
    Case(
        name="R31",
        title="gradients are summed over all ranks, or the mesh is refused",
        world=4,
        check=all_ranks_reduce,
        mistakes=(
            Mistake(
                what="any mesh is accepted",
                put_in=any_mesh_will_do,
                seen_as="a mesh of instances is not refused",
            ),
            Mistake(
                what="dense params are reduced over the ranks of one expert domain",
                put_in=dense_over_dp_only,
                seen_as="reduced gradient of tall.weight",
            ),
        ),
    ),
)

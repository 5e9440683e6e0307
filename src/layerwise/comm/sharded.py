"""Params that torch's own fully_shard() or parallelize_module() has cut: what is read off them, and the memory behind
them. The only reader of DTensors.

What is read is plain numbers (ranks, shape of the mesh, placements), and boxes are derived from those alone. torch's own
offsets are not asked for: they are wrong for two uneven cuts of one dim (13 rows over 3 x 2 ranks).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from layerwise.comm.device_mesh import default_world, num_stages, stages_of
from layerwise.comm.groups import (
    Groups,
    all_ranks,
    arranged,
    derive_together,
    my_domain,
    share,
)
from layerwise.errors import PlanMismatchError
from layerwise.layout.meshes import Cut, Placed
from layerwise.layout.shards import Ranks
from layerwise.routing.spec import EXPERT

_SPEC: Callable[[object], object] = attrgetter("_spec")
_LOCAL: Callable[[object], Tensor] = attrgetter("_local_tensor")


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor."""
    tensors = sys.modules.get("torch.distributed.tensor")  # who has not imported it has none
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def refuse_first_fsdp(model: nn.Module) -> None:
    """Raise for a model that is, or has in it, FSDP in its first version, which keeps params in flat ones of its own."""
    first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")  # who has not imported it has none
    found = first and next(
        (module for module in model.modules() if isinstance(module, first.FullyShardedDataParallel)), None
    )
    if found is not None:
        raise TypeError(
            "model is sharded by torch's FullyShardedDataParallel (FSDP1), whose flat params hold no matrices: expected FSDP2. Call "
            "torch.distributed.fsdp.fully_shard(module) in its place, and pass that to layerwise.Optimizer."
        )


def local_of(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: a DTensor's own memory; of anything else, itself."""
    own: Any = tensor
    local: Tensor = own._local_tensor if is_sharded(tensor) else tensor
    return local


def shape_here(tensor: Tensor) -> torch.Size:
    """The shape of what this rank has of a tensor."""
    return local_of(tensor).shape


def placed_alike(own: Tensor, other: Tensor) -> bool:
    """Whether two tensors lie on the same ranks in the same way."""
    if not is_sharded(own) or not is_sharded(other):
        return is_sharded(own) is is_sharded(other)
    one, two = _as_dtensor(own), _as_dtensor(other)
    return bool(one.device_mesh == two.device_mesh and one.placements == two.placements)


class PlacedAlike:
    """Whether tensors lie as sharded params do, asked in every step: with no step of Python for each of them, as long as what
    says so is what said so before."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._specs: list[object] = []

    def locals_of(self, tensors: Sequence[Tensor | None]) -> list[Tensor] | None:
        """What this rank has of each, if all are DTensors that lie as the params do."""
        if len(set(map(type, tensors))) != 1 or not is_sharded(tensors[0]):
            return None
        specs = list(map(_SPEC, tensors))
        if len(specs) != len(self._specs) or not all(map(is_, specs, self._specs)):
            if not all(map(placed_alike, self._params, cast("Sequence[Tensor]", tensors))):
                return None
            self._specs = specs
        return list(map(_LOCAL, tensors))


def like(param: Tensor, local: Tensor) -> Tensor:
    """A tensor that lies as a param does, of which this rank has `local`: not a copy of it."""
    if not is_sharded(param):
        return local.view(param.shape)
    return _beside(param, local.view(shape_here(param)), _as_dtensor(param).placements)


def _beside(param: Tensor, local: Tensor, placements: Sequence[Any]) -> Tensor:
    """A DTensor of a sharded param's shape on its mesh, of which this rank has `local`."""
    own = _as_dtensor(param)
    found: Tensor = type(own.data).from_local(
        local, own.device_mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
    )
    return found


class Elsewhere(NamedTuple):
    """How a param's gradient is placed where that is not as the param is: most often a sum that torch has put off."""

    placements: tuple[Any, ...]
    shape: torch.Size
    """Of what this rank has of it."""

    @classmethod
    def of(cls, param: Tensor, grad: Tensor) -> Elsewhere | None:
        """None where it is placed as the param is."""
        return None if placed_alike(param, grad) else cls(tuple(_as_dtensor(grad).placements), shape_here(grad))

    def brought(self, param: Tensor, grad: Tensor | None) -> Tensor:
        """What this rank has of a gradient, once torch has brought it to the param's placements, as it would for any optimizer.
        All ranks of the mesh call it; who has no gradient takes part with zeros."""
        own = _as_dtensor(param)
        if grad is None:
            grad = _beside(param, torch.zeros(self.shape, dtype=param.dtype, device=param.device), self.placements)
        return local_of(_as_dtensor(grad).redistribute(own.device_mesh, own.placements))


def on_one_mesh(param: Tensor, grad: Tensor) -> bool:
    """Whether a sharded param and its gradient are on the same mesh."""
    return bool(_as_dtensor(param).device_mesh == _as_dtensor(grad).device_mesh)


def reshard(chunks: Iterable[nn.Module]) -> None:
    """Have modules of fully_shard() hold the params that are trained, and not gathered copies of them: a forward without
    backward may have left those. Nothing is sent for it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in (module for chunk in chunks for module in chunk.modules()) if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def gathered_params(module: nn.Module) -> frozenset[Tensor]:
    """The params within modules that fully_shard() was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return frozenset()
    units = (unit for unit in module.modules() if isinstance(unit, fsdp.FSDPModule))
    return frozenset(param for unit in units for param in unit.parameters())


def groups_of(params: Mapping[str, nn.Parameter], process_group: dist.ProcessGroup | None) -> Groups:
    """The ranks that the meshes of sharded params have, all in one group, together with those of the other stages of their
    pipeline. Every rank of these calls it."""
    meshes = [_as_dtensor(param).device_mesh for param in params.values() if is_sharded(param)]
    everyone = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    if process_group is None or dist.get_world_size(process_group) == dist.get_world_size():
        pipeline = _pipeline_of(meshes, everyone)
        if pipeline is not None:
            return arranged(all_ranks(), pipeline, dims=("pp",))
    if process_group is not None:
        return all_ranks(process_group)
    if everyone == set(range(dist.get_world_size())):
        return all_ranks()
    for mesh in meshes:
        if mesh.ndim == 1 and set(mesh.mesh.tolist()) == everyone:
            return all_ranks(mesh.get_group())
    raise ValueError(
        f"params lie on the ranks {sorted(everyone)}, of {dist.get_world_size()}: nobody knows a process group of just these. Pass "
        "process_group=, with all ranks that hold a part of this model."
    )


def _pipeline_of(meshes: Iterable[Any], ranks: Collection[int]) -> Any | None:
    """The mesh over all ranks that these meshes are parts of, if it has a dim "pp" and the ranks are those of one of its
    stages. torch has no public name for what a mesh is a part of."""
    for mesh in meshes:
        root = getattr(mesh, "_get_root_mesh", lambda own=mesh: own)()
        if num_stages(root) > 1 and root.mesh.numel() == dist.get_world_size():
            return root if any(set(ranks) <= set(stage) for stage in stages_of(root)) else None
    return None


def placements_of(
    groups: Groups,
    params: Mapping[str, nn.Parameter],
    domain_of: Callable[[str], str],
    gathered: Collection[Tensor] = (),
) -> tuple[Groups, dict[str, Placed]]:
    """How every sharded param is cut, the same on every rank, and the groups of ranks that hold them between them. `gathered`
    are those that fully_shard() brings together for a forward.

    A mesh that has a part of the ranks only is one of several: fully_shard() over the data-parallel dim of a larger mesh
    knows nothing of the other dims. Ranks tell each other which meshes there are. A param that modules name as one of
    experts is another one on each mesh; any other is a copy of the same one, which the first step makes sure of.
    """
    mine: dict[str, Placed] = {}
    stage = groups.stages[groups.stage]

    def parts() -> dict[str, object]:
        ranks = [0] if groups.training is None else dist.get_process_group_ranks(groups.training)
        number_of = {ranks[number]: place for place, number in enumerate(stage)}
        for fqn, param in params.items():
            if is_sharded(param):
                mine[fqn] = _read(fqn, param, number_of, is_gathered=param in gathered)
        return {
            fqn: [list(placed.ranks), domain_of(fqn) == EXPERT]
            for fqn, placed in mine.items()
            if len(placed.ranks) < len(stage)
        }

    told: list[Any] = share(groups, parts)
    # Every rank looks at all stages: groups of experts are made by all ranks, and what is wrong on one is wrong for all.
    by_stage = [_meshes_by_name([told[rank] for rank in ranks]) for ranks in groups.stages]
    if any(experts for _, experts in by_stage):
        groups = _with_experts(groups, [experts for _, experts in by_stage])
    meshes_of, apart = by_stage[groups.stage]
    me = stage.index(groups.rank)

    def cut() -> dict[str, Placed]:
        for fqn, meshes in meshes_of.items():
            if fqn in apart:
                own = next(sorted(mesh) for mesh in meshes if me in mesh)
                mine[fqn] = mine[fqn]._replace(ranks=tuple(own.index(rank) for rank in mine[fqn].ranks))
            elif len(meshes) > 1:
                mine[fqn] = mine[fqn].on_all(meshes)
        for fqn, placed in mine.items():
            _check_box(fqn, params[fqn], placed, groups.domains[domain_of(fqn)].rank)
        return mine

    return groups, derive_together(groups, "placements", cut, lambda _: {})


def _meshes_by_name(
    told: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, tuple[Ranks, ...]], dict[str, tuple[Ranks, ...]]]:
    """The meshes of every param of a stage that is on a part of its ranks, from what each rank says of its own; and of these,
    those of experts on several meshes."""
    names = sorted({fqn for facts in told for fqn in facts})
    meshes_of = {fqn: _meshes(fqn, [facts[fqn][0] if fqn in facts else None for facts in told]) for fqn in names}
    experts = {fqn for facts in told for fqn, (_, is_expert) in facts.items() if is_expert}
    return meshes_of, {fqn: meshes for fqn, meshes in meshes_of.items() if fqn in experts and len(meshes) > 1}


def _as_dtensor(tensor: Tensor) -> Any:
    return tensor


def _read(fqn: str, param: Tensor, number_of: Mapping[int, int], *, is_gathered: bool) -> Placed:
    """One param's place, with ranks by their number in the group. Dims of a mesh that are fully_shard()'s are its first ones: one
    that cuts, and before it one that copies where there are replicas."""
    own = _as_dtensor(param)
    ranks = own.device_mesh.mesh.flatten().tolist()
    outside = [rank for rank in ranks if rank not in number_of]
    if outside:
        raise ValueError(
            f"param {fqn!r} lies on the ranks {ranks}, of which {outside} are not in the process group: expected all of them. "
            "Pass process_group=, with all ranks that hold a part of this model."
        )
    mesh = own.device_mesh.mesh
    if any(bool((mesh.diff(dim=along) <= 0).any()) for along in range(mesh.ndim)):
        raise ValueError(
            f"param {fqn!r} is on the mesh {mesh.tolist()}: expected ranks in ascending order along every dim. torch cuts some params "
            "by the order of the mesh and some by that of its process groups, which is ascending. Build it with init_device_mesh()."
        )
    return Placed(
        tuple(number_of[rank] for rank in ranks),
        tuple(own.device_mesh.mesh.shape),
        tuple(_cut(fqn, placement, param.ndim) for placement in own.placements),
        0 if not is_gathered else 2 if mesh.ndim > 1 and own.placements[0].is_replicate() else 1,
    )


def _cut(fqn: str, placement: Any, ndim: int) -> Cut | None:
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int) or placement.is_partial():
        raise TypeError(
            f"param {fqn!r} has the placement {placement}: expected Shard(dim) or Replicate(). Redistribute it first."
        )
    return Cut(dim % ndim, getattr(placement, "split_factor", 1))


def _meshes(fqn: str, told: Sequence[list[int] | None]) -> tuple[Ranks, ...]:
    """The meshes that a param is on, from what every rank says of its own, by their first ranks."""
    found = sorted({tuple(ranks) for ranks in told if ranks is not None}, key=min)
    for rank, ranks in enumerate(told):
        others = [mesh for mesh in found if rank in mesh and list(mesh) != ranks]
        if others:
            raise PlanMismatchError(
                f"param {fqn!r} is on the ranks {ranks} as rank {rank} sees it, and on {list(others[0])} as others do: expected every rank "
                "to have it on one mesh. Shard the model in the same way on all of them."
            )
    if len({len(mesh) for mesh in found}) > 1:
        raise PlanMismatchError(
            f"param {fqn!r} is on meshes of different sizes, {list(map(list, found))}: expected copies to be cut alike."
        )
    return tuple(found)


def _with_experts(groups: Groups, apart: Sequence[Mapping[str, Sequence[Ranks]]]) -> Groups:
    """Add a domain of experts to `groups`: one set of ranks for each mesh of experts of each stage; a stage without experts is one
    set. Every rank calls it."""
    sets_of = [_sets_of_experts(ranks, meshes) for ranks, meshes in zip(groups.stages, apart, strict=True)]
    everywhere = [tuple(ranks) for sets in sets_of for ranks in sets]
    if sum(map(len, everywhere)) != default_world():
        raise ValueError(
            f"experts are on the ranks {everywhere}, of {default_world()}: expected every rank to have experts."
        )
    domain = my_domain(everywhere, {}, groups)
    place = next(number for number, ranks in enumerate(sets_of[groups.stage]) if groups.rank in ranks)
    return replace(groups, domains={**groups.domains, EXPERT: domain}, expert_place=place)


def _sets_of_experts(stage: Ranks, apart: Mapping[str, Sequence[Ranks]]) -> list[Ranks]:
    """The ranks of a stage, one set per mesh of its experts."""
    if not apart:
        return [stage]
    (first, sets), *others = ((fqn, {tuple(sorted(mesh)) for mesh in meshes}) for fqn, meshes in apart.items())
    for fqn, theirs in others:
        if theirs != sets:
            raise ValueError(
                f"params {first!r} and {fqn!r} are experts on different meshes: {sorted(sets)} and {sorted(theirs)}. Expected all "
                "experts on one."
            )
    if sorted(rank for ranks in sets for rank in ranks) != list(range(len(stage))):
        raise ValueError(
            f"param {first!r} is on the ranks {sorted(sets)}, of {len(stage)}: expected every rank to have experts."
        )
    return [tuple(stage[number] for number in ranks) for ranks in sorted(sets)]


def _check_box(fqn: str, param: Tensor, placed: Placed, rank: int) -> None:
    """Raise unless what was derived is what is there."""
    box, here = placed.box(tuple(param.shape), rank), shape_here(param)
    if box.shape != tuple(here) and (box.numel or here.numel()):
        raise ValueError(
            f"param {fqn!r} of shape {tuple(param.shape)} has a local tensor of shape {tuple(here)} here; its placements "
            f"{_as_dtensor(param).placements} on a mesh of {placed.mesh} make it {box.shape}. Cut it with fully_shard() or "
            "distribute_tensor(), in equal chunks."
        )
    if not local_of(param).is_contiguous():
        raise ValueError(
            f"param {fqn!r} has a local tensor with the strides {local_of(param).stride()}: expected its elements in the order of its "
            "indices. Call contiguous() on the weight before it is sharded."
        )

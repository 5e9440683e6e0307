"""Cutting a module with torch's own fully_shard() and parallelize_module(): the meshes, and who is cut over which.

Dense params lie on a mesh (replicate, fsdp, tp), experts on one of their own, (replicate, fsdp * tp / ep, ep), over the same
ranks: those of tensor parallelism share out experts, too, and each of them sends a part of their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from layerwise.comm.dispatch import ExpertRanks
from layerwise.comm.joining import Grid, Ranks
from layerwise.comm.tensor_parallel import ALL_HEADS_HERE, TensorRanks
from layerwise.layout.placing import MeshSizes, expert_dim

Style = Literal["columns", "columns, to gather", "columns, gathered", "rows", "vocabulary"]
"""How a layer takes part in tensor parallelism. columns: every rank has some of its outputs. to gather: the module around it
brings them together. gathered: the layer does. rows: every rank has some of its inputs, and outputs are summed. vocabulary:
every rank has some rows of an embedding."""


_STYLES: dict[Style, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "columns, to gather": lambda: ColwiseParallel(use_local_output=False),
    "columns, gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rows": RowwiseParallel,
    "vocabulary": lambda: RowwiseParallel(input_layouts=Replicate()),
}


@dataclass(frozen=True)
class Meshes:
    """All ranks, arranged twice."""

    sizes: MeshSizes
    dense: DeviceMesh
    """Dims "replicate", "fsdp" and "tp"."""
    experts: DeviceMesh
    """Dims "replicate", "fsdp" and "ep"."""


def arrange_meshes(ranks: Ranks, sizes: MeshSizes) -> tuple[Grid, Meshes]:
    """Arrange all ranks for a model that torch cuts. Every rank must ask for the same: groups are made in here."""
    replicate, fsdp, tp, ep = sizes
    if ranks.world != sizes.world or fsdp * tp % ep != 0:
        raise ValueError(
            f"{ranks.world} ranks cannot be arranged as replicate={replicate} times fsdp={fsdp} times tp={tp}, with ep={ep}."
        )
    kind = ranks.device.type
    dense = init_device_mesh(kind, (replicate, fsdp, tp), mesh_dim_names=("replicate", "fsdp", "tp"))
    experts = init_device_mesh(kind, (replicate, sizes.experts_fsdp, ep), mesh_dim_names=("replicate", "fsdp", "ep"))
    grid = Grid(
        mesh=None,
        pp=1,
        pp_coord=0,
        data_world=replicate * fsdp,
        data_coord=ranks.rank // tp,
        pipeline=None,
        # fully_shard() averages over the ranks that hold a part of the same expert. Rows have come from ep times as many, and
        # those of tp ranks are rows of the same samples.
        experts=ExpertRanks(experts.get_group("ep") if ep > 1 else None, ranks.rank % ep, ep, grad_scale=tp / ep),
        tensor=TensorRanks(dense["tp"], ranks.rank % tp, tp) if tp > 1 else ALL_HEADS_HERE,
    )
    return grid, Meshes(sizes, dense, experts)


def cut(
    model: nn.Module,
    meshes: Meshes,
    *,
    units: Iterable[nn.Module],
    experts: Iterable[nn.Module],
    styles: Mapping[str, Style],
    reshard_after_forward: bool,
    reduce_dtype: torch.dtype,
) -> None:
    """Cut a model that every rank has built alike, but for its own experts: in place, and nothing is sent.

    `units` are gathered one at a time, and what they leave over with the model; `experts` are modules that hold stacks of them;
    `styles` says which layers take part in tensor parallelism, by glob.
    """
    sizes = meshes.sizes
    shared = _shared_params(model)

    def shard(module: nn.Module, mesh: DeviceMesh, dim_of: Callable[[nn.Parameter], int]) -> None:
        fully_shard(
            module,
            mesh=mesh["replicate", "fsdp"] if sizes.replicate > 1 else mesh["fsdp"],
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=lambda param: Shard(dim_of(param)),
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        )

    if sizes.tp > 1:
        plan = {
            name: _STYLES[style]()
            for name, _ in model.named_modules()
            for glob, style in styles.items()
            if fnmatchcase(name, glob)
        }
        parallelize_module(model, meshes.dense["tp"], plan, src_data_rank=None)
        for names in shared:
            _tie(model, names)
    for module in experts:
        if sizes.ep > 1:
            _as_stacks(module, meshes.experts["ep"])
        shard(module, meshes.experts, lambda param: expert_dim(tuple(param.shape), sizes))
    for module in (*units, model):
        shard(module, meshes.dense, lambda _: 0)


def _as_stacks(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make params, of which every rank has its own experts, the stacks of all experts that they are parts of."""
    for name, param in list(module.named_parameters(recurse=False)):
        stack = DTensor.from_local(param.detach(), mesh, (Shard(0),), run_check=False)
        setattr(module, name, nn.Parameter(stack, requires_grad=param.requires_grad))


def _shared_params(model: nn.Module) -> list[list[str]]:
    """Names of params that are one and the same: parallelize_module() gives each of them one of its own."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _tie(model: nn.Module, names: Sequence[str]) -> None:
    first = model.get_parameter(names[0])
    for name in names[1:]:
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, first)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """A backward in here leaves the reduction of gradients to a later one."""
    own: Any = model
    own.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        own.set_requires_gradient_sync(True)

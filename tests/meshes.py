"""Models that torch's own `fully_shard` and `parallelize_module` have cut over a mesh, and who holds what of them, worked
out by hand.

What a rank holds is sliced here from whole tensors by the place that the rank has on the mesh, chunk of chunk in the order in
which the cuts were made. Nothing is asked of torch or of the library for it: torch's own offsets of an uneven chunk of a
chunk are wrong, and the library is what is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.test_splits import FUSIONS, Fused

Blocks = list[tuple[int, int]] | list[Tensor] | None
"""What the matrices of a param are, as the oracle takes it: row ranges, or where each element lies; None for a stack."""


class Model(nn.Module):
    """A model of the zoo: it says which of its params are matrices and how tensor parallelism cuts its modules."""

    blocks: nn.ModuleList

    def matrices(self) -> dict[str, Blocks]:
        """Written down by hand."""
        raise NotImplementedError

    def styles(self) -> dict[str, str]:
        """By name of a module: "rows" or "columns" of its weight are cut, or it is "copied"."""
        raise NotImplementedError

    def retie(self) -> None:
        """Make one param of what tensor parallelism has made two of."""


class DenseBlock(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)


class Dense(Model):
    """Embedding, two blocks of attention and MLP with biases, and a head, tied or not."""

    tied = False

    def __init__(self, width: int = 8, hidden: int = 20, vocabulary: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(DenseBlock(width, hidden) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.retie()

    def retie(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def matrices(self) -> dict[str, Blocks]:
        return {
            f"blocks.{block}.{name}.weight": [(0, getattr(self.blocks[block], name).out_features)]
            for block in range(2)
            for name in ("query", "out", "up", "down")
        }

    def styles(self) -> dict[str, str]:
        found = {"embed": "rows", "head": "rows", "norm": "copied"}
        for block in range(2):
            found |= {f"blocks.{block}.{name}": "rows" for name in ("query", "up")}
            found |= {f"blocks.{block}.{name}": "columns" for name in ("out", "down")}
            found[f"blocks.{block}.norm"] = "copied"
        return found


class Tied(Dense):
    """The head is the embedding."""

    tied = True


class GroupedBlock(nn.Module):
    """Fused weights whose parts end inside of shards: 12 + 4 + 4 rows, and 7 + 7."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.qkv = nn.Linear(width, width + 8)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (12, 4, 4), "gate_up.weight": (self.hidden, self.hidden)}


class Grouped(Model):
    """Grouped-query attention with fused QKV, and a fused gate and up."""

    hidden = 7

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 12)
        self.blocks = nn.ModuleList([GroupedBlock(12, self.hidden)])
        self.head = nn.Linear(12, 9, bias=False)

    def matrices(self) -> dict[str, Blocks]:
        return {
            "blocks.0.qkv.weight": [(0, 12), (12, 16), (16, 20)],
            "blocks.0.out.weight": [(0, 12)],
            "blocks.0.gate_up.weight": [(0, self.hidden), (self.hidden, 2 * self.hidden)],
            "blocks.0.down.weight": [(0, 12)],
        }

    def styles(self) -> dict[str, str]:
        return {
            "blocks.0.qkv": "rows",
            "blocks.0.gate_up": "rows",
            "blocks.0.out": "columns",
            "blocks.0.down": "columns",
        }


class Fours(Grouped):
    """The same with numbers that four divides: whoever holds the wrong rows has as many of them."""

    hidden = 8


class Experts(nn.Module):
    """Two stacks: of any two ranks or three, one has more experts than another, or none."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.domain = "dense"

    def param_domains(self) -> dict[str, str]:
        return {"up": self.domain, "down": self.domain}


class MixtureBlock(nn.Module):
    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)


class Mixture(Model):
    """A mixture of five stacked experts."""

    experts = 5

    def __init__(self, width: int = 6, hidden: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.blocks = nn.ModuleList([MixtureBlock(self.experts, width, hidden)])
        self.head = nn.Linear(width, 9, bias=False)

    def matrices(self) -> dict[str, Blocks]:
        return {"blocks.0.query.weight": [(0, 6)], "blocks.0.experts.up": None, "blocks.0.experts.down": None}

    def styles(self) -> dict[str, str]:
        return {"embed": "columns", "blocks.0.query": "rows"}


class Quartet(Mixture):
    """Four experts: ranks can have equally many."""

    experts = 4


class Fusions(Model):
    """Every way in which weights are fused, stacked and stored. None of it lines up with shards."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Fused(name, torch.empty(fusion.shape)) for name, fusion in FUSIONS.items())

    def matrices(self) -> dict[str, Blocks]:
        found: dict[str, Blocks] = {}
        for number, fusion in enumerate(FUSIONS.values()):
            places = torch.arange(math.prod(fusion.shape)).view(fusion.shape)
            found[f"blocks.{number}.weight"] = [part.contiguous() for part in fusion.take_apart(places)]
        return found

    def styles(self) -> dict[str, str]:
        return {f"blocks.{number}": ("rows", "columns")[number % 2] for number in range(len(FUSIONS))}


class Few(Model):
    """One matrix, for however many ranks, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.only = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(4)

    def matrices(self) -> dict[str, Blocks]:
        return {"only.weight": [(0, 5)]}

    def styles(self) -> dict[str, str]:
        return {"only": "columns"}


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(4, 13)
        self.columns = nn.Linear(5, 7, bias=False)


class Odd(Model):
    """Odd numbers of rows and columns: 13 rows on 3 x 2 ranks are 3 + 3 + 1 and 2 + 2 + 2 of them. Two rows, and a bias of
    two, which most ranks have nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock()])
        self.short = nn.Linear(9, 2)
        self.wide = nn.Linear(11, 3, bias=False)

    def matrices(self) -> dict[str, Blocks]:
        return {
            "blocks.0.rows.weight": [(0, 13)],
            "blocks.0.columns.weight": [(0, 7)],
            "short.weight": [(0, 2)],
            "wide.weight": [(0, 3)],
        }

    def styles(self) -> dict[str, str]:
        return {"blocks.0.rows": "rows", "blocks.0.columns": "columns", "short": "rows", "wide": "columns"}


class Even(Model):
    """Many equal matrices and little else: what travels can be told without a plan."""

    def __init__(self, count: int = 24, rows: int = 24, cols: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(cols, rows, bias=False)) for _ in range(count))

    def matrices(self) -> dict[str, Blocks]:
        return {f"blocks.{block}.0.weight": [(0, linear[0].out_features)] for block, linear in enumerate(self.blocks)}  # type: ignore[index]

    def styles(self) -> dict[str, str]:
        return {}


MODELS: dict[str, Callable[[], Model]] = {
    "dense": Dense,
    "grouped": Grouped,
    "fours": Fours,
    "mixture": Mixture,
    "quartet": Quartet,
    "fusions": Fusions,
    "tied": Tied,
    "few": Few,
    "odd": Odd,
    "even": Even,
}


class Placed(ParallelStyle):
    """What has no style of torch's: cut along a dim, or copied. Experts are cut along their first."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(param, device_mesh, [self.placement])))
        return module


Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the dims of a mesh, the last one running fastest."""


@dataclass(frozen=True)
class Mesh:
    """Ranks, and what is cut over them: `replicate` and `shard` are those of `fully_shard`, `tp` of tensor parallelism, `ep` of
    expert parallelism and `eshard` of `fully_shard` for the experts."""

    axes: Axes
    experts: Axes = ()
    """Of the experts, where they have a mesh of their own."""
    expert_dim: int = 0
    """Which dim of the experts `eshard` cuts."""
    experts_are: Literal["one stack", "declared", "apart"] = "one stack"
    """Whether the experts are DTensors over `ep`, and nobody says that they are experts; or are, and their module says so; or
    those of each rank along `ep` are params of its own, with the same names."""
    reshard: bool = True
    """ZeRO-3; else weights stay gathered between forward and backward."""
    blocks_only: bool = False
    """Only the blocks are cut, and what is beside them is plain: the same on every rank."""
    ddp: bool = False
    """Nothing is cut: a DistributedDataParallel has copies on all ranks. What an optimizer keeps lies as it likes then."""

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    def cut(self, model: Model) -> nn.Module:
        """Have torch cut a model, and return what an optimizer is given. Every rank calls it."""
        if self.ddp:
            return DistributedDataParallel(model)
        sizes = dict(self.axes)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if "tp" in sizes:
            parallelize_module(model, mesh["tp"], {name: _style(model, name) for name in model.styles()})
            model.retie()
        held = [module for module in model.modules() if isinstance(module, Experts)] if self.experts else []
        if held:
            self._cut_experts(held)
        if "shard" in sizes:
            shared: dict[str, Any] = {
                "mesh": mesh["replicate", "shard"] if "replicate" in sizes else mesh["shard"],
                "reshard_after_forward": self.reshard,
                # The others of a block are on another mesh.
                "ignored_params": {param for experts in held for param in experts.parameters()},
            }
            for block in model.blocks:
                fully_shard(block, **shared)
            if not self.blocks_only:
                fully_shard(model, **shared)
        return model

    def _cut_experts(self, held: Sequence[Experts]) -> None:
        sizes = dict(self.experts)
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for experts in held:
            experts.domain = "dense" if self.experts_are == "one stack" else "expert"
            if self.experts_are == "apart":
                place, ranks = mesh.get_local_rank("ep"), sizes["ep"]
                for name, param in list(experts.named_parameters()):
                    own = param.detach().chunk(ranks)[place].clone()
                    experts.register_parameter(name, nn.Parameter(own))
            else:
                parallelize_module(experts, mesh["ep"], Placed(Shard(0)))
            if "eshard" in sizes:
                fully_shard(experts, mesh=mesh["eshard"], shard_placement_fn=lambda param: Shard(self.expert_dim))

    def cuts(self, model: Model, fqn: str) -> list[tuple[int, int, str]]:
        """What is done to a param, in order: a dim of it is cut into so many chunks, one per place along an axis."""
        sizes, found = dict(self.axes), []
        if self.experts and ".experts." in fqn:
            sizes = dict(self.experts)
            found = [(0, sizes["ep"], "ep")]
            return found + ([(self.expert_dim, sizes["eshard"], "eshard")] if "eshard" in sizes else [])
        style = model.styles().get(fqn.rpartition(".")[0], "copied")
        is_bias = fqn.endswith(".bias")
        if "tp" in sizes and (style == "rows" or (style == "columns" and not is_bias)):
            found.append((0 if style == "rows" else 1, sizes["tp"], "tp"))
        if "shard" in sizes and not (self.blocks_only and not fqn.startswith("blocks.")):
            found.append((0, sizes["shard"], "shard"))
        return found

    def box(
        self, model: Model, fqn: str, shape: Sequence[int], rank: int, axes: Sequence[str] | None = None
    ) -> tuple[slice, ...]:
        """What a rank holds of a param; or would hold if it were cut along some axes only."""
        place = _place(self._axes_of(fqn), rank)
        starts, stops = [0] * len(shape), list(shape)
        for dim, chunks, axis in self.cuts(model, fqn):
            if axes is not None and axis not in axes:
                continue
            length = math.ceil((stops[dim] - starts[dim]) / chunks)
            start = min(starts[dim] + place[axis] * length, stops[dim])
            starts[dim], stops[dim] = start, min(start + length, stops[dim])
        return tuple(map(slice, starts, stops))

    def tensor_blocks(
        self, model: Model, fqn: str, shape: Sequence[int], matrices: Sequence[Tensor]
    ) -> list[tuple[Tensor, int]]:
        """The matrices of a param cut where tensor parallelism has cut it, block by block in the order of its ranks, and which of
        them each is of. A matrix says where its elements lie in the flattened param, and so does a block."""
        elements = torch.arange(math.prod(shape)).view(tuple(shape))
        held = [self.box(model, fqn, shape, rank, ("tp",)) for rank in range(self.world)]
        blocks = [elements[box] for _, box in sorted({tuple(part.start for part in box): box for box in held}.items())]
        found = []
        for number, matrix in enumerate(matrices):
            for block in blocks:
                inside = torch.isin(matrix.contiguous(), block.contiguous())
                rows, cols = inside.any(dim=1), inside.any(dim=0)
                if inside.any():
                    if not torch.equal(inside, rows[:, None] & cols):
                        raise AssertionError(f"a block of {fqn} is no matrix: the scene itself is wrong")
                    found.append((matrix[rows][:, cols], number))
        return found

    def data_place(self, model: Model, fqn: str, rank: int) -> tuple[int, int]:
        """The number of a rank among those whose gradients of a param torch averages, and how many they are: 0 and 1 where
        it averages none."""
        sizes, place = dict(self._axes_of(fqn)), _place(self._axes_of(fqn), rank)
        is_cut = any(axis in ("shard", "eshard") for _, _, axis in self.cuts(model, fqn))
        averaged = ("all",) if self.ddp else ("replicate", "shard", "eshard") if is_cut else ()
        number, count = 0, 1
        for axis in sizes:
            if axis in averaged:
                number, count = number * sizes[axis] + place[axis], count * sizes[axis]
        return number, count

    def _axes_of(self, fqn: str) -> Axes:
        return self.experts if self.experts and ".experts." in fqn else self.axes

    def first_expert(self, model: Model, rank: int, fqn: str) -> int:
        """The number, among all experts, of what a rank calls its first."""
        if self.experts_are != "apart" or ".experts." not in fqn:
            return 0
        (_, chunks, axis), *_ = self.cuts(model, fqn)
        return _place(self.experts, rank)[axis] * getattr(model, "experts", 0) // chunks


def _place(axes: Axes, rank: int) -> dict[str, int]:
    """Where a rank sits along every axis."""
    place: dict[str, int] = {}
    for name, size in reversed(axes):
        rank, place[name] = divmod(rank, size)
    return place


def _style(model: Model, name: str) -> ParallelStyle:
    """torch's own style for what we call rows and columns: the two are the other way round for embeddings."""
    module, style = model.get_submodule(name), model.styles()[name]
    if isinstance(module, nn.LayerNorm):
        return SequenceParallel()
    if isinstance(module, nn.Linear | nn.Embedding):
        return ColwiseParallel() if (style == "rows") == isinstance(module, nn.Linear) else RowwiseParallel()
    return Placed(Replicate() if style == "copied" else Shard(0 if style == "rows" else 1))


def _fsdp(world: int, **more: Any) -> Mesh:
    return Mesh((("shard", world),), **more)


def _hsdp(replicas: int, shards: int) -> Mesh:
    return Mesh((("replicate", replicas), ("shard", shards)))


def _fsdp_tp(shards: int, tp: int) -> Mesh:
    return Mesh((("shard", shards), ("tp", tp)))


MESHES: dict[str, Mesh] = {
    **{f"fsdp {world}": _fsdp(world) for world in (2, 3, 4, 6, 8)},
    **{f"zero-2 {world}": _fsdp(world, reshard=False) for world in (2, 3)},
    **{f"blocks only {world}": _fsdp(world, blocks_only=True) for world in (2, 3)},
    **{f"hsdp {a}x{b}": _hsdp(a, b) for a, b in ((2, 2), (2, 3), (2, 4))},
    **{f"fsdp+tp {a}x{b}": _fsdp_tp(a, b) for a, b in ((2, 2), (3, 2), (2, 3), (2, 4))},
    **{f"tp {world}": Mesh((("tp", world),)) for world in (2, 3, 4)},
    **{f"ddp {world}": Mesh((("all", world),), ddp=True) for world in (2, 3, 4)},
    "hsdp+tp 2x2x2": Mesh((("replicate", 2), ("shard", 2), ("tp", 2))),
    **{f"ep {world}": Mesh((("all", world),), experts=(("ep", world),)) for world in (2, 3)},
    **{f"ep beside fsdp {world}": Mesh((("shard", world),), experts=(("ep", world),)) for world in (2, 4)},
    **{
        f"ep x fsdp {a}x{b} dim {dim}": Mesh((("shard", a * b),), experts=(("eshard", a), ("ep", b)), expert_dim=dim)
        for a, b in ((2, 2), (3, 2), (2, 4))
        for dim in (0, 1)
    },
    **{
        f"{how} ep x fsdp 2x2 dim {dim}": Mesh(
            (("shard", 4),), experts=(("eshard", 2), ("ep", 2)), expert_dim=dim, experts_are=how
        )
        for how in ("declared", "apart")
        for dim in (0, 1)
    },
    "ep x fsdp in hsdp 2x2": Mesh((("replicate", 2), ("shard", 2)), experts=(("eshard", 2), ("ep", 2)), expert_dim=1),
}


def fits(mesh: str, model: str) -> bool:
    """Whether there is anything to see: a mesh of experts needs experts, and one for blocks needs blocks."""
    found = MESHES[mesh]
    if found.experts_are == "apart" or model == "quartet":
        return found.experts_are == "apart" and model == "quartet"
    return model == "mixture" or not (found.experts or (found.blocks_only and model == "few"))


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit. What is empty is empty: `fully_shard` leaves (0, 0) of what tensor parallelism left (5, 0) of."""
    return torch.equal(found, expected) or found.numel() == expected.numel() == 0


def like(param: Tensor, mine: Tensor) -> Tensor:
    """This rank's part of something, placed as a param is."""
    mine = mine.reshape(local(param).shape).contiguous()
    if not isinstance(param, DTensor):
        return mine
    return DTensor.from_local(
        mine, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def with_losses(model: Model) -> None:
    """Have a cut model's forward return a loss, of gradients by name: those are its gradients, once every rank has called
    backward and torch has averaged them. It goes through the forward of every part that `fully_shard` was called on."""
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule) or module is model:
            module.forward = partial(_loss, module, f"{prefix}." if prefix else "")


def _loss(module: nn.Module, prefix: str, grads: dict[str, Tensor]) -> Tensor:
    total = torch.zeros(())
    for name, child in module.named_children():
        total = total + (child(grads) if isinstance(child, FSDPModule) else _loss(child, f"{prefix}{name}.", grads))
    for name, param in module.named_parameters(recurse=False):
        if prefix + name in grads:  # what is tied has one name
            total = total + (local(param) * grads[prefix + name]).sum()
    return total


def placement(tensor: Tensor) -> str:
    """How a tensor is placed, in words."""
    if not isinstance(tensor, DTensor):
        return f"plain {tuple(tensor.shape)}"
    mesh, mine = tensor.device_mesh.mesh.tolist(), tuple(tensor.to_local().shape)
    return f"{tuple(tensor.shape)} {tensor.placements} on {mesh}, here {mine}"

"""Parity runs with experts, pipeline stages, chunks and ties: every rank beside one oracle of the whole model.

The oracle knows nothing of ranks. It has every expert of every expert-parallel place, every stage's params, and a tied
weight once; its gradients are, for every data-parallel place, what the ranks of all stages at that place deliver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import layerwise
from tests import seams
from tests.reference.oracle import Hyper, Oracle
from tests.worlds import (
    accumulated,
    anywhere,
    deliver,
    differences,
    gradient,
    hash_of,
    layout_named,
    reduced_differences,
    rounds_of,
    rules,
)

WIDTH, VOCABULARY = 12, 17


class Experts(nn.Module):
    """Two local experts with biases, which are no matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2, 6, 10))
        self.bias = nn.Parameter(torch.empty(2, 6))
        self.lone = nn.Parameter(torch.empty(7, 5))

    def param_domains(self) -> dict[str, str]:
        return dict.fromkeys(("up", "bias", "lone"), "expert")

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"lone": (7,)}


class Stage(nn.Module):
    """A part of a model: dense matrices, a norm, maybe experts, an embedding or a head. No two stages are alike."""

    def __init__(self, number: int, *, has_experts: bool, has_embedding: bool, has_head: bool) -> None:
        super().__init__()
        if has_embedding:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 8, bias=True)
        self.shared = nn.Linear(8, 10, bias=False)
        self.tall = nn.Linear(7, 31 + 4 * number, bias=False)
        if has_experts:
            self.experts = Experts()
        self.square = nn.Linear(9, 9, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        if has_head:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (WIDTH, 4, 4)}


_TIED: dict[str, tuple[str, ...]] = {
    "": (),
    "embedding": ("embed.weight", "head.weight"),
    "matrix": ("shared.weight",),
}
"""Which params are copies of one: the embedding of the first stage and the head of the last, or a matrix on all."""


@dataclass
class Arrangement:
    """How a model is spread over ranks, and what is done with it."""

    pp: int = 1
    ep: int = 1
    chunks: int = 1
    experts: bool = True
    tied: Literal["", "embedding", "matrix"] = ""
    layouts: tuple[str, ...] = ("flat",)
    steps: int = 2
    accumulation: int = 1
    missing: bool = False
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    bucket_mib: float = 0.002
    """512 elements in fp32: several buckets, and one that holds several params."""
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of DataParallel."""
    hyper: dict[str, Any] = field(default_factory=lambda: {"clip": 0.5})
    norm_groups: dict[str, str] = field(default_factory=dict)
    """Name of a norm group -> glob, over the names that params have on their stages."""
    sabotage: str = ""
    """"tie" or "experts": leave one copy or one expert place out of the oracle's sums. The comparison must see it."""

    def places(self, world: int) -> Iterator[tuple[int, int]]:
        """(stage, place among the data-parallel ranks of a stage) of every rank: the mesh is (pp, dp, ep)."""
        for rank in range(world):
            yield divmod(rank, world // self.pp)

    def stage_modules(self, stage: int) -> list[nn.Module]:
        """The chunks that a stage's ranks hold: with two stages of two chunks, 0 and 2, 1 and 3 of the model. What is
        tied within one rank is one tensor."""
        numbers = [stage + chunk * self.pp for chunk in range(self.chunks)]
        last = self.pp * self.chunks - 1
        modules = [
            Stage(number, has_experts=self.experts, has_embedding=number == 0, has_head=number == last)
            for number in numbers
        ]
        holders = [
            (module.get_submodule(fqn.partition(".")[0]), "weight")
            for module in modules
            for fqn in _TIED[self.tied]
            if fqn in dict(module.named_parameters())
        ]
        for holder, name in holders[1:]:
            setattr(holder, name, getattr(*holders[0]))
        return list(modules)

    def is_tied(self, fqn: str) -> bool:
        return fqn.endswith(_TIED[self.tied]) if self.tied else False

    def called(self, stage: int, expert_place: int, fqn: str) -> str:
        """What the oracle calls a param of a rank."""
        if self.is_tied(fqn):
            return "tied"
        return f"stage {stage} {fqn}" + (f" at {expert_place}" if "experts." in fqn else "")

    def norm_group_of(self, fqn: str) -> str:
        return next((name for name, pattern in self.norm_groups.items() if fnmatchcase(fqn, pattern)), "")


_MATRICES: dict[str, list[tuple[int, int]] | None] = {
    "qkv.weight": [(0, WIDTH), (WIDTH, WIDTH + 4), (WIDTH + 4, WIDTH + 8)],
    "shared.weight": [(0, 10)],
    "square.weight": [(0, 9)],
    "experts.up": None,
    "experts.lone": [(0, 7)],
}
"""Which params are matrices, written down by hand: the embedding and the head, tied or not, are none. `tall` is one too,
of another height on every stage."""


@dataclass
class GroupedOracle(Oracle):
    """The oracle with norm groups of several params."""

    members: dict[str, list[str]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

    def _clip(self, world: int) -> None:
        """Every named group by a norm of its own, all others by one."""
        apart = [fqn for fqns in self.members.values() for fqn in fqns]
        self.norms = {name: self._norm(fqns, world) for name, fqns in self.members.items()}
        if self.hyper.clip is None:
            return
        for fqns in ([fqn for fqn in self.averaged if fqn not in apart], *self.members.values()):
            coefficient = self.hyper.clip / (self._norm(fqns, world) + 1e-6)
            if coefficient < 1.0:
                for fqn in fqns:
                    self.averaged[fqn] = self.averaged[fqn] * coefficient


def named(modules: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Params by the names that they have on a rank, each tensor once."""
    prefixes = [""] if len(modules) == 1 else [f"{number}." for number in range(len(modules))]
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in zip(prefixes, modules, strict=True):
        for fqn, param in module.named_parameters():
            found.setdefault(id(param), (f"{prefix}{fqn}", param))
    return dict(found.values())


def filled(arrangement: Arrangement, stage: int, expert_place: int, wrong: int = 0) -> list[nn.Module]:
    """A stage's modules with values that depend on what the oracle calls each param; `wrong` makes them others."""
    modules = arrangement.stage_modules(stage)
    with torch.no_grad():
        for fqn, param in named(modules).items():
            name = arrangement.called(stage, expert_place, fqn)
            is_copy = name == "tied" and stage > 0
            generator = torch.Generator().manual_seed(hash_of(name) + wrong + is_copy)
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return [module.to(arrangement.dtype) for module in modules]


def _oracle(arrangement: Arrangement) -> GroupedOracle:
    params: dict[str, Tensor] = {}
    matrices: dict[str, list[tuple[int, int]] | None] = {}
    members: dict[str, list[str]] = {name: [] for name in arrangement.norm_groups}
    for stage in range(arrangement.pp):
        for expert_place in range(arrangement.ep):
            for fqn, param in named(filled(arrangement, stage, expert_place)).items():
                name = arrangement.called(stage, expert_place, fqn)
                if name in params:
                    continue
                params[name] = param.detach().clone()
                local = fqn.partition(".")[2] if arrangement.chunks > 1 else fqn
                if local in _MATRICES:
                    matrices[name] = _MATRICES[local]
                elif local == "tall.weight":
                    matrices[name] = [(0, param.shape[0])]
                group = arrangement.norm_group_of(fqn)
                if group:
                    members[group].append(name)
    apart = {name: name for fqns in members.values() for name in fqns}
    return GroupedOracle(params, matrices, Hyper(**arrangement.hyper, norm_groups=apart), members=members)


def gradients_of(arrangement: Arrangement, stage: int, place: int, step: int, micro: int) -> dict[str, Tensor]:
    """What the rank at a place of a stage delivers, by its own names."""
    found = {}
    for fqn, param in named(arrangement.stage_modules(stage)).items():
        name = arrangement.called(stage, place % arrangement.ep, fqn)
        key = f"{name} {stage}" if name == "tied" else name
        if arrangement.missing and (hash_of(f"{key} {step}") + place) % 3 == 0:
            continue
        found[fqn] = gradient(key, param.shape, place, step, micro).to(arrangement.dtype)
    return found


def _at_place(arrangement: Arrangement, place: int, step: int) -> dict[str, Tensor | None]:
    """What the ranks of all stages at one data-parallel place deliver together, as the oracle calls it."""
    total: dict[str, Tensor | None] = {}
    for stage in range(arrangement.pp):
        micros = [gradients_of(arrangement, stage, place, step, micro) for micro in range(arrangement.accumulation)]
        for fqn, grad in accumulated(micros).items():
            name = arrangement.called(stage, place % arrangement.ep, fqn)
            before = total.get(name)
            if arrangement.sabotage == "tie" and before is not None:
                continue
            if arrangement.sabotage == "experts" and "experts." in fqn and place >= arrangement.ep:
                continue
            total[name] = grad if before is None or grad is None else before + grad
    return total


def mesh_of(arrangement: Arrangement, world: int) -> DeviceMesh | None:
    """The mesh that an arrangement needs; None for data parallelism alone."""
    if arrangement.pp == 1 and arrangement.ep == 1:
        return None
    shape = (arrangement.pp, world // arrangement.pp // arrangement.ep, arrangement.ep)
    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))


def wrap_stage(
    arrangement: Arrangement, modules: list[nn.Module], layout: str, mesh: DeviceMesh | None
) -> layerwise.DataParallel:
    """The rank's part of the model as the library takes it."""
    copies = [fqn for fqn in named(modules) if arrangement.is_tied(fqn)] if arrangement.pp > 1 else []
    return seams.data_parallel(
        modules if arrangement.chunks > 1 else modules[0],
        mesh=mesh,
        ties=dict(zip(("the tie",), copies, strict=False)),
        layout=layout_named(layout),
        bucket_mib=arrangement.bucket_mib,
        grad_dtype=arrangement.grad_dtype,
        **arrangement.options,
    )


def train_arranged(rank: int, world: int, arrangement: Arrangement) -> list[str]:
    """Train on this rank in all layouts side by side, and beside the oracle; returns what differs, by name."""
    stage, place = list(arrangement.places(world))[rank]
    places, expert_place = world // arrangement.pp, place % arrangement.ep
    oracle, mesh = _oracle(arrangement), mesh_of(arrangement, world)
    # Only the first rank of a domain, and the first stage of a tie, start from the right values.
    wrong = 0 if place < arrangement.ep else rank
    arguments = rules(Hyper(**arrangement.hyper), norm_groups=arrangement.norm_groups)
    runs = []
    for layout in arrangement.layouts:
        model = wrap_stage(arrangement, filled(arrangement, stage, expert_place, wrong), layout, mesh)
        runs.append((layout, model, layerwise.Optimizer(model, **arguments, count_zeros=True)))

    def called(fqn: str) -> str:
        return arrangement.called(stage, expert_place, fqn)

    for step in range(arrangement.steps):
        oracle.step([_at_place(arrangement, other, step) for other in range(places)], arrangement.grad_dtype)
        micros = [gradients_of(arrangement, stage, place, step, micro) for micro in range(arrangement.accumulation)]
        found = []
        for layout, model, optimizer in runs:
            for micro, grads in enumerate(micros):
                deliver(model, grads, sync=micro == arrangement.accumulation - 1)
            seen = reduced_differences(model, oracle, called)
            optimizer.step()
            optimizer.zero_grad()
            seen += differences(model, optimizer, oracle, called, rounds_of(model, arrangement.accumulation))
            norms = {name: optimizer.stats.norms[name] for name in oracle.norms}
            if norms != oracle.norms:
                seen.append(f"norms {norms} against {oracle.norms}")
            found += [f"rank {rank} step {step} {layout}: {text}" for text in seen]
        if anywhere(found):
            return found
    return []


def fitting(arrangement: Arrangement, layouts: Sequence[str]) -> Arrangement:
    """The same with those layouts that its options can be combined with."""
    reducer, releases = arrangement.options.get("reducer", "collective"), arrangement.options.get("shard_grads")
    left = [
        layout
        for layout in layouts
        if not (layout == "replicated" and (reducer != "collective" or releases))
        and not (layout == "compact" and reducer == "collective" and releases)
    ]
    return replace(arrangement, layouts=tuple(left))

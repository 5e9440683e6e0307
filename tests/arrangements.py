"""Parity runs with experts, pipeline stages, chunks and ties: every rank beside one oracle of the whole model.

The oracle knows nothing of ranks. It has every expert of every expert-parallel place, every stage's params, and a tied
weight once; its gradients are, for every data-parallel place, what the ranks of all stages at that place deliver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from tests.reference.oracle import Hyper, Oracle
from tests.worlds import accumulated, deliver, differences, gradient, hash_of, reduced_differences, rules

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
    """A part of a model: dense matrices, a norm, maybe experts, an embedding or a head."""

    def __init__(self, *, has_experts: bool, has_embedding: bool, has_head: bool) -> None:
        super().__init__()
        if has_embedding:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 8, bias=True)
        self.tall = nn.Linear(7, 31, bias=False)
        if has_experts:
            self.experts = Experts()
        self.square = nn.Linear(9, 9, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        if has_head:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (WIDTH, 4, 4)}


_MATRICES: dict[str, list[tuple[int, int]] | None] = {
    "qkv.weight": [(0, WIDTH), (WIDTH, WIDTH + 4), (WIDTH + 4, WIDTH + 8)],
    "tall.weight": [(0, 31)],
    "square.weight": [(0, 9)],
    "experts.up": None,
    "experts.lone": [(0, 7)],
}
"""Which params are matrices, written down by hand: the embedding and the head, tied or not, are none."""


@dataclass
class Arrangement:
    """How a model is spread over ranks, and what is done with it."""

    pp: int = 1
    ep: int = 1
    chunks: int = 1
    experts: bool = True
    tied: bool = False
    layout: str = "flat"
    steps: int = 3
    accumulation: int = 1
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    exact: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    """More arguments of DataParallel."""
    hyper: dict[str, Any] = field(default_factory=lambda: {"clip": 0.5})

    def places(self, world: int) -> Iterator[tuple[int, int]]:
        """(stage, place among the data-parallel ranks of a stage) of every rank: the mesh is (pp, dp, ep)."""
        for rank in range(world):
            yield divmod(rank, world // self.pp)

    def stage_modules(self, stage: int) -> list[nn.Module]:
        """The chunks that a stage's ranks hold: with two stages of two chunks, 0 and 2, 1 and 3 of the model."""
        numbers = [stage + chunk * self.pp for chunk in range(self.chunks)]
        last = self.pp * self.chunks - 1
        return [
            Stage(has_experts=self.experts, has_embedding=number == 0, has_head=number == last) for number in numbers
        ]


def _filled(arrangement: Arrangement, stage: int, expert_place: int, wrong: int = 0) -> list[nn.Module]:
    """A stage's modules with values that depend on what the oracle calls each param; `wrong` makes them others."""
    modules = arrangement.stage_modules(stage)
    with torch.no_grad():
        for fqn, param in _named(modules).items():
            name = _called(arrangement, stage, expert_place, fqn)
            is_copy = name == "tied" and stage > 0
            generator = torch.Generator().manual_seed(hash_of(name) + wrong + is_copy)
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    return [module.to(arrangement.dtype) for module in modules]


def _named(modules: list[nn.Module]) -> dict[str, nn.Parameter]:
    if len(modules) == 1:
        return dict(modules[0].named_parameters())
    return {
        f"{number}.{fqn}": param for number, module in enumerate(modules) for fqn, param in module.named_parameters()
    }


def _called(arrangement: Arrangement, stage: int, expert_place: int, fqn: str) -> str:
    """What the oracle calls a param of a rank."""
    if arrangement.tied and fqn.endswith(("embed.weight", "head.weight")):
        return "tied"
    return f"stage {stage} {fqn}" + (f" at {expert_place}" if "experts." in fqn else "")


def _oracle(arrangement: Arrangement) -> Oracle:
    params: dict[str, Tensor] = {}
    matrices: dict[str, list[tuple[int, int]] | None] = {}
    for stage in range(arrangement.pp):
        for expert_place in range(arrangement.ep):
            for fqn, param in _named(_filled(arrangement, stage, expert_place)).items():
                name = _called(arrangement, stage, expert_place, fqn)
                params.setdefault(name, param.detach().clone())
                local = fqn.partition(".")[2] if arrangement.chunks > 1 else fqn
                if local in _MATRICES:
                    matrices[name] = _MATRICES[local]
    return Oracle(params, matrices, Hyper(**arrangement.hyper))


def _gradients(arrangement: Arrangement, stage: int, place: int, step: int, micro: int) -> dict[str, Tensor]:
    """What the rank at a place of a stage delivers, by its own names."""
    found = {}
    for fqn, param in _named(arrangement.stage_modules(stage)).items():
        name = _called(arrangement, stage, place % arrangement.ep, fqn)
        key = f"{name} {stage}" if name == "tied" else name
        found[fqn] = gradient(key, param.shape, place, step, micro, exact=arrangement.exact).to(arrangement.dtype)
    return found


def _at_place(arrangement: Arrangement, place: int, step: int) -> dict[str, Tensor | None]:
    """What the ranks of all stages at one data-parallel place deliver together, as the oracle calls it."""
    total: dict[str, Tensor | None] = {}
    for stage in range(arrangement.pp):
        micros = [_gradients(arrangement, stage, place, step, micro) for micro in range(arrangement.accumulation)]
        for fqn, grad in accumulated(micros).items():
            name = _called(arrangement, stage, place % arrangement.ep, fqn)
            before = total.get(name)
            total[name] = grad if before is None or grad is None else before + grad
    return total


def wrap_stage(arrangement: Arrangement, modules: list[nn.Module], rank: int, world: int) -> layerwise.DataParallel:
    """The rank's part of the model as the library takes it."""
    mesh = None
    if arrangement.pp > 1 or arrangement.ep > 1:
        shape = (arrangement.pp, world // arrangement.pp // arrangement.ep, arrangement.ep)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))
    ties = {}
    if arrangement.tied and arrangement.pp > 1:
        ties = {"embedding": fqn for fqn in _named(modules) if fqn.endswith(("embed.weight", "head.weight"))}
    return layerwise.DataParallel(
        modules if arrangement.chunks > 1 else modules[0],
        mesh=mesh,
        ties=ties,
        layout=arrangement.layout,
        bucket_mib=0.001,
        grad_dtype=arrangement.grad_dtype,
        **arrangement.options,
    )


def train_arranged(rank: int, world: int, arrangement: Arrangement) -> list[str]:
    """Train on this rank beside the oracle; returns what differs, by name."""
    stage, place = list(arrangement.places(world))[rank]
    places, expert_place = world // arrangement.pp, place % arrangement.ep
    oracle = _oracle(arrangement)
    # Only the first rank of a domain, and the first stage of a tie, start from the right values.
    is_first = place < arrangement.ep and place // arrangement.ep == 0
    modules = _filled(arrangement, stage, expert_place, wrong=0 if is_first else rank)
    model = wrap_stage(arrangement, modules, rank, world)
    optimizer = layerwise.Optimizer(model, **rules(Hyper(**arrangement.hyper)), count_zeros=True)

    def called(fqn: str) -> str:
        return _called(arrangement, stage, expert_place, fqn)

    for step in range(arrangement.steps):
        oracle.step([_at_place(arrangement, other, step) for other in range(places)], arrangement.grad_dtype)
        for micro in range(arrangement.accumulation):
            grads = _gradients(arrangement, stage, place, step, micro)
            deliver(model, grads, sync=micro == arrangement.accumulation - 1)
        found = reduced_differences(model, oracle, called)
        optimizer.step()
        optimizer.zero_grad()
        rounds = arrangement.accumulation if model.plan.shard_grads else 1
        found += differences(model, optimizer, oracle, called, rounds)
        if not math.isfinite(optimizer.stats.grad_norm):
            found.append("the norm is not finite")
        if found:
            return [f"rank {rank} step {step}: {text}" for text in found]
    return []

"""Storage that no line of the library knows of: rows dealt out round robin, two copies of each. Work, exchange, statistics and
updates follow from its two answers, which spans has rank r and who holds what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.groups import all_ranks
from layerwise.engine.engine import Engine
from layerwise.engine.settings import Settings
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan
from layerwise.layout.shards import Held, Ranks
from layerwise.layout.spans import Span
from layerwise.layout.work import plan_work
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import route_params
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from tests.marks import sampled
from tests.ranks import run_ranks
from tests.reference.oracle import Hyper, Oracle

SHAPES = {"first.weight": (11, 6), "second.weight": (5, 9), "third.weight": (7, 7), "norm.weight": (13, 1)}
QKV = [(0, 3), (3, 5)]
"""Row blocks of the second weight: two matrices in one param."""
STEPS = 4


@dataclass(frozen=True)
class RoundRobin:
    """One param. Row i is on ranks i % world and (i + 1) % world."""

    index: int
    fqn: str
    shape: tuple[int, int]
    world: int
    work: Any
    domain: str = "dense"
    tie: str = ""

    @property
    def label(self) -> str:
        return f"rows of {self.fqn}"

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    def rows(self, rank: int) -> list[int]:
        return [row for row in range(self.shape[0]) if rank in self.owners(row)]

    def owners(self, row: int) -> tuple[int, ...]:
        return tuple(sorted({row % self.world, (row + 1) % self.world}))

    def param_numel(self, fqn: str) -> int:
        return math.prod(self.shape)

    def shard_numel(self, rank: int) -> int:
        return len(self.rows(rank)) * self.shape[1]

    def spans(self, rank: int) -> tuple[Span, ...]:
        cols = self.shape[1]
        return tuple(
            Span(self.fqn, None, row * cols, (row + 1) * cols, place * cols)
            for place, row in enumerate(self.rows(rank))
        )

    def spans_of(self, fqn: str, rank: int) -> Sequence[Span]:
        return self.spans(rank)

    def copies(self, span: Span, rank: int) -> Ranks:
        return self.owners(span.start // self.shape[1])

    def held(self, matrix: Matrix, rank: int) -> int:
        return sum(matrix.numel_within(span.start, span.stop) for span in self.spans(rank))

    def ranks_of(self, matrix: Matrix) -> Ranks:
        return tuple(rank for rank in range(self.world) if self.held(matrix, rank))

    def holders(self, matrix: Matrix) -> list[Held]:
        return [(rank, rank + 1, numel, 1) for rank in range(self.world) if (numel := self.held(matrix, rank))]

    @property
    def most_spans(self) -> int:
        return max(len(self.rows(rank)) for rank in range(self.world))

    @property
    def num_holders(self) -> int:
        return sum(1 for rank in range(self.world) if self.rows(rank))

    @property
    def has_copies(self) -> bool:
        return any(len(self.owners(row)) > 1 for row in range(self.shape[0]))

    @property
    def is_parted(self) -> bool:
        return len({tuple(self.rows(rank)) for rank in range(self.world)} - {()}) > 1

    def to_json(self) -> dict[str, object]:
        return {"label": self.label, "world": self.world}


def toy_plan(world: int, policy: str) -> Plan:
    kinds = {"norm.weight": ModuleKind.NORM}
    table = ParamTable(
        tuple(
            ParamSpec(fqn=fqn, shape=shape, module_kind=kinds.get(fqn, ModuleKind.LINEAR), split=split(fqn))
            for fqn, shape in SHAPES.items()
        )
    )
    routes = route_params(table, None, strict=False)
    own = tuple(RoundRobin(index, fqn, shape, world, policy) for index, (fqn, shape) in enumerate(SHAPES.items()))
    return Plan(
        table=table,
        routes=routes,
        world=world,
        world_by_domain={"dense": world},
        ranks=world,
        options=Options(memory="params"),
        stages_by_tie={},
        buffers=(),
        works=(plan_work(own, routes, domain="dense", world=world, cohort_numel=60),),
        own=own,
    )


def split(fqn: str) -> layerwise.Split | None:
    if fqn != "second.weight":
        return None
    return layerwise.Split(grid=SHAPES[fqn], roles="rc", blocks=tuple(stop - start for start, stop in QKV))


class ToyEngine(Engine):
    """The engine as it is, with a plan from somewhere else."""

    policy = "balance"

    def _plan(self, params: Any) -> Plan:
        return toy_plan(self.groups.world, self.policy)


class Local(nn.Module):
    """What one rank has of the model: its rows of every weight."""

    def __init__(self, whole: dict[str, Tensor], plan: Plan, rank: int) -> None:
        super().__init__()
        for shard in plan.own:
            assert isinstance(shard, RoundRobin)
            name, _, leaf = shard.fqn.rpartition(".")
            holder = nn.Module()
            holder.register_parameter(leaf, nn.Parameter(whole[shard.fqn][shard.rows(rank)].clone()))
            self.add_module(name, holder)


def gradient(fqn: str, step: int) -> Tensor:
    """What somebody else has averaged already: the same on every rank, whole numbers over a power of two."""
    generator = torch.Generator().manual_seed(1000 * step + len(fqn))
    return torch.randint(-8, 9, SHAPES[fqn], generator=generator).float() / 8


def train(rank: int, world: int, policy: str, clip: float | None) -> list[str]:
    torch.manual_seed(3)
    whole = {fqn: torch.randn(shape) for fqn, shape in SHAPES.items()}
    plan = toy_plan(world, policy)
    module = Local(whole, plan, rank)
    ToyEngine.policy = policy
    engine = ToyEngine((module,), all_ranks(), Settings(options=plan.options))
    module.engine = engine  # type: ignore[assignment]
    optimizer = layerwise.Optimizer(
        module,
        matrix=layerwise.Muon(lr=0.02, weight_decay=0.1),
        other=layerwise.AdamW(lr=0.003, weight_decay=0.01),
        clip_grad_norm=clip,
    )
    matrices: dict[str, Any] = {fqn: [(0, shape[0])] for fqn, shape in SHAPES.items() if "norm" not in fqn}
    matrices["second.weight"] = QKV
    oracle = Oracle(
        {fqn: tensor.clone() for fqn, tensor in whole.items()},
        matrices,
        Hyper(lr=0.02, weight_decay=0.1, other_lr=0.003, other_weight_decay=0.01, clip=clip),
    )
    found = []
    for step in range(STEPS):
        for shard in plan.own:
            assert isinstance(shard, RoundRobin)
            module.get_parameter(shard.fqn).grad = gradient(shard.fqn, step)[shard.rows(rank)].clone()
        optimizer.step()
        oracle.step([{fqn: gradient(fqn, step) for fqn in SHAPES}])
        if not math.isclose(optimizer.stats.grad_norm, oracle.grad_norm, rel_tol=1e-12):
            found.append(f"step {step}: norm {optimizer.stats.grad_norm}, expected {oracle.grad_norm}")
        planned = optimizer.schedule.bytes_by_collective(rank)
        if optimizer.stats.bytes_by_collective != planned:
            found.append(f"step {step}: sent {optimizer.stats.bytes_by_collective}, planned {planned}")
        for shard in plan.own:
            assert isinstance(shard, RoundRobin)
            mine = module.get_parameter(shard.fqn)
            if not torch.equal(mine, oracle.masters[shard.fqn][shard.rows(rank)]):
                found.append(f"step {step}: {shard.fqn} differs")
    return found


@pytest.mark.parametrize("world", sampled([1, 2, 3, 4], 3))
@pytest.mark.parametrize("policy", ["balance", "stay", "repeat"])
def test_a_storage_plan_of_a_test_trains_like_the_oracle(world: int, policy: str) -> None:
    clip = 0.5 if world == 3 else None
    assert run_ranks(world, train, policy, clip) == [[]] * world

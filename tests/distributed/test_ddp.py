"""`Optimizer(ddp_model)`: torch's DistributedDataParallel reduces gradients, and everything after that is the engine.

Gradients are small integers over 8, times the number of ranks: averages are exact on any number of them, so a step is compared with the oracle of one
process that has these averages, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.engine import engine
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.routing.spec import ParamTable
from tests.marks import sampled
from tests.ranks import run_ranks
from tests.reference.oracle import Hyper
from tests.worlds import (
    Case,
    anywhere,
    differences,
    gradient,
    nudge_state,
    oracle_for,
    rules,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPLICIT = ("flat", "padded", "compact", "replicated", "replicated:shared")
Grads = dict[str, Tensor]


@dataclass
class Given:
    """One parity run under DistributedDataParallel."""

    case: Case = field(default_factory=Case)
    ddp: dict[str, Any] = field(default_factory=dict)
    """Arguments of DistributedDataParallel."""
    first: str = "ddp"
    """What is made first: "ddp", or "optimizer", as trainers do."""
    hook: str = ""
    """"fp16" or "powersgd": a communication hook."""
    unused: str = ""
    """A param that no rank uses."""
    clip: float | None = None
    """Clip with torch's own function."""
    optimizer: dict[str, Any] = field(default_factory=dict)


@contextmanager
def small_buckets(case: Case) -> Iterator[None]:
    """Models that are planned in here have buckets and cohorts of a few elements, which users of reduced gradients cannot ask for."""

    def planned(table: ParamTable, options: Options, **more: Any) -> Plan:
        few = {} if case.cohort_numel is None else {"cohort_numel": case.cohort_numel}
        return make_plan(table, replace(options, bucket_numel=256, **few), **more)

    with mock.patch.object(engine, "make_plan", planned):
        yield


def with_forward(module: nn.Module) -> nn.Module:
    """A module whose loss has the gradients that it is called with."""
    params = {fqn: param for fqn, param in module.named_parameters() if param.requires_grad}
    module.forward = lambda grads: sum((params[fqn] * grad.to(params[fqn].dtype)).sum() for fqn, grad in grads.items())  # type: ignore[method-assign]
    return module


def build(given: Given) -> tuple[DistributedDataParallel, layerwise.Optimizer]:
    case = given.case
    module = with_forward(case.build())
    extra = {**rules(Hyper(**case.hyper)), "layout": case.layout, "count_zeros": True, **given.optimizer}
    with small_buckets(case):
        if given.first == "optimizer":
            optimizer = layerwise.Optimizer(module, gradients="reduced", **extra)
            ddp = DistributedDataParallel(module, **given.ddp)
        else:
            ddp = DistributedDataParallel(module, **given.ddp)
            optimizer = layerwise.Optimizer(ddp, **extra)
    hooks: dict[str, Callable[[], None]] = {
        "": lambda: None,
        "fp16": lambda: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "powersgd": lambda: ddp.register_comm_hook(
            powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
        ),
    }
    hooks[given.hook]()
    return ddp, optimizer


def gradients(given: Given, shapes: dict[str, torch.Size], rank: int, world: int, step: int, micro: int) -> Grads:
    case = given.case
    return {
        fqn: (world * gradient(fqn, shape, rank, step, micro)).to(case.dtype)
        for fqn, shape in shapes.items()
        if fqn != given.unused
    }


def averaged(grads: list[list[Grads]]) -> dict[str, Tensor | None]:
    """What DistributedDataParallel is to make of the gradients of all ranks and microbatches."""
    world, found = len(grads), {}
    for fqn in grads[0][0]:
        found[fqn] = sum(micro[fqn].float() for micros in grads for micro in micros) / world
    return found


def beside_oracle(rank: int, world: int, given: Given, layouts: Sequence[str] = ()) -> list[str]:
    """Train under DistributedDataParallel beside the oracle; what differs, by name."""
    runs = [
        (layout, *build(replace(given, case=replace(given.case, layout=layout))))
        for layout in layouts or (given.case.layout,)
    ]
    case = given.case
    oracle = oracle_for(case.build(), Hyper(**case.hyper))
    shapes = {fqn: param.shape for fqn, param in oracle.params.items()}
    for step in range(case.steps):
        everyone = [
            [gradients(given, shapes, other, world, step, micro) for micro in range(case.accumulation)]
            for other in range(world)
        ]
        oracle.step([averaged(everyone)])
        found = []
        for layout, ddp, optimizer in runs:
            for micro, grads in enumerate(everyone[rank]):
                with nullcontext() if micro == case.accumulation - 1 else ddp.no_sync():
                    ddp(grads).backward()
            if case.sabotage == "gradient" and step == 1:
                nudge(ddp)
            optimizer.step()
            optimizer.zero_grad()
            model: Any = SimpleNamespace(engine=optimizer._engine, plan=optimizer.plan)
            if case.sabotage == "momentum" and step == 1:
                nudge_state(model)
            seen = differences(model, optimizer, oracle)
            if "reduce_scatter" in optimizer.stats.bytes_by_collective:
                seen.append("something was reduced")
            found += [f"rank {rank} step {step} {layout}: {text}" for text in seen]
        if anywhere(found):
            return found
    return []


def nudge(ddp: DistributedDataParallel) -> None:
    """Move one element of every rank's first gradient by one ulp."""
    grad = next(param.grad for param in ddp.parameters() if param.grad is not None).view(-1)[:1]
    grad.copy_(torch.nextafter(grad, torch.full_like(grad, float("inf"))))


def assert_bitwise(world: int, given: Given, layouts: Sequence[str] = EXPLICIT) -> None:
    found = [text for texts in run_ranks(world, beside_oracle, given, layouts) for text in texts]
    assert not found, "\n".join(found[:10])


RUNS: dict[str, tuple[int, Given]] = {
    "1 rank": (1, Given(Case(accumulation=2))),
    "2 ranks": (2, Given()),
    "2 ranks, bf16, tied": (2, Given(Case(model="tied", dtype=BF16))),
    "3 ranks, accumulation": (3, Given(Case(accumulation=3))),
    "3 ranks, bf16 and fp32": (3, Given(Case(model="mixed", dtype=BF16))),
    "4 ranks, fewer matrices than ranks": (4, Given(Case(model="few"))),
    "4 ranks, cohorts that travel": (4, Given(Case(cohort_numel=64, hyper={"matrix": "normuon"}))),
    "2 ranks, optimizer first": (2, Given(Case(dtype=BF16), first="optimizer")),
    "3 ranks, optimizer first": (3, Given(Case(accumulation=2), first="optimizer")),
    "bucket views": (2, Given(Case(accumulation=2), ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001})),
    "bucket views, optimizer first": (2, Given(ddp={"gradient_as_bucket_view": True}, first="optimizer")),
    "static graph": (2, Given(ddp={"static_graph": True, "gradient_as_bucket_view": True})),
    "static graph, a param that nobody uses": (2, Given(ddp={"static_graph": True}, unused="tall.weight")),
    "a param that nobody uses": (3, Given(ddp={"find_unused_parameters": True}, unused="qkv.weight")),
    "fp16 hook": (4, Given(hook="fp16", ddp={"gradient_as_bucket_view": True})),
    "adamuon, lion, clipped": (
        2,
        Given(Case(hyper={"matrix": "adamuon", "other": "lion", "clip": 0.25, "weight_decay": 0.1})),
    ),
    "fp32 Newton-Schulz": (4, Given(Case(hyper={"ns_dtype": FP32, "clip": 0.5}, cohort_numel=100))),
    "checked at every step": (2, Given(optimizer={"check_replicas": True})),
}


@pytest.mark.parametrize(
    "name",
    sampled(
        RUNS,
        "1 rank",
        "2 ranks, bf16, tied",
        "3 ranks, accumulation",
        "4 ranks, cohorts that travel",
        "3 ranks, optimizer first",
        "bucket views",
        "static graph, a param that nobody uses",
        "a param that nobody uses",
        "fp16 hook",
    ),
)
def test_a_step_under_ddp_is_that_of_the_averages_in_one_process_bitwise(name: str) -> None:
    assert_bitwise(*RUNS[name])


def test_what_auto_chooses_is_bitwise_too() -> None:
    assert_bitwise(3, Given(Case(steps=2)), ("auto",))


@pytest.mark.parametrize("sabotage", ["momentum", "gradient"])
def test_one_ulp_in_a_momentum_or_a_gradient_is_seen(sabotage: str) -> None:
    found = [text for texts in run_ranks(2, beside_oracle, Given(Case(sabotage=sabotage))) for text in texts]
    assert any("step 1" in text or "step 2" in text for text in found)

"""What the ranks of the trainer's tests do, and the small configs they do it with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from layerwise.comm.joining import Ranks
from layerwise.config.schema import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)
from layerwise.train import experts, loop
from layerwise.train.metrics import Record, StepRecord
from tests.worlds import rounds_of

CPU = torch.device("cpu")


def small_config(text: str, *, model: dict[str, Any], parallel: dict[str, Any], train: dict[str, Any]) -> TrainConfig:
    """Ten steps of a model of a few thousand params, fp32 throughout, clipped at every step so that norms matter."""
    shape: dict[str, Any] = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "seq_len": 8}
    steps: dict[str, Any] = {"steps": 10, "batch_size": 2, "eval_every": 5, "eval_sequences": 7, "log_every": 1}
    return TrainConfig(
        model=ModelConfig(**{**shape, **model}),
        data=DataConfig(path=text, val_fraction=0.2),
        optim=OptimConfig(lr=0.02, other_lr=0.01, ns_dtype="fp32", clip_grad_norm=0.5),
        schedule=ScheduleConfig(warmup_steps=2),
        parallel=ParallelConfig(**parallel),
        train=LoopConfig(**{**steps, **train}),
    )


@dataclass(frozen=True)
class Curve:
    """How a run went."""

    losses: list[float]
    norms: list[float]
    bpbs: tuple[float, float]
    num_skipped: int


class _Recorder:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps.append(record)


def _scaled_experts() -> AbstractContextManager[Any]:
    """Expert gradients twice as large: what dividing them by the wrong number of ranks does."""
    original: Callable[..., None] = experts.Experts.__init__

    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_full_backward_pre_hook(lambda _, grads: tuple(2 * grad for grad in grads))

    return mock.patch.object(experts.Experts, "__init__", init)


def _dense_experts() -> AbstractContextManager[Any]:
    """Experts that do not say what they are, so that ranks with different experts take them for copies."""
    return mock.patch.object(experts.Experts, "param_domains", return_value={})


def _untied() -> AbstractContextManager[Any]:
    """Stages that do not say that they hold the same weight."""
    return mock.patch.object(loop, "ties_of", return_value={})


SABOTAGE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "scaled experts": _scaled_experts,
    "dense experts": _dense_experts,
    "untied": _untied,
}


def train_on_rank(rank: int, world: int, config: TrainConfig, sabotage: str = "") -> Curve:
    """Train and bring home the curve."""
    recorder = _Recorder()
    with SABOTAGE[sabotage]():
        end = loop.train(config, Ranks(rank=rank, world=world, local_rank=rank, device=CPU), (recorder,))
    return Curve(
        [step.loss for step in recorder.steps],
        [step.grad_norm for step in recorder.steps],
        (end.first_val_bpb, end.final_val_bpb),
        sum(step.skipped for step in recorder.steps),
    )


def several(rank: int, world: int, job: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The same job with other arguments, one after the other in the same processes, which saves starting them."""
    return [job(rank, world, *args) for args in calls]


def largest_difference(curve: Curve, other: Curve) -> float:
    """The largest relative difference of any loss, norm or validation of two runs."""
    pairs = zip([*curve.losses, *curve.norms, *curve.bpbs], [*other.losses, *other.norms, *other.bpbs], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def unplanned_bytes(rank: int, world: int, config: TrainConfig, steps: int = 3) -> list[str]:
    """Train a few steps; what this rank sent or gathered that its plan does not say."""
    run = loop.prepare(config, Ranks(rank=rank, world=world, local_rank=rank, device=CPU))
    engine, found = run.model.engine, []
    for step in range(1, steps + 1):
        run.train_step(step)
        sent = dict(run.optimizer.stats.bytes_by_collective)
        rounds = rounds_of(run.model, config.train.accumulation)
        planned = run.optimizer.schedule.bytes_by_collective(engine.storage.ranks, rounds)
        if sent != planned:
            found.append(f"rank {rank} step {step}: sent {sent}, planned {planned}")
    run.model.ensure()
    due = {kind: steps * nbytes for kind, nbytes in engine.publisher.due_nbytes.items()}
    if dict(engine.traffic.gathered) != due:
        found.append(f"rank {rank}: gathered {dict(engine.traffic.gathered)}, due {due}")
    return found

"""The trainer sends what its plan says, byte for byte, also when a step has several microbatches. Doing work twice changes no loss and no weight."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerwise.config.schema import TrainConfig
from layerwise.train import stages
from layerwise.train.data import Batch
from layerwise.train.model import next_byte_loss
from tests.distributed.trainer_jobs import several, small_config, unplanned_bytes
from tests.ranks import run_ranks

EXPERTS = {"n_experts": 4, "top_k": 2}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # model, parallel
    "flat": ({}, {"layout": "flat"}),
    "padded": ({}, {"layout": "padded"}),
    "compact": ({}, {"layout": "compact"}),
    "replicated": ({}, {"layout": "replicated"}),
    "reduction after backward": ({}, {"layout": "flat", "overlap_grad_reduce": False}),
    "gathers in step()": ({}, {"layout": "flat", "overlap_param_gather": False}),
    "released gradients": ({}, {"layout": "flat", "shard_grads": True}),
    "sums in the order of ranks": ({}, {"layout": "padded", "reducer": "ordered"}),
    "experts of its own each": (EXPERTS, {"layout": "flat", "ep": 2}),
    "pipeline": ({}, {"layout": "flat", "pp": 2}),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("text") / "easy.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\nall work and no play\n" * 300)
    return str(file)


def config_of(text: str, name: str) -> TrainConfig:
    model, parallel = CONFIGS[name]
    return small_config(
        text, model=model, parallel={"bucket_mib": 0.002, **parallel}, train={"accumulation": 3, "eval_every": 0}
    )


@pytest.mark.parametrize("world", [1, 2])
def test_every_step_sends_and_gathers_what_is_planned(text: str, world: int) -> None:
    names = [name for name in CONFIGS if world == 2 or not {"ep", "pp"} & set(CONFIGS[name][1])]
    for answers in run_ranks(world, several, unplanned_bytes, [(config_of(text, name),) for name in names]):
        assert {name: found for name, found in zip(names, answers, strict=True) if found} == {}


def _first_one_synced(self: stages.WholeModel, batches: Sequence[Batch]) -> Tensor:
    """Reduces the first microbatch of a step, and then what the others brought."""
    losses = []
    for micro, batch in enumerate(batches):
        with self._model.no_sync() if micro else nullcontext():
            loss = next_byte_loss(self._model(batch.tokens), batch.targets).mean() / len(batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _sabotaged(rank: int, world: int, config: TrainConfig) -> list[str]:
    with mock.patch.object(stages.WholeModel, "train", _first_one_synced):
        return unplanned_bytes(rank, world, config)


def test_control_a_trainer_that_reduces_the_first_microbatch_is_seen(text: str) -> None:
    for found in run_ranks(2, _sabotaged, config_of(text, "flat")):
        assert any("sent" in text for text in found)

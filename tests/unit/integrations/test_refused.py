"""What adapters refuse, without the libraries that they are for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import layerwise
from layerwise.errors import StateError
from layerwise.integrations.accelerate import prepare
from layerwise.integrations.transformers import TrainerMixin

RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.05), "other": layerwise.AdamW(lr=0.01)}


def accelerator_of(kind: str) -> Any:
    """As much of an Accelerator as a refusal needs."""
    return SimpleNamespace(distributed_type=SimpleNamespace(value=kind), is_fsdp2=False)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_accelerates_other_ways_to_shard_are_refused_by_name(kind: str) -> None:
    with pytest.raises(StateError, match=f"accelerate was asked for {kind}.*expected plain data parallelism, or FSDP2"):
        prepare(accelerator_of(kind), nn.Linear(4, 4), **RULES)


class FakeTrainer:
    """As much of a Trainer as a refusal needs."""

    def __init__(self, *, optimizer_cls_and_kwargs: Any, kind: str) -> None:
        self.factory, self.options = optimizer_cls_and_kwargs
        self.accelerator = accelerator_of(kind)

    def create_optimizer(self, model: nn.Module) -> Any:
        return self.factory()(model, **self.options)


class Mixed(TrainerMixin, FakeTrainer):
    """What a user writes."""


def test_a_trainer_that_shards_the_model_in_other_ways_is_refused_and_others_get_the_optimizer() -> None:
    assert isinstance(Mixed(kind="NO", layerwise=RULES).create_optimizer(nn.Linear(4, 4)), layerwise.Optimizer)
    for kind in ("FSDP", "DEEPSPEED"):
        with pytest.raises(StateError, match=f"accelerate was asked for {kind}"):
            Mixed(kind=kind, layerwise=RULES).create_optimizer(nn.Linear(4, 4))

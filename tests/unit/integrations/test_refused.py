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


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_accelerates_other_ways_to_shard_are_refused_by_name(kind: str) -> None:
    accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value=kind))
    with pytest.raises(StateError, match=f"the Accelerator was asked for {kind}"):
        prepare(accelerator, nn.Linear(4, 4), **RULES)


class FakeTrainer:
    """As much of a Trainer as a refusal needs."""

    is_deepspeed_enabled = False

    def __init__(self, *, optimizer_cls_and_kwargs: Any, fsdp: bool) -> None:
        self.factory, self.options = optimizer_cls_and_kwargs
        self.is_fsdp_enabled = fsdp

    def create_optimizer(self, model: nn.Module) -> Any:
        return self.factory()(model, **self.options)


class Mixed(TrainerMixin, FakeTrainer):
    """What a user writes."""


def test_a_trainer_that_shards_the_model_itself_is_refused_and_others_get_the_optimizer() -> None:
    module = nn.Linear(4, 4)
    assert isinstance(Mixed(fsdp=False, layerwise=RULES).create_optimizer(module), layerwise.Optimizer)
    with pytest.raises(StateError, match="the Trainer was asked for FSDP or DeepSpeed"):
        Mixed(fsdp=True, layerwise=RULES).create_optimizer(nn.Linear(4, 4))

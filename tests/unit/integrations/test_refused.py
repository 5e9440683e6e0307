"""What adapters refuse, without the libraries that they are for."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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


@dataclass
class Arguments:
    """As much of training arguments as the mixin looks at."""

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    optim: str = "adamw_torch_fused"
    process_index: int = 0


class FakeTrainer:
    """As much of a Trainer as a refusal needs, with explicit arguments like subclasses have."""

    optimizer_cls_and_kwargs: Any = None

    def __init__(self, *, kind: str = "NO", args: Arguments | None = None, optimizer: Any = None) -> None:
        self.accelerator = accelerator_of(kind)
        self.args = args or Arguments()
        self.optimizer = optimizer

    def create_optimizer(self, model: nn.Module) -> Any:
        factory, options = self.optimizer_cls_and_kwargs
        return factory()(model, **options)


class Mixed(TrainerMixin, FakeTrainer):
    """What a user writes."""


def test_a_trainer_that_shards_the_model_in_other_ways_is_refused_and_others_get_the_optimizer() -> None:
    assert isinstance(Mixed(kind="NO", layerwise=RULES).create_optimizer(nn.Linear(4, 4)), layerwise.Optimizer)
    for kind in ("FSDP", "DEEPSPEED"):
        with pytest.raises(StateError, match=f"accelerate was asked for {kind}"):
            Mixed(kind=kind, layerwise=RULES).create_optimizer(nn.Linear(4, 4))


def test_an_optimizer_beside_the_mixins_is_refused() -> None:
    with pytest.raises(
        StateError, match="layerwise= and optimizers= were both passed to Mixed: expected one optimizer"
    ):
        Mixed(layerwise=RULES, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()))


def said_of(args: Arguments) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Mixed(layerwise=RULES, args=args)
    return [str(one.message) for one in caught]


def test_training_arguments_that_are_not_read_are_named_once_on_the_first_rank() -> None:
    (said,) = said_of(Arguments(learning_rate=1e-3, optim="sgd"))
    assert said.startswith("learning_rate=0.001, optim=sgd of the training arguments: not read")
    assert "learning rates (matrix 0.05, other 0.01)" in said
    assert said_of(Arguments(weight_decay=0.1)) != []
    assert said_of(Arguments()) == []
    assert said_of(Arguments(learning_rate=1e-3, process_index=1)) == []

"""The mixin constructs with every trainer, whatever arguments that has, and makes our optimizer."""

from __future__ import annotations

import importlib
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from tests.ranks import as_launched, run_ranks

RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.05), "other": layerwise.AdamW(lr=0.01)}


class Model(nn.Module):
    """A model with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(x).square().mean()}


def own_subclass(rank: int, world: int, folder: str) -> list[Any]:
    """A user's trainer with explicit arguments, trained for a step: the optimizer, its steps and what was said."""
    from transformers import Trainer, TrainingArguments

    from layerwise.integrations.transformers import TrainerMixin

    as_launched(rank, world)

    class Own(Trainer):  # type: ignore[misc]
        def __init__(self, model: nn.Module, folder: str, *, rate: float, rows: int = 8) -> None:
            arguments = TrainingArguments(
                folder,
                use_cpu=True,
                max_steps=1,
                report_to=[],
                disable_tqdm=True,
                save_strategy="no",
                learning_rate=rate,
            )
            super().__init__(model=model, args=arguments, train_dataset=[{"x": torch.ones(8)}] * rows)

    class Mixed(TrainerMixin, Own):
        pass

    said = []
    for rate in (5e-5, 1e-3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer: Any = Mixed(Model(), folder, rate=rate, layerwise=RULES)
        said.append([str(one.message) for one in caught if "training arguments" in str(one.message)])
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    return [isinstance(optimizer, layerwise.Optimizer), optimizer.stats.step, said]


def test_a_users_trainer_with_arguments_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ((is_ours, steps, (at_default, at_another)),) = run_ranks(1, own_subclass, str(tmp_path), meet=False)
    assert is_ours
    assert steps == 1
    assert at_default == []
    assert [text.startswith("learning_rate=0.001 of the training arguments: not read") for text in at_another] == [True]


WORDS = ("<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29)))
COLUMNS: dict[str, list[Any]] = {
    "text": ["w1 w2 w3"] * 4,
    "prompt": ["w1 w2"] * 4,
    "completion": [" w3"] * 4,
    "label": [True, False] * 2,
    "chosen": ["w1 w2 w4"] * 4,
    "rejected": ["w1 w2 w5"] * 4,
}
NEEDED = {
    "SFT": ("text",),
    "DPO": ("prompt", "chosen", "rejected"),
    "KTO": ("prompt", "completion", "label"),
    "Reward": ("chosen", "rejected"),
    "GRPO": ("prompt",),
    "RLOO": ("prompt",),
    "Distillation": ("prompt",),
}
"""The columns that a trainer of trl reads, by the first word of its name."""


def trl_trainer(rank: int, world: int, name: str, folder: str) -> bool:
    """Whether a trainer of trl with the mixin makes our optimizer."""
    import datasets  # type: ignore[import-not-found,unused-ignore]
    import trl  # type: ignore[import-not-found,unused-ignore]
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    from layerwise.integrations.transformers import TrainerMixin

    as_launched(rank, world)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    kind = name.removesuffix("Trainer")
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0,
        num_labels=1,
    )  # fmt: skip
    more = {"beta": 0.0} if kind == "RLOO" else {}  # else it loads a reference model by name
    model_class = LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM
    given = {
        "model": model_class(config),
        "ref_model": LlamaForCausalLM(config),
        "teacher_model": LlamaForCausalLM(config),
        "reward_funcs": lambda completions, **_: [0.0 for _ in completions],
        "args": getattr(trl, f"{kind}Config")(
            folder, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, **more
        ),
        "train_dataset": datasets.Dataset.from_dict({column: COLUMNS[column] for column in NEEDED[kind]}),
        "processing_class": PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
    }
    base = getattr(trl, name)
    mixed = type("Mixed", (TrainerMixin, base), {})
    taken = inspect.signature(base.__init__).parameters
    trainer = mixed(**{key: value for key, value in given.items() if key in taken}, layerwise=RULES)
    trainer.create_optimizer()
    return isinstance(trainer.optimizer, layerwise.Optimizer)


@pytest.mark.slow
def test_every_trainer_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    importlib.import_module("datasets")
    names = [name for name in dir(trl) if name.endswith("Trainer")]
    assert {"SFTTrainer", "DPOTrainer"} <= set(names)
    assert {name: run_ranks(1, trl_trainer, name, str(tmp_path), meet=False) for name in names} == {
        name: [True] for name in names
    }

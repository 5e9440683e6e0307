"""Weights that are kept as codes in the trainer: stages and experts on several ranks train like the same model on fewer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from layerwise.config.schema import PrecisionConfig, TrainConfig
from layerwise.kernels.stored import Stored
from tests.distributed.trainer_jobs import Curve, small_config, train_on_rank
from tests.ranks import run_ranks

EXPERTS = {"n_experts": 4, "expert_hidden": 32}
CLOSE = 3e-4
"""Relative, over five steps in bf16; found are 4e-5. Experts multiply the rows of several ranks at once, and sums round otherwise.
The same run without codes is 1.2e-3 away."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("text") / "easy.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\nall work and no play\n" * 100)
    return str(file)


def config_of(text: str, recipe: str = "mxfp8", model: dict[str, Any] | None = None, **parallel: Any) -> TrainConfig:
    train = {"steps": 5, "accumulation": 2, "precision": "bf16", "eval_every": 0}
    shape = {"d_model": 32, "hidden": 32, **(model or {})}
    config = small_config(text, model=shape, parallel=parallel, train=train)
    return replace(config, precision=PrecisionConfig(param_gather=recipe))  # type: ignore[arg-type]


def counted(rank: int, world: int, config: TrainConfig) -> tuple[Curve, int]:
    """A run, and how many params of this rank were made codes of."""
    seen: set[int] = set()
    settle = Stored.settle

    def noted(self: Stored, *args: Any) -> None:
        seen.add(id(self))
        settle(self, *args)

    with mock.patch.object(Stored, "settle", noted):
        return train_on_rank(rank, world, config), len(seen)


def test_stages_with_codes_are_those_of_the_whole_model(text: str) -> None:
    ((alone, all_of_them),) = run_ranks(1, counted, config_of(text))
    ((first, of_first), (last, of_last)) = run_ranks(2, counted, config_of(text, pp=2))
    assert (all_of_them, of_first, of_last) == (8, 4, 4)
    assert first.losses == last.losses
    assert first.losses == pytest.approx(alone.losses, rel=1e-6)
    assert first.bpbs == pytest.approx(alone.bpbs, rel=1e-6)
    ((plain, none),) = run_ranks(1, counted, config_of(text, "none"))
    assert none == 0
    assert plain.losses != pytest.approx(alone.losses, rel=1e-6)


@pytest.mark.slow
def test_experts_with_codes_are_shared_out(text: str) -> None:
    together = run_ranks(2, counted, config_of(text, model=EXPERTS))
    apart = run_ranks(2, counted, config_of(text, model=EXPERTS, ep=2))
    assert {count for _, count in (*together, *apart)} == {8}  # qkv, out and two stacks of each block
    assert apart[0][0].losses == pytest.approx(together[0][0].losses, rel=CLOSE)
    assert apart[0][0].num_skipped == 0
    ((plain, _), _) = run_ranks(2, counted, config_of(text, "none", model=EXPERTS))
    assert plain.losses != pytest.approx(together[0][0].losses, rel=CLOSE)

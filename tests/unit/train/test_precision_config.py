"""`[precision]`: what a config may ask for, and that it reaches the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layerwise.comm.joining import Ranks
from layerwise.config.load import load
from layerwise.config.schema import BLOCK_MULTIPLES, DataConfig, LoopConfig, ModelConfig, PrecisionConfig, TrainConfig
from layerwise.kernels.stored import recipe_of, stored_of
from layerwise.layout.recipes import RECIPES
from layerwise.train.loop import prepare
from tests.unit.train.test_parallel_config import validated

ALONE = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))
MXFP8 = ("--precision.param-gather", "mxfp8", "--train.precision", "bf16")
BLOCKWISE = ("--precision.param-gather", "blockwise", "--train.precision", "bf16", "--model.hidden", "768")


def test_blocks_are_those_of_the_recipes() -> None:
    """Configs are read without the layer that knows recipes."""
    assert {"none": 1, **{name: recipe.multiple for name, recipe in RECIPES.items()}} == BLOCK_MULTIPLES


@pytest.mark.parametrize(
    "words",
    [
        MXFP8,
        BLOCKWISE,
        (*MXFP8, "--parallel.pp", "2", "--train.accumulation", "2", "--model.tie-embeddings", "true"),
        (*MXFP8, "--model.n-experts", "8", "--parallel.ep", "4", "--parallel.shard-grads", "true"),
        (*BLOCKWISE, "--model.n-experts", "8", "--model.moe-every", "2", "--model.expert-hidden", "384"),
        ("--precision.param-gather", "none", "--parallel.fsdp", "2"),
    ],
    ids=" ".join,
)
def test_what_can_work_is_accepted(words: tuple[str, ...]) -> None:
    assert validated(*words) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--precision.param-gather", "mxfp8"),
            "expected none with train.precision fp32, got mxfp8: codes are made of bf16. Set train.precision to bf16.",
        ),
        ((*MXFP8, "--parallel.fsdp", "2"), "expected none with fsdp=2, got mxfp8: DTensor params cannot be quantised."),
        (
            (*MXFP8, "--parallel.tp", "2", "--parallel.replicate", "2"),
            "expected none with replicate=2 times tp=2, got mxfp8: DTensor params cannot be quantised.",
        ),
        (
            (*MXFP8, "--parallel.ddp", "true"),
            "expected none with ddp, got mxfp8: DistributedDataParallel does not know params that are kept as codes.",
        ),
        (
            (*MXFP8, "--model.hidden", "100"),
            "expected none, got mxfp8: its blocks need multiples of 32 for rows and columns, and model.hidden is 100.",
        ),
        (
            (*BLOCKWISE, "--model.d-model", "192", "--model.n-experts", "8", "--model.expert-hidden", "64"),
            "and model.d_model is 192, the width of all query heads is 192, model.expert_hidden is 64.",
        ),
    ],
)
def test_each_mistake_is_one_problem(words: tuple[str, ...], expected: str) -> None:
    (problem,) = validated(*words)
    assert problem.startswith("precision.param_gather: ")
    assert expected in problem


@pytest.mark.parametrize(("recipe", "hidden"), [("none", 352), ("mxfp8", 352), ("blockwise", 384)])
def test_the_recipe_reaches_every_linear_layer(recipe: str, hidden: int, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    config = TrainConfig(
        model=ModelConfig(d_model=128, n_layers=1, n_heads=4, n_kv_heads=2, seq_len=24, hidden=hidden),
        data=DataConfig(path=str(tmp_path / "text.txt"), val_fraction=0.2),
        train=LoopConfig(steps=30, batch_size=2, precision="bf16"),
    )
    run = prepare(replace(config, precision=PrecisionConfig(param_gather=recipe)), ALONE)  # type: ignore[arg-type]
    found = {fqn for fqn, param in run.model.module.named_parameters() if recipe_of(param) == recipe}  # type: ignore[union-attr]
    kinds = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
    assert found == ({f"blocks.0.{kind}.weight" for kind in kinds} if recipe != "none" else set())
    stored = [stored_of(param) for param in run.model.parameters() if recipe_of(param)]
    run.model.ensure()
    before = [kept.writes for kept in stored if kept is not None]
    for step in (1, 2):
        run.train_step(step)
    run.model.ensure()
    assert [kept.writes for kept in stored if kept is not None] == [writes + 2 for writes in before]
    assert not run.optimizer.stats.skipped


def test_a_file_may_say_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[precision]\nparam_gather = "mxfp8"\n[train]\nprecision = "bf16"\n')
    assert load(str(path)).config.precision == PrecisionConfig(param_gather="mxfp8")

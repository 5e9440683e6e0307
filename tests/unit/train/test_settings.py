"""What a config says reaches the model, the optimizer and every step. No setting has its default here: one that got lost would show."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from layerwise.comm.joining import Ranks
from layerwise.config.resolve import matrix_rule, other_rule
from layerwise.config.schema import (
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ScheduleConfig,
    TrainConfig,
)
from layerwise.train.loop import Run, prepare
from layerwise.units import MIB

ALONE = Ranks(rank=0, world=1, local_rank=0, device=torch.device("cpu"))

PARALLEL: dict[str, Any] = {
    "layout": "padded",
    "reducer": "ordered",
    "shard_grads": True,
    "bucket_mib": 0.25,
    "overlap_grad_reduce": False,
    "overlap_param_gather": "by chunk",
    "grad_dtype": "bf16",
}
OTHER_WAY: dict[str, Any] = {"layout": "compact", "overlap_param_gather": False}
OF_A_PIPELINE = {"pp", "ep", "chunks", "schedule"}
"""What decides which modules there are and who runs them: `test_trainer_pp` and `test_trainer_moe`."""
OF_TORCH = {"fsdp", "replicate", "tp", "reshard_after_forward", "ddp"}
"""Several ranks show these: tests/distributed/test_trainer_sharded.py."""

DECAY: dict[str, Any] = {"weight_decay": 0.3, "weight_decay_mode": "independent"}
OPTIM = OptimConfig(
    **DECAY,
    lr=0.011,
    momentum=0.7,
    nesterov=False,
    beta2=0.6,
    coefficients="quintic",
    ns_steps=3,
    scale="shape",
    extra_scale=1.5,
    ns_dtype="fp32",
    tp_mode="blockwise",
    other_lr=0.007,
    other_weight_decay=0.2,
    betas=(0.5, 0.8),
    eps=1e-3,
    clip_grad_norm=0.25,
    qk_clip=0.125,
)
MUON: dict[str, Any] = {
    **DECAY,
    "lr": 0.011,
    "momentum": 0.7,
    "nesterov": False,
    "coefficients": "quintic",
    "steps": 3,
    "scale": "shape",
    "extra_scale": 1.5,
    "ns_dtype": "fp32",
    "tp_mode": "blockwise",
}
OTHER: dict[str, Any] = {
    "lr": 0.007,
    "weight_decay": 0.2,
    "weight_decay_mode": "independent",
    "betas": (0.5, 0.8),
}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    return TrainConfig(
        model=ModelConfig(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, seq_len=24),
        data=DataConfig(path=str(tmp_path / "text.txt"), val_fraction=0.2),
        optim=OPTIM,
        schedule=ScheduleConfig(kind="wsd", warmup_steps=2, min_lr_ratio=0.2, decay_fraction=0.5),
        train=LoopConfig(steps=6, batch_size=2),
    )


def as_asked(run: Run, asked: dict[str, Any]) -> dict[str, Any]:
    """What the model was built with, in the words of the config."""
    settings, options = run.model.engine.settings, run.model.plan.options
    found = {}
    for name in asked:
        if name == "bucket_mib":
            assert options.bucket_numel is not None
            found[name] = options.bucket_numel * options.grad_dtype.itemsize / MIB
        else:
            value = getattr(options if hasattr(options, name) else settings, name)
            found[name] = str(value) if name == "grad_dtype" else value
    return found


def test_every_setting_of_the_parallelism_reaches_the_model(config: TrainConfig) -> None:
    settings = {field.name: field.default for field in fields(ParallelConfig)}
    assert {*PARALLEL, *OTHER_WAY, *OF_A_PIPELINE, *OF_TORCH} == set(settings)
    for asked in (PARALLEL, OTHER_WAY):
        assert all(value != settings[name] for name, value in asked.items())
        assert as_asked(prepare(replace(config, parallel=ParallelConfig(**asked)), ALONE), asked) == asked


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("muon", MUON),
        ("normuon", {**MUON, "beta2": 0.6}),
        ("adamuon", {**MUON, "beta2": 0.6}),
        ("adamw", {**DECAY, "lr": 0.011, "betas": (0.5, 0.8), "eps": 1e-3}),
    ],
)
@pytest.mark.parametrize(("other", "more"), [("adamw", {"eps": 1e-3}), ("lion", {})])
def test_every_option_of_a_rule_reaches_its_param_group(
    config: TrainConfig, rule: Any, expected: dict[str, Any], other: Any, more: dict[str, Any]
) -> None:
    optim = replace(OPTIM, rule=rule, other_rule=other)
    neutral = asdict(OptimConfig())
    assert all(value != neutral[name] for name, value in asdict(OPTIM).items() if name not in ("rule", "other_rule"))
    for made, kind, wanted in ((matrix_rule(optim), rule, expected), (other_rule(optim), other, {**OTHER, **more})):
        assert made.kind == kind
        assert {name: made.options()[name] for name in wanted} == wanted
    groups = prepare(replace(config, optim=replace(optim, qk_clip=None)), ALONE).optimizer.param_groups
    assert [group["rule"] for group in groups if group["lr"] == 0.011] == [rule]
    assert [group["rule"] for group in groups if group["lr"] == 0.007] == [other]


def test_clipping_is_by_the_norm_and_the_logit_that_were_set(config: TrainConfig) -> None:
    run = prepare(replace(config, optim=replace(OPTIM, clip_grad_norm=1e-3, qk_clip=1e-4)), ALONE)
    run.train_step(1)
    stats = run.optimizer.stats
    assert stats.clip_coefficients["matrix"] == pytest.approx(1e-3 / (stats.grad_norm + 1e-6))
    assert stats.max_logit is not None
    assert 1e-4 < stats.max_logit < 1.0  # where a threshold of 100 clips nothing
    assert stats.clipped_heads > 0


def test_every_step_of_the_trainer_has_the_learning_rates_of_its_schedule(config: TrainConfig) -> None:
    run = prepare(config, ALONE)
    at_first = [group["lr"] for group in run.optimizer.param_groups]
    assert sorted(at_first) == [0.007, 0.011]
    # Two steps of warm-up, and from 1 to 0.2 in a straight line over the last half.
    for step, factor in enumerate((0.5, 1.0, 1.0, 1.0 - 0.8 / 3, 1.0 - 1.6 / 3, 0.2), start=1):
        run.train_step(step)
        assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([lr * factor for lr in at_first])

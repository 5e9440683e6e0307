"""What keeping weights in eight bits does to a loss: the run of `make train` in bf16, and the same with the weights of linear layers as MXFP8.

    python benchmarks/quantized_training.py

Writes benchmarks/results/quantized_training.json. Two runs with the same seed have the same initial weights, samples, steps and rates; they still come apart as
two runs do that differ in one bit, by about as much as two seeds differ. So there is a pair for each of a fixed number of seeds, all of them are in the file, and what is
judged is the mean ratio of the losses at the end, beside its standard error and the spread of bf16 from seed to seed.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from layerwise.comm import joining
from layerwise.config.load import load
from layerwise.config.schema import PrecisionConfig
from layerwise.train.loop import train
from layerwise.train.metrics import EvalRecord, Record, StepRecord

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "quantized_training.json"
CONFIG = "configs/tiny.toml"
SEEDS = 8
LIMIT = 0.005
"""How far the mean ratio may be from 1."""
LAST_STEPS = 50
"""Training losses of the last steps are averaged: one batch says little."""
WORKERS = 2
"""Runs at a time."""


class Curves:
    """A watcher that keeps losses."""

    def __init__(self) -> None:
        self.train: dict[int, float] = {}
        self.val: dict[int, float] = {}

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.train[record.step] = record.loss
        elif isinstance(record, EvalRecord):
            self.val[record.step] = record.val_loss


def trained(asked: tuple[str, int]) -> dict[str, Any]:
    """One run of the trainer."""
    recipe, seed = asked
    torch.set_num_threads(1)  # the other run has the other core
    base = load(str(ROOT / CONFIG)).config
    config = replace(
        base,
        data=replace(base.data, seed=seed),
        train=replace(base.train, seed=seed, precision="bf16"),
        precision=PrecisionConfig(param_gather="none" if recipe == "bf16" else recipe),  # type: ignore[arg-type]
    )
    curves, started = Curves(), time.perf_counter()
    train(config, joining.init(), [curves])
    steps = max(curves.train)
    last = [loss for step, loss in curves.train.items() if step > steps - LAST_STEPS]
    print(recipe, seed, round(curves.val[steps], 4), f"{time.perf_counter() - started:.0f} s", flush=True)
    return {
        "recipe": recipe,
        "seed": seed,
        "last_train_loss": sum(last) / len(last),
        "last_val_loss": curves.val[steps],
        "train": curves.train,
        "val": curves.val,
    }


def compared(runs: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    """Losses of one kind at the end, seed by seed."""
    by_recipe = {
        recipe: [run[name] for run in sorted(runs, key=lambda run: run["seed"]) if run["recipe"] == recipe]
        for recipe in ("bf16", "mxfp8")
    }
    ratios = [mx / plain for mx, plain in zip(by_recipe["mxfp8"], by_recipe["bf16"], strict=True)]
    return {
        **{recipe: [round(loss, 4) for loss in losses] for recipe, losses in by_recipe.items()},
        "ratios": [round(ratio, 4) for ratio in ratios],
        "mean_ratio": round(statistics.fmean(ratios), 5),
        "standard_error": round(statistics.stdev(ratios) / math.sqrt(len(ratios)), 5),
        "spread_of_bf16": round(statistics.stdev(by_recipe["bf16"]) / statistics.fmean(by_recipe["bf16"]), 5),
    }


def mean_curve(runs: Sequence[dict[str, Any]], recipe: str, kind: str) -> dict[str, float]:
    mine = [run[kind] for run in runs if run["recipe"] == recipe]
    return {str(step): round(statistics.fmean(curve[step] for curve in mine), 4) for step in mine[0]}


def report_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is known once these runs are over, of seeds that have both."""
    both = sorted(
        {run["seed"] for run in runs if run["recipe"] == "bf16"}
        & {run["seed"] for run in runs if run["recipe"] == "mxfp8"}
    )
    pairs = [run for run in runs if run["seed"] in both]
    return {
        "what": f"loss of {CONFIG} on one rank: weights as MXFP8 against bf16, a pair of runs for each seed",
        "command": "python benchmarks/quantized_training.py",
        "host": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "limit": LIMIT,
        "seeds": both,
        **{name: compared(pairs, name) for name in ("last_train_loss", "last_val_loss")},
        "mean_curves": {
            recipe: {kind: mean_curve(pairs, recipe, kind) for kind in ("train", "val")} for recipe in ("bf16", "mxfp8")
        },
    }


def main() -> int:
    asked = [(recipe, seed) for seed in range(SEEDS) for recipe in ("mxfp8", "bf16")]
    runs: list[dict[str, Any]] = []
    with get_context("spawn").Pool(WORKERS) as pool:
        for run in pool.imap(trained, asked):
            runs.append(run)
            if len(runs) >= 4 and len(runs) % 2 == 0:  # it takes long: what is there is kept
                RESULTS.write_text(json.dumps(report_of(runs), indent=2) + "\n")
    report = report_of(runs)
    found = {name: report[name] for name in ("last_train_loss", "last_val_loss")}
    print({name: (figures["mean_ratio"], figures["standard_error"]) for name, figures in found.items()})
    return 0 if all(abs(figures["mean_ratio"] - 1) <= LIMIT for figures in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Muon against AdamW: the same model, data, steps and batch, each at the best learning rate of a small sweep.

    python benchmarks/convergence.py

Writes benchmarks/results/convergence.json. AdamW is the baseline of the same run: `--optim.rule adamw` of the trainer updates every param with it.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from layerwise.comm import joining
from layerwise.config.schema import TrainConfig
from layerwise.train.loop import train

RESULTS = Path(__file__).parent / "results" / "convergence.json"
STEPS = 600
LRS = {"muon": (0.0025, 0.005, 0.01, 0.02), "adamw": (0.0005, 0.001, 0.002, 0.004, 0.008)}
"""Each sweep has its best value inside, not at an end; `main` says so if it has not."""


def config_for(rule: str, lr: float) -> TrainConfig:
    base = TrainConfig()
    return replace(
        base,
        model=replace(base.model, d_model=192, n_layers=6, n_heads=6, n_kv_heads=2, seq_len=256),
        train=replace(
            base.train, steps=STEPS, batch_size=32, eval_every=0, eval_sequences=128, log_every=STEPS, seed=1
        ),
        optim=replace(base.optim, rule=rule, lr=lr, other_lr=0.003 if rule == "muon" else lr),
    )


def main() -> int:
    ranks = joining.init()
    runs = []
    for rule, lrs in LRS.items():
        for lr in lrs:
            started = time.perf_counter()
            end = train(config_for(rule, lr), ranks)
            runs.append(
                {
                    "rule": rule,
                    "lr": lr,
                    "val_bpb": round(end.final_val_bpb, 4),
                    "seconds": round(time.perf_counter() - started, 1),
                }
            )
            print(runs[-1], flush=True)
    best = {rule: min((run for run in runs if run["rule"] == rule), key=lambda run: run["val_bpb"]) for rule in LRS}
    device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    at_an_end = [rule for rule, run in best.items() if run["lr"] in (LRS[rule][0], LRS[rule][-1])]
    report = {
        "what": "validation loss in bits per byte after equal steps, best learning rate of each sweep",
        "command": "python benchmarks/convergence.py",
        "host": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": device,
        },
        "steps": STEPS,
        "runs": runs,
        "best": best,
        "best_lr_at_the_end_of_its_sweep": at_an_end,
        "ratio_muon_over_adamw": round(best["muon"]["val_bpb"] / best["adamw"]["val_bpb"], 4),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["best"], indent=2))
    return 0 if best["muon"]["val_bpb"] < best["adamw"]["val_bpb"] else 1


if __name__ == "__main__":
    sys.exit(main())

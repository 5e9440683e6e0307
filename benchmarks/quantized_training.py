"""What keeping weights in eight bits does to a loss: `make train` in bf16, and the same run with the weights of linear layers kept as MXFP8.

    python benchmarks/quantized_training.py

Writes benchmarks/results/quantized_training.json: both curves and the ratio of the losses at the end. Model, data, order of samples, steps and every
rate are the same.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "quantized_training.json"
CONFIG = "configs/tiny.toml"
NPROC = 2
ARMS: dict[str, list[str]] = {"bf16": [], "mxfp8": ["--precision.param-gather", "mxfp8"]}
LIMIT = 0.005
"""How far the two may be apart at the end, as a share of the loss."""
LAST_STEPS = 50
"""Training losses of the last steps are averaged: one batch says little."""


def trained(recipe: str, folder: Path) -> dict[str, Any]:
    """One run of the trainer, and what it logged."""
    out_dir = folder / recipe
    command = [sys.executable, "-m", "layerwise", "train", CONFIG, "--nproc", str(NPROC)]
    settings = ["--train.precision", "bf16", "--train.out-dir", str(out_dir), *ARMS[recipe]]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    subprocess.run([*command, *settings], cwd=ROOT, env=environment, check=True)
    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    last = [record["loss"] for record in steps if record["step"] > steps[-1]["step"] - LAST_STEPS]
    return {
        "train_loss": {str(record["step"]): round(record["loss"], 4) for record in steps},
        "val_loss": {
            str(record["step"]): round(record["val_loss"], 4) for record in records if record["kind"] == "eval"
        },
        "last_train_loss": sum(last) / len(last),
        "last_val_loss": next(record["val_loss"] for record in reversed(records) if record["kind"] == "eval"),
        "step_ms": round(sorted(record["step_ms"] for record in steps)[len(steps) // 2]),
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = {recipe: trained(recipe, Path(folder)) for recipe in ARMS}
    ratios = {name: round(runs["mxfp8"][name] / runs["bf16"][name], 5) for name in ("last_train_loss", "last_val_loss")}
    largest = max(abs(ratio - 1) for ratio in ratios.values())
    report = {
        "what": f"loss of {CONFIG} on {NPROC} ranks, weights kept as MXFP8 against bf16",
        "command": "python benchmarks/quantized_training.py",
        "host": {
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
        },
        "runs": runs,
        "mxfp8_over_bf16": ratios,
        "limit": LIMIT,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(ratios, indent=2))
    return 0 if largest <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

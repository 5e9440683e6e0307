"""Whole training iterations on a GPU: Muon by layerwise beside torch's fused AdamW, on the same GPT, samples and steps.

    python benchmarks/end_to_end.py [--steps 200]

A GPT of 355 M params (24 blocks of width 1024, fp32 params, products in bf16 by autocast, blocks compiled), with 8,192 tokens a step and with 65,536 in
eight microbatches. Of each arm: the time of an iteration when nothing is waited for but the end of a round, how long the card is at the optimizer's step within it, and the
validation loss after the same steps, at each of a few rates. AdamW does without clipping and norms, which layerwise takes in any case. Writes benchmarks/results/end_to_end.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerwise
from layerwise.cli.measuring import ceilings
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import DataConfig, ModelConfig
from layerwise.train.data import Batching, Corpus, Loader, load_corpus
from layerwise.train.model import GPT, build_gpt, next_byte_loss

RESULTS = Path(__file__).parent / "results" / "end_to_end.json"
SHAPE = resolve_model(
    ModelConfig(
        d_model=1024, n_layers=24, n_heads=16, n_kv_heads=16, vocab_size=50304, seq_len=1024, tie_embeddings=True
    )
)
MICROBATCHES = {"8192 tokens": 1, "65536 tokens": 8}
SEQUENCES, VAL_SEQUENCES, WARM_UP = 8, 64, 20
ROUND_TOKENS, ROUNDS = 65536 * 3, 3
RATES = {"torch AdamW, fused": (1.5e-4, 4e-4, 1e-3), "layerwise Muon": (1e-3, 2.5e-3)}
TIMED_RATES = {"layerwise Muon, fused weights whole": 1e-3, "layerwise AdamW": 1.5e-4}
DEVICE = torch.device("cuda")

WHOLE = [layerwise.RouteRule(pattern=f"*.{name}.weight", to="matrix", split="whole") for name in ("qkv", "gate_up")]
"""Queries, keys and values as one matrix, and gate and up: fewer and longer ones, as torch.optim.Muon has them."""


def muon(model: GPT, lr: float, rules: list[layerwise.RouteRule]) -> layerwise.Optimizer:
    matrix, other = layerwise.Muon(lr=lr, weight_decay=0.1), layerwise.AdamW(lr=lr / 2, betas=(0.9, 0.95))
    return layerwise.Optimizer(model, matrix=matrix, other=other, rules=rules)


Make = Callable[[GPT, float], torch.optim.Optimizer]
ARMS: dict[str, Make] = {
    "torch AdamW, fused": lambda model, lr: torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    ),
    "layerwise Muon": lambda model, lr: muon(model, lr, []),
    "layerwise Muon, fused weights whole": lambda model, lr: muon(model, lr, WHOLE),
    "layerwise AdamW": lambda model, lr: layerwise.Optimizer(
        model,
        matrix=layerwise.AdamW(lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
        other=layerwise.AdamW(lr=lr, betas=(0.9, 0.95)),
    ),
}


class Run:
    """One model on its way."""

    def __init__(self, make: Make, lr: float, corpus: Corpus, microbatches: int) -> None:
        self.microbatches = microbatches
        self.model = build_gpt(SHAPE, seed=0, device=DEVICE)
        for block in self.model.blocks:
            block.compile()
        self.optimizer = make(self.model, lr)
        self.loader = Loader(corpus, Batching(SEQUENCES, microbatches, 1), SHAPE.seq_len, seed=0, rank=0, device=DEVICE)
        self.done = 0
        self.steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """When the card began with a step, and was done with it."""

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = self.model(tokens)
        return next_byte_loss(logits, targets).mean()

    def iterate(self) -> None:
        for micro in range(self.microbatches):
            batch = self.loader.train_batch(self.done, micro)
            loss = self.loss(batch.tokens, batch.targets) / self.microbatches
            loss.backward()  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.optimizer.step()
        end.record()
        self.steps.append((begin, end))
        self.optimizer.zero_grad()
        self.done += 1

    @torch.no_grad()
    def val_loss(self) -> float:
        found = [self.loss(batch.tokens, batch.targets) for batch, _ in self.loader.val_batches(VAL_SEQUENCES)]
        return float(torch.stack(found).mean())


def iteration_ms(run: Run) -> tuple[float, float]:
    """The median over rounds of the time of an iteration in a round that nobody interrupts, and of the steps within."""
    iterations = ROUND_TOKENS // (SEQUENCES * SHAPE.seq_len * run.microbatches)
    for _ in range(max(4, iterations)):
        run.iterate()
    times = []
    run.steps.clear()
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(iterations):
            run.iterate()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3 / iterations)
    step = statistics.median(begin.elapsed_time(end) for begin, end in run.steps)
    return round(statistics.median(times), 2), round(step, 2)


def watts() -> float | None:
    """What the card draws, as it says itself; None where nobody can be asked."""
    card = f"GPU-{torch.cuda.get_device_properties(DEVICE).uuid}"
    asked = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "-i", card]
    try:
        return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None


def timed(corpus: Corpus, microbatches: int) -> dict[str, Any]:
    """All arms in turn, twice: the card gets hot, and the later must not pay for the earlier."""
    rates = {name: rates[0] for name, rates in RATES.items()} | TIMED_RATES
    runs = {name: Run(make, rates[name], corpus, microbatches) for name, make in ARMS.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    drawn: dict[str, list[float | None]] = {name: [] for name in runs}
    for _ in range(2):
        for name, run in runs.items():
            found[name].append(iteration_ms(run))
            for _ in range(4):  # the host is ahead: the card works while it is asked
                run.iterate()
            drawn[name].append(watts())
            torch.cuda.synchronize()
    means = {name: statistics.fmean(ms for ms, _ in times) for name, times in found.items()}
    adamw = means["torch AdamW, fused"]
    return {
        "ms": {name: [ms for ms, _ in times] for name, times in found.items()},
        "step_ms": {name: [step for _, step in times] for name, times in found.items()},
        "watts": drawn,
        "ratio": round(means["layerwise Muon"] / adamw, 4),
        "difference_ms": round(means["layerwise Muon"] - adamw, 2),
        "ratios_of_others": {name: round(means[name] / adamw, 4) for name in TIMED_RATES},
    }


def learned(corpus: Corpus, name: str, lr: float, steps: int) -> float:
    """The validation loss after `steps` of 8,192 tokens, with a short warm-up and rates that fall to zero."""
    run = Run(ARMS[name], lr, corpus, 1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        run.optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / (steps - WARM_UP))
    )
    for _ in range(steps):
        run.iterate()
        scheduler.step()
    loss = run.val_loss()
    print(f"{name} at {lr}: {loss:.4f}", flush=True)
    return round(loss, 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps before validation; 0: times alone")
    steps = parser.parse_args().steps
    corpus = load_corpus(DataConfig(), SHAPE.seq_len)
    report: dict[str, Any] = {
        "command": "python benchmarks/end_to_end.py",
        "host": {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__},
        "what": {
            "ms": "an iteration: forward, backward, step, zero_grad; each arm twice, in turn",
            "step_ms": "of that, how long the card is at the step, idle while it waits for the host or not",
            "watts": "what the card draws in the middle of it",
            "ratio": "iterations of Muon over those of AdamW",
            "val_loss": f"nats per byte after {steps} steps of 8192 tokens, by rate",
        },
        "ceilings": ceilings(DEVICE),
        "iterations": {},
    }
    for name, microbatches in MICROBATCHES.items():
        report["iterations"][name] = timed(corpus, microbatches)
        print(name, report["iterations"][name], flush=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    if steps:
        report["val_loss"] = {
            name: {str(lr): learned(corpus, name, lr, steps) for lr in rates} for name, rates in RATES.items()
        }
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

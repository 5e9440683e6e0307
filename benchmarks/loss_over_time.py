"""Validation loss over seconds of training on one GPU: AdamW, `torch.optim.Muon` and layerwise's Muon on the same GPT and samples.

    python benchmarks/loss_over_time.py [--steps 240]
    python benchmarks/loss_over_time.py --draw    # summary and chart alone, from the committed JSON

The model is the GPT of end_to_end.py: 355 M params in fp32, products in bf16 by autocast, blocks compiled, 16,384 tokens a step. Every arm clips
gradients to a norm of 1.0, warms up for 20 steps and decays linearly to zero. Each arm runs at three rates, a factor of two apart, and its best rate is drawn. One more arm is in the JSON alone: layerwise with the settings of `torch.optim.Muon`.
Seconds count training alone, without compilation and validation. Writes benchmarks/results/loss_over_time.json and docs/images/loss_over_time.svg.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerwise
from benchmarks.end_to_end import DEVICE, SHAPE, WHOLE
from layerwise.config.schema import DataConfig
from layerwise.train.data import Batching, Corpus, Loader, load_corpus
from layerwise.train.model import GPT, build_gpt, next_byte_loss
from layerwise.train.report import Series, line_chart

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "loss_over_time.json"
CHART = ROOT / "docs" / "images" / "loss_over_time.svg"
SEQUENCES, VAL_SEQUENCES, WARM_UP, EVAL_EVERY = 16, 32, 20, 20
BETAS, DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0
OTHER_LR = 1e-3
"""Rate of the params that are not matrices, in both arms with Muon."""

Step = Callable[[], None]
"""Clips, steps and clears gradients."""


def adamw(model: GPT, lr: float) -> tuple[list[torch.optim.Optimizer], Step]:
    """torch's fused AdamW for all params."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)
    return [optimizer], _stepping(model, [optimizer])


def torch_muon(model: GPT, lr: float) -> tuple[list[torch.optim.Optimizer], Step]:
    """`torch.optim.Muon` for the matrices of the blocks, torch's fused AdamW for the rest."""
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    taken = {id(param) for param in matrices}
    others = [param for param in model.parameters() if id(param) not in taken]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=BETAS, fused=True),
    ]
    return optimizers, _stepping(model, optimizers)


def layerwise_muon(
    model: GPT, lr: float, *, rules: Sequence[layerwise.RouteRule] = (), **options: Any
) -> tuple[list[torch.optim.Optimizer], Step]:
    """`layerwise.Optimizer` with Muon for the matrices and AdamW for the rest. The norm is part of its step."""
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=lr, weight_decay=DECAY, **options),
        other=layerwise.AdamW(lr=OTHER_LR, betas=BETAS),
        rules=list(rules),
        clip_grad_norm=MAX_NORM,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return [optimizer], step


def _stepping(model: GPT, optimizers: list[torch.optim.Optimizer]) -> Step:
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    return step


def as_torch_does(model: GPT, lr: float) -> tuple[list[torch.optim.Optimizer], Step]:
    """`layerwise.Optimizer` with the settings of `torch.optim.Muon`: its coefficients, and fused weights as one matrix."""
    return layerwise_muon(model, lr, rules=WHOLE, coefficients="simple")


ARMS: dict[str, tuple[Callable[[GPT, float], tuple[list[torch.optim.Optimizer], Step]], tuple[float, ...]]] = {
    "torch AdamW": (adamw, (1e-4, 2e-4, 4e-4)),
    "torch.optim.Muon": (torch_muon, (2.5e-3, 5e-3, 1e-2)),
    "layerwise Muon": (layerwise_muon, (2.5e-3, 5e-3, 1e-2)),
    "layerwise Muon, as torch's": (as_torch_does, (2.5e-3, 5e-3, 1e-2)),
}
HIGHEST_DRAWN = 3.0
COLOURS = {"torch AdamW": "#8a8a8a", "torch.optim.Muon": "#d98c21", "layerwise Muon": "#1f5fa8"}


def train(arm: str, lr: float, corpus: Corpus, steps: int, stop: int | None = None) -> dict[str, Any]:
    """One run of `steps` steps, with the loss in nats per byte at each validation and the seconds until then; broken off after `stop` steps."""
    model = build_gpt(SHAPE, seed=0, device=DEVICE)
    for block in model.blocks:
        block.compile()
    make, _ = ARMS[arm]
    optimizers, step = make(model, lr)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: min((at + 1) / WARM_UP, (steps - at) / (steps - WARM_UP))
        )
        for optimizer in optimizers
    ]
    loader = Loader(corpus, Batching(SEQUENCES, 1, 1), SHAPE.seq_len, seed=0, rank=0, device=DEVICE)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(tokens)
        return next_byte_loss(logits, targets).mean()

    @torch.no_grad()
    def val_loss() -> float:
        return float(
            torch.stack([loss_of(one.tokens, one.targets) for one, _ in loader.val_batches(VAL_SEQUENCES)]).mean()
        )

    # Compilation is done before the clock starts.
    first = loader.train_batch(0, 0)
    loss_of(first.tokens, first.targets).backward()  # type: ignore[no-untyped-call]
    for optimizer in optimizers:
        optimizer.zero_grad()
    curve, seconds = [[0, 0.0, val_loss()]], 0.0
    for done in range(0, stop or steps, EVAL_EVERY):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(done, done + EVAL_EVERY):
            batch = loader.train_batch(number, 0)
            loss_of(batch.tokens, batch.targets).backward()  # type: ignore[no-untyped-call]
            step()
            for scheduler in schedulers:
                scheduler.step()
        torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        curve.append([done + EVAL_EVERY, round(seconds, 3), round(val_loss(), 4)])
    return {"arm": arm, "lr": lr, "val_loss": curve[-1][2], "seconds": curve[-1][1], "curve": curve}


def best_runs(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By arm, the run with the lowest loss at its end."""
    return {
        arm: min((run for run in report["runs"] if run["arm"] == arm), key=lambda run: run["val_loss"]) for arm in ARMS
    }


def summary(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of the best run of each arm."""
    best = best_runs(report)
    target = best["torch AdamW"]["val_loss"]
    return {
        arm: {
            "lr": run["lr"],
            "val_loss": run["val_loss"],
            "ms_per_step": round(run["seconds"] * 1e3 / report["steps"], 1),
            "seconds_to_adamw": seconds_to(run, target),
        }
        for arm, run in best.items()
    }


def chart(report: dict[str, Any]) -> str:
    """The best run of each arm as an SVG."""
    lines = [
        Series(arm, COLOURS[arm], tuple((x, y) for _, x, y in run["curve"] if y < HIGHEST_DRAWN))
        for arm, run in best_runs(report).items()
        if arm in COLOURS
    ]
    title = f"GPT of 355 M params, {report['tokens_per_step']:,} tokens a step, one {report['host']['gpu']}"
    return line_chart(title, "validation loss, nats per byte", lines, x_label="seconds of training") + "\n"


def seconds_to(run: dict[str, Any], loss: float) -> float | None:
    """Seconds until a run's validation loss is at most `loss`, between validations by linear interpolation; None if it never is."""
    for (_, x0, y0), (_, x1, y1) in zip(run["curve"], run["curve"][1:], strict=False):
        if y1 <= loss:
            return round(x1 if y0 == y1 else x0 + (x1 - x0) * (y0 - loss) / (y0 - y1), 2)
    return None


def finish(report: dict[str, Any]) -> None:
    """Write what follows from the runs: the figures of the best ones, and the chart."""
    report["best"] = summary(report)
    RESULTS.write_text(json.dumps(report) + "\n")
    CHART.parent.mkdir(exist_ok=True)
    CHART.write_text(chart(report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--draw", action="store_true", help="sum up and draw the runs of the JSON, and measure nothing")
    args = parser.parse_args()
    if args.draw:
        finish(json.loads(RESULTS.read_text()))
        return 0
    corpus = load_corpus(DataConfig(), SHAPE.seq_len)
    report: dict[str, Any] = {
        "command": "python benchmarks/loss_over_time.py",
        "host": {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__},
        "ranks": 1,
        "tokens_per_step": SEQUENCES * SHAPE.seq_len,
        "steps": args.steps,
        "what": "curve: [step, seconds of training, validation loss in nats per byte]",
        "runs": [],
    }
    for arm, (_, rates) in ARMS.items():  # each optimizer's own compilation and first use
        train(arm, rates[0], corpus, args.steps, stop=EVAL_EVERY)
    for position in range(3):  # arms in turn: the card gets hot, and the later must not pay for the earlier
        for arm, (_, rates) in ARMS.items():
            report["runs"].append(train(arm, rates[position], corpus, args.steps))
            print({name: value for name, value in report["runs"][-1].items() if name != "curve"}, flush=True)
            RESULTS.write_text(json.dumps(report) + "\n")
    finish(report)
    print(json.dumps(report["best"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

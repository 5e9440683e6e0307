"""How the host's work in one optimizer step grows with the number of params and of matrices.

    python benchmarks/host_time.py

Models of many tiny params (vectors that AdamW updates) and of many tiny matrices (Muon), on the CPU, in one process, wrapped in
`DataParallel`. What a step costs more for every further param is the slope between the models. CPU seconds of the one thread are
counted, so that a busy machine matters less. A sampling profiler tells which function they were spent in. Time in `kernels/` is
arithmetic: on a GPU a launch for all params together, here a call for each, so it is kept apart.

Writes benchmarks/results/host_time.json. What was found before is kept there, under the name that `--keep NAME` gives it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import layerwise

RESULTS = Path(__file__).parent / "results" / "host_time.json"
SOURCES = Path(layerwise.__file__).parent
STEPS, WARM_UP = 25, 3
SAMPLE_S = 0.001
GOAL_US = 2.0
"""Per param and step, arithmetic left out."""
SHOWN = 12


def vectors(count: int) -> nn.Module:
    """Params that no matrix rule manages, a module around each as models have them."""
    return nn.ModuleList(nn.RMSNorm(4) for _ in range(count))


def matrices(count: int) -> nn.Module:
    return nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))


MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "param": (vectors, (100, 400, 1600)),
    "matrix": (matrices, (50, 200, 800)),
}
"""What is counted, a model with so many of them, and how many."""


@contextmanager
def sampled(found: Counter[str]) -> Iterator[None]:
    """Count, every so often of this process's CPU time, which function of the library is at work."""

    def note(_: int, frame: FrameType | None) -> None:
        found[where(frame)] += 1

    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def where(frame: FrameType | None) -> str:
    """The innermost function of the library on the stack."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(SOURCES):
            return f"{path.relative_to(SOURCES).as_posix()}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "elsewhere"


def measure(make: Callable[[int], nn.Module], count: int) -> tuple[float, Counter[str]]:
    """Microseconds of CPU time of the quickest step, and where samples of all steps fell."""
    model = layerwise.DataParallel(make(count))
    # One short iteration of Newton-Schulz: how long it takes is no matter here.
    muon = layerwise.Muon(lr=1e-3, ns_dtype="fp32", coefficients=[(1.5, -0.5, 0.0)], steps=1)
    optimizer = layerwise.Optimizer(model, matrix=muon, other=layerwise.AdamW(lr=1e-3), clip_grad_norm=1.0)
    params = list(model.parameters())
    times, samples = [], Counter[str]()
    for step in range(WARM_UP + STEPS):
        torch.stack([param.sum() for param in params]).sum().backward()
        if step < WARM_UP:
            optimizer.step()
            continue
        with sampled(samples):
            begin = time.thread_time()
            optimizer.step()
            times.append((time.thread_time() - begin) * 1e6)
    model.unwrap()
    return min(times), samples


def slope(xs: tuple[int, ...], ys: list[float]) -> float:
    return statistics.linear_regression(xs, ys).slope


def grown(make: Callable[[int], nn.Module], counts: tuple[int, ...]) -> dict[str, Any]:
    """How a step grows with the model: in all, and by function."""
    found = [measure(make, count) for count in counts]
    totals = [total for total, _ in found]
    shares = [{name: hits / max(samples.total(), 1) for name, hits in samples.items()} for _, samples in found]
    names = set().union(*shares)
    by_function = {
        name: slope(counts, [total * share.get(name, 0.0) for total, share in zip(totals, shares, strict=True)])
        for name in names
    }
    arithmetic = sum(us for name, us in by_function.items() if name.startswith("kernels/"))
    whole = slope(counts, totals)
    ranked = sorted(by_function.items(), key=lambda item: (-item[1], item[0]))
    return {
        "step_us": {str(count): round(total) for count, total in zip(counts, totals, strict=True)},
        "us_each": round(whole, 2),
        "arithmetic_us_each": round(arithmetic, 2),
        "host_us_each": round(whole - arithmetic, 2),
        "host_us_each_by_function": {name: round(us, 2) for name, us in ranked[:SHOWN] if round(us, 2) > 0},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", metavar="NAME", default="", help="keep the rows of the last run under this name")
    keep = parser.parse_args().keep
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = {name: grown(make, counts) for name, (make, counts) in MODELS.items()}
    last = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept = {**last.get("kept", {}), **({keep: last["rows"]} if keep else {})}
    report = {
        "what": "CPU microseconds of one step for every further param and every further matrix; host: arithmetic left out",
        "command": "python benchmarks/host_time.py",
        "host": {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "steps": STEPS,
        "goal_host_us_per_param": GOAL_US,
        "rows": rows,
        "kept": kept,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{row['us_each']:>7.2f} us per {name}, {row['host_us_each']:.2f} without arithmetic")
        for function, us in row["host_us_each_by_function"].items():
            print(f"{us:>7.2f}   {function}")
    return 0 if rows["param"]["host_us_each"] <= GOAL_US else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time of one optimizer step on a GPU: layerwise Muon beside torch.optim.Muon and fused AdamW, in one run.

    python benchmarks/optimizer_step.py

Matrices of a GPT with d_model 1024 and 24 layers, fp32 params and gradients already there. Writes benchmarks/results/optimizer_step.json. The step as it is
today uses plain torch products and foreach kernels; the figures are the baseline for the kernels to come.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import layerwise

RESULTS = Path(__file__).parent / "results" / "optimizer_step.json"
WIDTH, LAYERS, REPEATS = 1024, 24, 15
AS_TORCH_DOES = layerwise.RouteRule(pattern="*.qkv.weight", to="matrix", split="whole")
"""torch.optim.Muon orthogonalises the fused weight as one, so here we do too."""


def build() -> nn.Module:
    layers = [
        nn.ModuleDict(
            {
                "qkv": nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                "out": nn.Linear(WIDTH, WIDTH, bias=False),
                "up": nn.Linear(WIDTH, 4 * WIDTH, bias=False),
                "down": nn.Linear(4 * WIDTH, WIDTH, bias=False),
            }
        )
        for _ in range(LAYERS)
    ]
    return nn.ModuleList(layers).cuda()


def median_ms(step: Callable[[], object], prepare: Callable[[], object]) -> float:
    times = []
    for repeat in range(REPEATS + 3):
        prepare()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, float]:
    module = build()
    params = list(module.parameters())
    optimizer = make(module)

    def prepare() -> None:
        for param in params:
            param.grad = torch.randn_like(param)

    prepare()
    optimizer.step()
    torch.cuda.synchronize()
    prepare()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    extra = torch.cuda.max_memory_allocated() - before
    return {"ms": round(median_ms(optimizer.step, prepare), 2), "extra_peak_mib": round(extra / 2**20)}


def main() -> int:
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "torch AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True),
        "torch Muon": lambda module: torch.optim.Muon(module.parameters(), lr=1e-3),
        "layerwise Muon": lambda module: layerwise.Optimizer(
            module, matrix=layerwise.Muon(lr=1e-3), other=layerwise.AdamW(lr=1e-3), rules=[AS_TORCH_DOES]
        ),
        "layerwise AdamW": lambda module: layerwise.Optimizer(
            module, matrix=layerwise.AdamW(lr=1e-3), other=layerwise.AdamW(lr=1e-3), rules=[AS_TORCH_DOES]
        ),
    }
    rows = {name: measure(make) for name, make in makers.items()}
    report = {
        "command": "python benchmarks/optimizer_step.py",
        "host": {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__},
        "matrix_params": sum(param.numel() for param in build().parameters()),
        "rows": rows,
        "layerwise_over_torch_muon": round(rows["layerwise Muon"]["ms"] / rows["torch Muon"]["ms"], 3),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

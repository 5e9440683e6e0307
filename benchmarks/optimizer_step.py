"""Time of one optimizer step on a GPU: layerwise Muon beside torch.optim.Muon, fused AdamW and those of other libraries that are installed, in one run.

    python benchmarks/optimizer_step.py

Matrices of a GPT with d_model 1024 and 24 layers, and of one with d_model 2048, fp32 params and gradients already there. Weights decay as torch's rules have it
by default; torch's do not clip, and ours does, once more in a row of its own. Writes benchmarks/results/optimizer_step.json.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import layerwise
from layerwise.cli import measuring, peers
from layerwise.cli.measuring import gpt_matrices
from layerwise.kernels.facts import products_in_words

RESULTS = Path(__file__).parent / "results" / "optimizer_step.json"
WIDTH, WIDE, LAYERS, REPEATS = 1024, 2048, 24, 15
AS_TORCH_DOES = layerwise.RouteRule(pattern="*.qkv.weight", to="matrix", split="whole")
"""torch.optim.Muon orthogonalises the fused weight as one, so here we do too."""


def build(width: int = WIDTH) -> nn.Module:
    return gpt_matrices(width, LAYERS, torch.device("cuda"))


def ours(module: nn.Module, rule: layerwise.Muon | layerwise.AdamW, clip: float | None = None) -> layerwise.Optimizer:
    return layerwise.Optimizer(
        module, matrix=rule, other=layerwise.AdamW(lr=1e-3), rules=[AS_TORCH_DOES], clip_grad_norm=clip
    )


def median_ms(
    step: Callable[[], object], prepare: Callable[[], object], before: Callable[[], object] = lambda: None
) -> float:
    return measuring.median_ms(step, prepare, device=torch.device("cuda"), repeats=REPEATS, before=before)


def products(count: int = 8) -> Callable[[], None]:
    """What backward ends with, as far as an optimizer is concerned: the card is busy, and the host has time."""
    product = measuring.large_product(torch.device("cuda"))

    def run() -> None:
        for _ in range(count):
            product()

    return run


def host_ms(step: Callable[[], object], prepare: Callable[[], object] = lambda: None, repeats: int = 7) -> float:
    return measuring.host_ms(step, prepare, device=torch.device("cuda"), repeats=repeats)


def measure(make: Callable[[nn.Module], torch.optim.Optimizer], width: int = WIDTH) -> dict[str, float]:
    module = build(width)
    params = list(module.parameters())
    optimizer = make(module)

    def prepare() -> None:
        for param in params:
            param.grad = torch.randn_like(param)

    prepare()
    optimizer.step()
    torch.cuda.synchronize()
    prepare()
    extra = extra_peak_nbytes(optimizer, params)
    # The card gets hot, and slower: what it could do is asked beside each.
    before, ms, after = ceiling_tflops(), median_ms(optimizer.step, prepare), ceiling_tflops()
    return {
        "ms": round(ms, 2),
        "loop_ms": round(median_ms(optimizer.step, prepare, products()), 2),
        "tflops": round((before + after) / 2, 1),
        "host_ms": round(host_ms(optimizer.step, prepare), 2),
        "extra_peak_mib": round(extra / 2**20),
    }


def extra_peak_nbytes(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> int:
    """Most bytes that a step holds beyond what was there before it. The gradients are kept alive: what a step frees of them
    must not make room for what it allocates."""
    kept = [param.grad for param in params]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    del kept
    return extra


def ceiling_tflops() -> float:
    return measuring.product_tflops(torch.device("cuda"))


def main() -> int:
    makers: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
        "torch AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True),
        "layerwise Muon": lambda module: ours(module, layerwise.Muon(lr=1e-3, weight_decay=0.1)),
        "layerwise Muon, clipped": lambda module: ours(module, layerwise.Muon(lr=1e-3, weight_decay=0.1), clip=1.0),
        "layerwise AdamW": lambda module: ours(module, layerwise.AdamW(lr=1e-3, weight_decay=0.01)),
        **peers.optimizers(),
    }
    ceiling = ceiling_tflops()
    rows = {name: measure(make) for name, make in makers.items()}
    wide = {name: measure(make, WIDE) for name, make in makers.items() if name not in ("torch Muon", "layerwise AdamW")}
    report = {
        "command": "python benchmarks/optimizer_step.py",
        "host": {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), "torch": torch.__version__},
        "what": {
            "ms": "median time of a step on a GPU that has nothing else to do, gradients already there",
            "loop_ms": "the same behind some 12 ms of products, as at the end of backward: the host is ahead",
            "tflops": "what a large product of cuBLAS reaches right before and right after",
            "host_ms": "how long the host is busy with it",
            "extra_peak_mib": "most memory during a step beyond weights, state and gradients; all gradients are kept alive",
        },
        "matrix_params": sum(param.numel() for param in build().parameters()),
        "ceiling_tflops": round(ceiling, 1),
        "products": products_in_words(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16),
        "rows": rows,
        "rows_at_width_2048": wide,
        "layerwise_over_torch_muon": round(rows["layerwise Muon"]["ms"] / rows["torch Muon"]["ms"], 3),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

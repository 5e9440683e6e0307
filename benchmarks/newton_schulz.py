"""Time and accuracy of Newton-Schulz alone on a GPU: our own kernels beside torch's products and those of other libraries that are installed, with ceilings
and floors from the same run.

    python benchmarks/newton_schulz.py

Random bf16 matrices, five Polar Express steps, medians; ours recorded and replayed, as a step does it, and the others' with their own recordings. The floor of
a row is its fewest products, symmetric ones at half their size, at the rate that cuBLAS has between the measurements of that row. Writes
benchmarks/results/newton_schulz.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

from layerwise.cli import peers
from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels import newton_schulz
from layerwise.kernels.facts import products_in_words
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.kernels.products import Products
from layerwise.layout.cost import fewest_flops, resolve_method

RESULTS = Path(__file__).parent / "results" / "newton_schulz.json"
SCHEDULE = coefficient_schedule("polar_express", 5)
SHAPES = [
    (24, 1024, 1024),
    (24, 3072, 1024),
    (24, 1024, 4096),
    (1, 4096, 4096),
    (1, 4096, 14336),
    (1, 8192, 28672),
    (32, 7168, 2048),
    (16, 768, 3072),
    (64, 768, 768),
]
KINDS = ("random", "low rank", "condition 1e4", "condition 1e8", "tiny", "huge")
ACCURACY_SHAPES = [(1024, 1024), (1024, 4096), (3072, 1024)]
PRODUCT = 8192
ROUNDS = 3


def median_ms(call: Callable[[], object], *, repeats_ms: int = 150) -> float:
    """The median over repeats, with cold caches. A batch that takes long gets a few repeats at least."""
    call()
    return float(do_bench(call, warmup=25, rep=repeats_ms, return_mode="median"))


def host_ms(call: Callable[[], object]) -> float:
    """How long the host takes to launch it all, while the GPU is busy with something else or not."""
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def ceiling() -> float:
    """TFLOP/s of a large product of cuBLAS, at the temperature that the card has."""
    left, right = (torch.randn(PRODUCT, PRODUCT, device="cuda").bfloat16() for _ in range(2))
    return 2 * PRODUCT**3 / median_ms(lambda: left @ right, repeats_ms=50) / 1e9


def copy_tb_s() -> float:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return round(2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9, 3)


def floor_ms(batch: int, rows: int, cols: int, tflops: float) -> float:
    return batch * fewest_flops(rows, cols, len(SCHEDULE)) / tflops / 1e9


def with_torch_products(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def changed() -> Tensor:
        chosen = newton_schulz.products_for
        newton_schulz.products_for = lambda *_: Products("torch", "asked for")  # type: ignore[assignment]
        try:
            return call()
        finally:
            newton_schulz.products_for = chosen

    return changed


def measure(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Everybody in turn, a few times: the card gets hot, and nobody must pay for that alone."""
    update = torch.randn(shape, device="cuda").bfloat16()

    def ours() -> Tensor:
        return orthogonalize(update, schedule=SCHEDULE)

    others = {name: partial(call, update) for name, call in peers.newton_schulz(SCHEDULE).items()}
    arms: dict[str, Callable[[], object]] = {"ours": recorded(ours), **others, "torch": with_torch_products(ours)}
    times: dict[str, list[float]] = {name: [] for name in arms}
    tflops = []
    for _ in range(ROUNDS):
        tflops.append(ceiling())
        for name, call in arms.items():
            times[name].append(median_ms(call, repeats_ms=80))
    found = {name: statistics.median(some) for name, some in times.items()}
    rate = statistics.median(tflops)
    floor = floor_ms(*shape, rate)
    print(shape, {name: round(ms, 3) for name, ms in found.items()}, f"floor {floor:.3f}", flush=True)
    return {
        "shape": list(shape),
        "method": resolve_method("auto", *shape[1:]),
        "ours_ms": round(found["ours"], 3),
        "torch_products_ms": round(found["torch"], 3),
        "peers_ms": {name: round(found[name], 3) for name in others},
        "tflops": round(rate, 1),
        "floor_ms": round(floor, 3),
        "ours_over_floor": round(found["ours"] / floor, 2),
        "host_ms": round(host_ms(ours), 2),
    }


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The same as a CUDA graph: without the host's time for launches."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def example(kind: str, rows: int, cols: int) -> Tensor:
    plain = torch.randn(2, rows, cols, device="cuda")
    short = min(rows, cols)
    match kind:
        case "low rank":
            plain = torch.randn(2, rows, 16, device="cuda") @ torch.randn(2, 16, cols, device="cuda")
        case "tiny":
            plain *= 1e-36
        case "huge":
            plain *= 1e34
        case "condition 1e4" | "condition 1e8":
            left, right = (
                torch.linalg.qr(torch.randn(2, side, short, device="cuda", dtype=torch.float64))[0]
                for side in (rows, cols)
            )
            values = torch.logspace(0, -float(kind[-1]), short, device="cuda", dtype=torch.float64)
            plain = ((left * values) @ right.mT).float()
    return plain.bfloat16()


def accuracy(kind: str, rows: int, cols: int) -> dict[str, Any]:
    """Distances to the schedule in float64, relative, in the Frobenius norm."""
    update = example(kind, rows, cols)
    exact = orthogonalize(update.double(), schedule=SCHEDULE, method="standard", dtype=torch.float64)

    def error(found: Tensor) -> float:
        return round(float((found.double() - exact).norm() / exact.norm()), 5)

    return {
        "kind": kind,
        "shape": [rows, cols],
        "ours": error(orthogonalize(update, schedule=SCHEDULE)),
        "torch_products": error(with_torch_products(lambda: orthogonalize(update, schedule=SCHEDULE))()),
        "torch_products_standard": error(
            with_torch_products(lambda: orthogonalize(update, schedule=SCHEDULE, method="standard"))()
        ),
    }


def main() -> int:
    torch.manual_seed(0)
    cold = round(ceiling(), 1)
    rows = [measure(shape) for shape in SHAPES]
    report = {
        "command": "python benchmarks/newton_schulz.py",
        "host": {
            "gpu": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "products": products_in_words(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16),
        "ceilings": {"tflops_cold": cold, "tflops_hot": round(ceiling(), 1), "copy_tb_s": copy_tb_s()},
        "rows": rows,
        "accuracy": [accuracy(kind, *shape) for kind in KINDS for shape in ACCURACY_SHAPES],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Time of element-wise work over lists of tensors on a GPU: our own kernels beside torch's, with the ceiling from the same run.

    python benchmarks/elementwise.py

The matrices of a 350M model (24 layers) and 200 vectors beside them, each a tensor of its own, fp32. Medians. The floor of a row is its bytes, each read or
written once, at the rate of a large copy. Host times are of a step in which nothing moved and of one in which all gradients are new objects elsewhere.
Writes benchmarks/results/elementwise.json.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).parent.parent))  # one way to time the host, in another benchmark

from benchmarks.optimizer_step import host_ms
from layerwise.kernels.elementwise import adamw_, copy_all_, lion_, momentum_, subtract_scaled_
from layerwise.kernels.stats import count_zeros, square_sums

RESULTS = Path(__file__).parent / "results" / "elementwise.json"
SHAPES = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096)] * 24
VECTORS = [(1024,)] * 200
Tensors = list[Tensor]
REPEATS = 15


def tensors(shapes: list[tuple[int, ...]]) -> Tensors:
    return [torch.randn(shape, device="cuda") for shape in shapes]


def device_ms(call: Callable[[], object]) -> float:
    call()
    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def copy_tb_s() -> float:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_ms(lambda: target.copy_(source)) / 1e9


class Grads:
    """Gradients that may be new objects elsewhere."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.now = tensors(shapes)

    def renew(self) -> None:
        self.now = [grad.clone() for grad in self.now]


def fused_adamw(params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors) -> Callable[[], object]:
    """Torch's, without the loop of its optimizer around it."""
    steps = [torch.ones((), device="cuda") for _ in params]
    options = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0}
    return lambda: torch._fused_adamw_(
        params, grads, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **options
    )


def measure() -> dict[str, dict[str, Any]]:
    both, numel = [*SHAPES, *VECTORS], sum(rows * cols for rows, cols in SHAPES)
    total = numel + 1024 * len(VECTORS)
    masters, averages, squares = (tensors(both) for _ in range(3))
    squares = [square.abs() for square in squares]
    grads = Grads(both)
    wire = [matrix.bfloat16() for matrix in masters[: len(SHAPES)]]
    matrices, updates = masters[: len(SHAPES)], averages[: len(SHAPES)]
    factors = [1e-9 * (1 + index % 4) for index in range(len(SHAPES))]
    columns = [matrix[:, :512] for matrix in matrices]
    packed = [torch.empty(column.shape, dtype=torch.bfloat16, device="cuda") for column in columns]
    turned = [torch.empty(matrix.shape[::-1], dtype=torch.bfloat16, device="cuda").mT for matrix in matrices]

    def torch_momentum() -> None:
        torch._foreach_lerp_(averages, grads.now, 0.05)
        torch._foreach_lerp_(grads.now, averages, 0.95)

    rows: list[tuple[str, int, Callable[[], object], Callable[[], object] | None]] = [
        (
            "adamw",
            7 * 4 * total,
            lambda: adamw_(masters, grads.now, averages, squares, step=3, lr=1e-9, betas=(0.9, 0.95), eps=1e-8),
            fused_adamw(masters, grads.now, averages, squares),
        ),
        ("lion", 5 * 4 * total, lambda: lion_(masters, grads.now, averages, lr=1e-9, betas=(0.9, 0.95)), None),
        (
            "momentum",
            4 * 4 * total,
            lambda: momentum_(grads.now, averages, momentum=0.95, nesterov=True),
            torch_momentum,
        ),
        (
            "momentum into bf16",
            14 * numel,
            lambda: momentum_(grads.now[: len(SHAPES)], updates, wire, momentum=0.95, nesterov=True),
            None,
        ),
        (
            "subtract, updates in bf16",
            10 * numel,
            lambda: subtract_scaled_(matrices, wire, factors),
            lambda: [matrix.add_(update, alpha=-1e-9) for matrix, update in zip(matrices, wire, strict=True)],
        ),
        (
            "subtract, updates in fp32",
            12 * numel,
            lambda: subtract_scaled_(matrices, updates, factors),
            lambda: torch._foreach_add_(matrices, updates, alpha=-1e-9),
        ),
        (
            "copy fp32 to bf16",
            6 * numel,
            lambda: copy_all_(wire, matrices),
            lambda: torch._foreach_copy_(wire, matrices),
        ),
        (
            "copy half of the columns to bf16",
            sum(6 * column.numel() for column in columns),
            lambda: copy_all_(packed, columns),
            lambda: torch._foreach_copy_(packed, columns),
        ),
        (
            "copy fp32 to transposed bf16",
            6 * numel,
            lambda: copy_all_(turned, matrices),
            lambda: torch._foreach_copy_(turned, matrices),
        ),
        (
            "square sums",
            4 * total,
            lambda: square_sums(grads.now),
            lambda: torch.stack(torch._foreach_norm(grads.now, 2, dtype=torch.float64)).square(),
        ),
        ("count of zeros", 4 * total, lambda: count_zeros(grads.now), None),
    ]
    ceiling, found = copy_tb_s(), {}
    for name, nbytes, ours, theirs in rows:
        floor = nbytes / ceiling / 1e9
        time_ms = device_ms(ours)
        found[name] = {
            "ours_ms": round(time_ms, 3),
            "torch_ms": round(device_ms(theirs), 3) if theirs else None,
            "floor_ms": round(floor, 3),
            "ours_over_floor": round(time_ms / floor, 2),
            "host_ms": round(host_ms(ours, repeats=REPEATS), 3),
            "host_with_new_gradients_ms": round(host_ms(ours, grads.renew, REPEATS), 3),
            "torch_host_ms": round(host_ms(theirs, repeats=REPEATS), 3) if theirs else None,
        }
    return found


def main() -> int:
    torch.manual_seed(0)
    before = copy_tb_s()
    report = {
        "command": "python benchmarks/elementwise.py",
        "host": {
            "gpu": torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "tensors": len(SHAPES) + len(VECTORS),
        "copy_tb_s": round(before, 3),
        "rows": measure(),
        "copy_tb_s_after": round(copy_tb_s(), 3),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

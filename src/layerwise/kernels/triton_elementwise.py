"""Element-wise work as Triton kernels: one pass over memory where a chain of foreach kernels takes several.

Imported only where `has_own_kernels` says so. What an element gets depends on itself alone, wherever it lies.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["numel"])
def _momentum_kernel(grad, state, numel, momentum, rest, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    g = tl.load(grad + at, mask=mask)
    m = momentum * tl.load(state + at, mask=mask) + rest * g
    tl.store(state + at, m, mask=mask)
    if NESTEROV:
        m = rest * g + momentum * m
    tl.store(grad + at, m, mask=mask)


@triton.jit(do_not_specialize=["numel"])
def _adamw_kernel(
    master, grad, avg, avg_sq, numel, beta1, rest1, beta2, rest2, root, eps, size, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    g = tl.load(grad + at, mask=mask)
    m = beta1 * tl.load(avg + at, mask=mask) + rest1 * g
    v = beta2 * tl.load(avg_sq + at, mask=mask) + rest2 * g * g
    tl.store(avg + at, m, mask=mask)
    tl.store(avg_sq + at, v, mask=mask)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    tl.store(master + at, tl.load(master + at, mask=mask) - size * tl.div_rn(m, denominator), mask=mask)


@triton.jit(do_not_specialize=["numel"])
def _lion_kernel(master, grad, avg, numel, beta1, rest1, beta2, rest2, lr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < numel
    g = tl.load(grad + at, mask=mask)
    m = tl.load(avg + at, mask=mask)
    direction = beta1 * m + rest1 * g
    sign = tl.where(direction > 0, lr, tl.where(direction < 0, -lr, lr * direction))  # zero stays zero, NaN stays NaN
    tl.store(master + at, tl.load(master + at, mask=mask) - sign, mask=mask)
    tl.store(avg + at, beta2 * m + rest2 * g, mask=mask)


_BLOCK, _WARPS = 4096, 8


def _launch(kernel: Any, numel: int, *given: object) -> None:
    if numel:
        kernel[(triton.cdiv(numel, _BLOCK),)](*given, BLOCK=_BLOCK, num_warps=_WARPS)


def fused_momentum_(grad: Tensor, state: Tensor, *, momentum: float, nesterov: bool) -> None:
    """`momentum_` of one run, in place."""
    numel = grad.numel()
    _launch(_momentum_kernel, numel, grad, state, numel, momentum, 1.0 - momentum, nesterov)


def fused_adamw_(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    betas: tuple[float, float],
    root: float,
    eps: float,
    size: float,
) -> None:
    """`adamw_` of one run, in place; `root` and `size` are what the step's number comes to."""
    numel, (beta1, beta2) = master.numel(), betas
    runs = master, grad, exp_avg, exp_avg_sq
    _launch(_adamw_kernel, numel, *runs, numel, beta1, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, size)


def fused_lion_(master: Tensor, grad: Tensor, exp_avg: Tensor, *, lr: float, betas: tuple[float, float]) -> None:
    """`lion_` of one run, in place."""
    numel, (beta1, beta2) = master.numel(), betas
    _launch(_lion_kernel, numel, master, grad, exp_avg, numel, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr)

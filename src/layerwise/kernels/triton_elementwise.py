"""Element-wise work as Triton kernels: one pass over memory where a chain of foreach kernels takes several.

Imported only where `has_own_kernels` says so. What an element gets depends on itself alone, wherever it lies.
"""

from __future__ import annotations

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


_BLOCK, _WARPS = 4096, 8


def fused_momentum_(grad: Tensor, state: Tensor, *, momentum: float, nesterov: bool) -> None:
    """`momentum_` of one run, in place."""
    numel = grad.numel()
    if numel:
        grid = (triton.cdiv(numel, _BLOCK),)
        _momentum_kernel[grid](grad, state, numel, momentum, 1.0 - momentum, nesterov, _BLOCK, num_warps=_WARPS)

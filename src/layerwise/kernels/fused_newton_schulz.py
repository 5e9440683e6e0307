"""Newton-Schulz on our own kernels: the same polynomials as `newton_schulz`, with symmetric products and no passes over
the matrices but one for their norm and one that brings them into the dtype of the products.

[Note: The Gram form without a diagonal]
Q of a segment is held as P + q I, with q the product of the a so far: P <- P Z + a P + q Z. The large q never drowns P's
own diagonal, and no step needs a pass of its own to add it; the last step of a segment adds it on the way. Every
n x n matrix here is a polynomial of one symmetric matrix, so all of their products are symmetric. Rounding makes the
blocks on the diagonal a little unsymmetric, and the steps damp that as they damp other errors, but only as long as it is
R Z that is computed: R Z^T lets it grow tenfold in a segment.

[Note: The norm is folded]
Matrices are multiplied by a power of two, which rounds nothing, and what is left to Frobenius norm 1 goes into the first
products: R = s^2 X X^T, and X <- s (a X + Z X).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.config.coefficients import Coefficient
from layerwise.kernels.products import full_tile, symmetric_tile
from layerwise.kernels.triton_products import full, new_batch, normalised, symmetric
from layerwise.layout.cost import gram_segments

# B: batch of equal-shaped matrices, R: rows, C: columns, M: the shorter of the two.


def orthogonalize_fused(update_BRC: Tensor, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype) -> Tensor:
    """As `orthogonalize`, for a non-empty batch on a device that has these kernels; `dtype` has 16 bits."""
    form = _gram if method == "gram" else _standard
    with torch.cuda.device_of(update_BRC):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        return form(update_BRC, schedule, dtype).contiguous()


def _standard(update_BRC: Tensor, schedule: Sequence[Coefficient], dtype: torch.dtype) -> Tensor:
    x_BRC, scales, squared = normalised(update_BRC, dtype)
    first: tuple[Tensor | None, Tensor | None] = scales, squared
    for a, b, c in schedule:
        gram_BMM = _gram_matrix(x_BRC, first[1])
        if c == 0.0:
            x_BRC = _times(gram_BMM, x_BRC, alpha=b, beta=a, scales=first[0])
        else:
            x_BRC = _times(_square(gram_BMM, b, c), x_BRC, beta=a, scales=first[0])
        first = None, None
    return x_BRC


def _gram(update_BRC: Tensor, schedule: Sequence[Coefficient], dtype: torch.dtype) -> Tensor:
    """See [Note: The Gram form without a diagonal], and in newton_schulz why it works in fp16 and restarts."""
    x_BRC, scales, squared = normalised(update_BRC, torch.float16)
    first: tuple[Tensor | None, Tensor | None] = scales, squared
    done = 0
    for length in gram_segments(len(schedule)):
        segment = schedule[done : done + length]
        done += length
        p_BMM, q = _segment(_gram_matrix(x_BRC, first[1]), segment)
        x_BRC = _times(p_BMM, x_BRC, beta=q, scales=first[0], dtype=dtype if done == len(schedule) else None)
        first = None, None
    return x_BRC


def _segment(r_BMM: Tensor, segment: Sequence[Coefficient]) -> tuple[Tensor, float]:
    """P and q such that P X + q X is X after the steps of `segment`; R is its Gram matrix."""
    tile = symmetric_tile(r_BMM.shape[1])
    a, b, c = segment[0]
    z_BMM = _square(r_BMM, b, c)
    p_BMM, q = z_BMM, a
    for later, (next_a, b, c) in enumerate(segment[1:], start=2):
        rz_BMM = symmetric(r_BMM, z_BMM, tile=tile, addends=((r_BMM, a),))
        r_BMM = symmetric(z_BMM, rz_BMM, tile=tile, addends=((rz_BMM, a),))
        z_BMM = _square(r_BMM, b, c)
        a, diagonal = next_a, q * next_a if later == len(segment) else 0.0
        p_BMM = symmetric(p_BMM, z_BMM, tile=tile, addends=((p_BMM, a), (z_BMM, q)), diagonal=diagonal)
        q = q * a - diagonal
    return p_BMM, q


def _gram_matrix(x_BRC: Tensor, scales: Tensor | None) -> Tensor:
    """X X^T, or X^T X of tall ones."""
    rows, cols = x_BRC.shape[1:]
    is_tall = rows > cols
    tile = symmetric_tile(min(rows, cols))
    return symmetric(x_BRC, x_BRC, tile=tile, scales=scales, left_t=is_tall, right_t=not is_tall)


def _square(gram_BMM: Tensor, b: float, c: float) -> Tensor:
    """b A + c A^2."""
    if c == 0.0:
        batch, size, _ = gram_BMM.shape
        return torch.mul(gram_BMM, b, out=new_batch(batch, size, size, gram_BMM.dtype, gram_BMM.device))
    return symmetric(gram_BMM, gram_BMM, tile=symmetric_tile(gram_BMM.shape[1]), alpha=c, addends=((gram_BMM, b),))


def _times(
    p_BMM: Tensor, x_BRC: Tensor, *, beta: float, alpha: float = 1.0, scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """alpha P X + beta X, or alpha X P + beta X of tall ones."""
    rows, cols = x_BRC.shape[1:]
    left, right = (x_BRC, p_BMM) if rows > cols else (p_BMM, x_BRC)
    tile = full_tile(rows, cols)
    addend = None if beta == 0.0 else x_BRC
    return full(left, right, tile=tile, alpha=alpha, addend=addend, beta=beta, scales=scales, dtype=dtype)

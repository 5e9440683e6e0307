"""Newton-Schulz orthogonalisation of a batch of equal-shaped matrices.

Both forms evaluate the same polynomials and differ in rounding only:
  standard  A = X X^T;  X <- a X + (b A + c A^2) X                                       two long products a step
  gram      R = X X^T;  Z = b R + c R^2;  Q <- Q (Z + a I);  R <- (Z + a I)^2 R;  at the end X <- Q X

[Note: The Gram form works in fp16 and restarts]
Q is large (tens) where X is small, so its rounding errors on the directions where X is near 1 reach the result, and no
later step sees them. bf16 keeps too few bits for that: rounded to bf16, R has eigenvalues around -4e-4 that no X X^T
has, each step multiplies them by a^2 instead of pulling them to 1, and Q follows. Two measures, both those of the
published Gram Newton-Schulz (arXiv 2608.11612):
  * X, R, Z and Q are held in fp16 when bf16 is asked for: three more bits at the same tensor-core speed, and behind the
    Frobenius norm everything fits fp16's range. Only the result is rounded to bf16. fp32 for R, Z and Q would be better
    still, but on a GPU costs more than the Gram form saves; rounding Q alone to bf16 for the long product is worse.
  * a restart (X <- Q X, and R anew from that X) after two steps and then after at most three, before a spurious
    eigenvalue has grown enough to matter. Five steps restart once; a schedule of ten needs more than that.
The a I of a step is folded into the products (Q Z + a Q, R Z + a R), never added to Z, whose small diagonal entries it
would drown; only the first Q of a segment, which has no product to fold it into, takes it on its diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.config.coefficients import Coefficient
from layerwise.kernels.facts import products_for
from layerwise.layout.cost import gram_segments, resolve_method

# B: batch of equal-shaped matrices, M: short side, N: long side (the public function takes and returns either order).


def orthogonalize(
    update_BMN: Tensor,
    *,
    schedule: Sequence[Coefficient],
    method: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Every matrix with its singular values pushed towards 1 by the steps of `schedule`: new, contiguous, in `dtype`.

    The input is never written to. Its scale does not matter, from denormals to the largest float; a zero matrix gives
    zeros, and a matrix that holds inf or NaN gives NaN and leaves the others of its batch alone. On CPU, and wherever
    products are our own (see `products_for`), the result for a matrix depends, bit by bit, on its shape and values
    alone, not on its batch. With torch's products on CUDA the size of the batch may select another kernel.

    >>> diagonal = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]])
    >>> orthogonalize(diagonal, schedule=[(1.5, -0.5, 0.0)] * 9, dtype=torch.float32).round(decimals=3)
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    _check_arguments(update_BMN, schedule)
    rows, cols = update_BMN.shape[1:]
    resolved = resolve_method(method, rows, cols)
    if update_BMN.numel() == 0:
        return torch.empty(update_BMN.shape, dtype=dtype, device=update_BMN.device)
    if products_for(update_BMN.device, update_BMN.dtype, dtype).backend == "triton":
        from layerwise.kernels.fused_newton_schulz import orthogonalize_fused

        return orthogonalize_fused(update_BMN, schedule, resolved, dtype)
    is_tall = rows > cols
    short_first_BMN = update_BMN.mT if is_tall else update_BMN
    if update_BMN.is_cuda:
        orthogonal_BMN = _orthogonalize_batch(short_first_BMN, schedule, resolved, dtype)
    else:  # each matrix goes its own way, so that no reduction or product can see how many neighbours it has
        singles = torch.split(short_first_BMN, 1)
        orthogonal_BMN = torch.cat([_orthogonalize_batch(single, schedule, resolved, dtype) for single in singles])
    return (orthogonal_BMN.mT if is_tall else orthogonal_BMN).contiguous()


def _check_arguments(update_BMN: Tensor, schedule: Sequence[Coefficient]) -> None:
    if update_BMN.dim() != 3:
        raise ValueError(f"update has shape {tuple(update_BMN.shape)}: expected a batch of matrices (B, M, N).")
    if not update_BMN.is_floating_point():
        raise TypeError(f"update has dtype {update_BMN.dtype}: expected a floating-point dtype.")
    if len(schedule) == 0:
        raise ValueError("schedule is empty: expected at least one (a, b, c).")


def _orthogonalize_batch(
    update_BMN: Tensor, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype
) -> Tensor:
    unit_BMN = _unit_frobenius_norm(update_BMN)
    if method == "gram":
        return _gram(unit_BMN.to(_gram_dtype(dtype)), schedule).to(dtype)
    return _standard(unit_BMN.to(dtype), schedule)


def _unit_frobenius_norm(update_BMN: Tensor) -> Tensor:
    """Contiguous copies with Frobenius norm 1, in fp32 or better; zero stays zero."""
    wide_BMN = update_BMN.to(torch.promote_types(update_BMN.dtype, torch.float32)).contiguous()
    # With the largest element at 1 the sum of squares lies in [1, M*N]: it cannot overflow or underflow at any scale.
    peak_B11 = wide_BMN.abs().amax(dim=(1, 2), keepdim=True)
    scaled_BMN = wide_BMN / torch.where(peak_B11 > 0, peak_B11, 1.0)
    # Rows first: a sum over everything at once is split among threads, and the norm would depend on how many there are.
    norm_B11 = scaled_BMN.square().sum(dim=2, keepdim=True).sum(dim=1, keepdim=True).sqrt()
    return scaled_BMN / norm_B11.clamp(min=1.0)  # 1 or more, except for a zero matrix: the clamp guards that case alone


def _standard(x_BMN: Tensor, schedule: Sequence[Coefficient]) -> Tensor:
    for a, b, c in schedule:
        gram_BMM = _product(x_BMN, x_BMN.mT)
        if c == 0.0:
            x_BMN = _product(gram_BMM, x_BMN, plus=x_BMN, beta=a, alpha=b)
        else:
            x_BMN = _product(_polynomial(gram_BMM, b, c), x_BMN, plus=x_BMN, beta=a)
    return x_BMN


def _gram(x_BMN: Tensor, schedule: Sequence[Coefficient]) -> Tensor:
    """See [Note: The Gram form works in fp16 and restarts]."""
    done = 0
    for length in gram_segments(len(schedule)):
        x_BMN = _product(_gram_factor(x_BMN, schedule[done : done + length]), x_BMN)
        done += length
    return x_BMN


def _gram_factor(x_BMN: Tensor, segment: Sequence[Coefficient]) -> Tensor:
    """Q (B, M, M) such that Q X is X after the steps of `segment`."""
    r_BMM = _product(x_BMN, x_BMN.mT)
    a, b, c = segment[0]
    z_BMM = _polynomial(r_BMM, b, c)
    q_BMM = z_BMM.clone()
    q_BMM.diagonal(dim1=1, dim2=2).add_(a)  # Q starts as I, so its first product needs no multiplication
    for next_a, b, c in segment[1:]:
        rz_BMM = _product(r_BMM, z_BMM, plus=r_BMM, beta=a)
        r_BMM = _product(z_BMM, rz_BMM, plus=rz_BMM, beta=a)
        z_BMM = _polynomial(r_BMM, b, c)
        q_BMM = _product(q_BMM, z_BMM, plus=q_BMM, beta=next_a)
        a = next_a
    return q_BMM


def _gram_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.bfloat16 else dtype


def _polynomial(gram_BMM: Tensor, b: float, c: float) -> Tensor:
    """b A + c A^2."""
    return gram_BMM * b if c == 0.0 else _product(gram_BMM, gram_BMM, plus=gram_BMM, beta=b, alpha=c)


def _product(
    left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """left @ right, or alpha * left @ right + beta * plus: summed in fp32 or better, rounded once to left's dtype."""
    if left.is_cuda:
        if plus is None:
            return torch.bmm(left, right)
        return torch.baddbmm(plus, left, right, beta=beta, alpha=alpha)
    # One matrix with mm, since bmm on CPU may differ from it in the last bit; and in fp32, since many CPUs multiply
    # 16-bit floats hundreds of times slower. A GPU accumulates in fp32 and rounds once, too.
    wide = torch.promote_types(left.dtype, torch.float32)
    left_2d, right_2d = left.squeeze(0).to(wide), right.squeeze(0).to(wide)
    if plus is None:
        product = torch.mm(left_2d, right_2d)
    else:
        product = torch.addmm(plus.squeeze(0).to(wide), left_2d, right_2d, beta=beta, alpha=alpha)
    return product.to(left.dtype).unsqueeze(0)

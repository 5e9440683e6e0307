"""Second moments of the orthogonalised update: NorMuon (per row) and AdaMuon (per element).

They act on whole matrices, so they run at a matrix's home, after Newton-Schulz. Both end by giving the update the
Frobenius norm of an exact polar factor, sqrt(min(rows, cols)), so that `scale` means the same for every matrix rule.
"""

# B: matrices of one shape, M: rows, N: columns

from __future__ import annotations

import math

import torch
from torch import Tensor


def _with_polar_norm(update_BMN: Tensor) -> Tensor:
    rows, cols = update_BMN.shape[-2:]
    # One matrix at a time: a reduction over a batch may split its sums by batch size, and a matrix's update must not
    # depend on its neighbours.
    norms_B = torch.stack([torch.linalg.vector_norm(matrix) for matrix in update_BMN])
    factors_B = torch.where(norms_B != 0, math.sqrt(min(rows, cols)) / norms_B, 0.0)  # no update has no direction
    return update_BMN * factors_B[:, None, None]


def normalise_rows(update_BMN: Tensor, row_moment_BM: Tensor, *, beta2: float, eps: float) -> Tensor:
    """NorMuon: divide each row by the root of its running mean square. `row_moment_BM` is advanced in place."""
    update_BMN = update_BMN.float()
    mean_square_BM = torch.stack([matrix.square().mean(dim=-1) for matrix in update_BMN])
    row_moment_BM.mul_(beta2).add_(mean_square_BM, alpha=1.0 - beta2)
    return _with_polar_norm(update_BMN / (row_moment_BM.sqrt() + eps)[:, :, None])


def normalise_elements(update_BMN: Tensor, moment_BMN: Tensor, *, beta2: float, eps: float) -> Tensor:
    """AdaMuon: divide each element by the root of its running square. `moment_BMN` is advanced in place."""
    update_BMN = update_BMN.float()
    moment_BMN.mul_(beta2).addcmul_(update_BMN, update_BMN, value=1.0 - beta2)
    return _with_polar_norm(update_BMN / (moment_BMN.sqrt() + eps))

"""Sums over gradients: squared norms and zero counts; and what is decided by them."""

from __future__ import annotations

import torch
from torch import Tensor

from layerwise.kernels.facts import has_own_kernels
from layerwise.kernels.lists import Tensors, facts_of
from layerwise.kernels.verdicts import Bounds

_CHUNK = 1 << 20
"""Elements widened to fp64 at a time: bounds the scratch memory to 8 MiB."""


def square_sums(spans: Tensors) -> Tensor:
    """The sum of squares of each span, in fp64. inf and NaN stay visible.

    Products of two fp32 numbers are exact in fp64 and their sum carries 29 spare bits, so the cut into spans and ranks
    changes the total by about 1e-16 relative (on CPU not at all where the sum is exact), far below the fp32 resolution
    of the clip coefficient.
    """
    if not spans:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    device = facts_of(spans).device
    if has_own_kernels(device):
        from layerwise.kernels.triton_stats import fused_square_sums

        return fused_square_sums(spans)
    if device.type == "cuda":
        # One launch for all spans and no widened copy; squaring the norm back costs one rounding in fp64.
        return torch.stack(torch._foreach_norm(list(spans), 2, dtype=torch.float64)).square()
    return torch.stack([_square_sum(span) for span in spans])


def _square_sum(span: Tensor) -> Tensor:
    if span.numel() > _CHUNK:
        first, *rest = map(_square_sum, torch.split(span.flatten(), _CHUNK))
        return sum(rest, first)
    wide = span.double().flatten()
    return torch.dot(wide, wide)


def add_totals(sums: Tensor, group_of: Tensor, place_of: Tensor, *, groups: Tensor, nonfinite: Tensor) -> None:
    """Sums of spans into those of their groups, always in the same order, and a one to the place of every span that holds
    inf or NaN. A span whose group is negative counts in none."""
    if len(sums) and has_own_kernels(sums.device):
        from layerwise.kernels.triton_stats import fused_totals

        fused_totals(sums, group_of, place_of, groups, nonfinite)
        return
    counted = group_of >= 0
    groups.copy_(group_sums(torch.where(counted, sums, 0.0), torch.where(counted, group_of, 0), len(groups)))
    # Counts are exact in any order.
    nonfinite.index_add_(0, place_of, (~torch.isfinite(sums)).double())


def group_sums(values: Tensor, group_of: Tensor, num_groups: int) -> Tensor:
    """The sum of the values of each group, always in the same order, so that runs repeat to the bit."""
    if values.is_cuda:  # there `index_add_` adds in the order in which its threads arrive
        return masked_sums(values, group_of, num_groups)
    return torch.zeros(num_groups, dtype=values.dtype, device="cpu").index_add_(0, group_of, values)


def masked_sums(values: Tensor, group_of: Tensor, num_groups: int) -> Tensor:
    """One sum over all values for each group, in which those of others are zero: no atomics. There are few groups."""
    groups = torch.arange(num_groups, device=values.device)
    return torch.where(group_of == groups[:, None], values, 0.0).sum(dim=1)


def count_zeros(spans: Tensors) -> Tensor:
    """How many elements of all spans together are exactly zero, as fp64 (exact up to 2^53)."""
    if spans and has_own_kernels(facts_of(spans).device):
        from layerwise.kernels.triton_stats import fused_zero_counts

        return fused_zero_counts(spans).sum()
    total = torch.zeros((), dtype=torch.float64, device=facts_of(spans).device if spans else None)
    for span in spans:
        total = total + (span.numel() - torch.count_nonzero(span)).double()
    return total


def verdict_of(square_sums: Tensor, nonfinite: Tensor, bounds: Bounds) -> Tensor:
    """The verdict, in fp32, from the sums of squares of norm groups and the number of bad elements of each param, both in
    fp64: with the rounding of the same formulas in Python."""
    if has_own_kernels(square_sums.device):
        from layerwise.kernels.triton_stats import fused_verdict

        return fused_verdict(square_sums, nonfinite, bounds)
    sums = square_sums.tolist()
    is_unfit = bounds.needs_finite and (bool(nonfinite.any()) or bool(bounds.too_large(sums)))
    is_bad = is_unfit or bounds.norm(sums, bounds.families) > bounds.skip_above
    numbers = [float(not is_bad), 1.0, *bounds.factors(sums)]
    return torch.tensor(numbers, dtype=torch.float32, device=square_sums.device)

"""Sums over lists of tensors as Triton kernels: one launch adds up blocks, one the sums of every tensor's blocks.

Imported only where `has_own_kernels` says so. Every sum has one order, which depends on a tensor's length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerwise.kernels.lists import facts_of
from layerwise.kernels.tables import Place, address_table, as_integers, cut, place_of, row_table, working_on
from layerwise.kernels.triton_launch import launch
from layerwise.kernels.triton_lists import ALIGNMENT, TRITON_DTYPES, as_pointer, by_dtypes, find_block
from layerwise.kernels.verdicts import EPS, FIRST, LARGEST, Bounds


@triton.jit
def _term(value, ZEROS: tl.constexpr):
    """What an element adds to a sum: its square, exact in fp64, or one if it is zero."""
    if ZEROS:
        return (value == 0.0).to(tl.float64)
    wide = value.to(tl.float32).to(tl.float64)
    return wide * wide


@triton.jit
def _block_sums_kernel(
    blocks, numels, addresses, sums,
    DTYPE: tl.constexpr, ZEROS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    address = tl.load(addresses + tensor)
    lanes = tl.arange(0, LANES)
    start = as_pointer(address, DTYPE) + first
    OTHER: tl.constexpr = 1.0 if ZEROS else 0.0
    # Lane by lane first: in that the order does not depend on how wide the accesses are.
    found = tl.zeros((LANES,), tl.float64)
    if (address % ALIGNMENT == 0) & (left >= BLOCK):
        for skip in tl.static_range(0, BLOCK, LANES):
            found += _term(tl.load(tl.multiple_of(start + (skip + lanes), ALIGNMENT)), ZEROS)
    else:
        for skip in tl.static_range(0, BLOCK, LANES):
            found += _term(tl.load(start + (skip + lanes), mask=skip + lanes < left, other=OTHER), ZEROS)
    tl.store(sums + tl.program_id(0), tl.sum(found))


@triton.jit
def _tensor_sums_kernel(sums, starts, totals, LANES: tl.constexpr):
    tensor = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    stop = tl.load(starts + tensor + 1)
    found = tl.zeros((LANES,), tl.float64)
    for first in range(tl.load(starts + tensor), stop, LANES):
        found += tl.load(sums + first + lanes, mask=first + lanes < stop, other=0.0)
    tl.store(totals + tensor, tl.sum(found))


@triton.jit(do_not_specialize=["num_groups", "numel"])
def _totals_kernel(sums, groups, places, totals, nonfinite, num_groups, numel, LANES: tl.constexpr):
    program = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    if program < num_groups:
        found = tl.zeros((LANES,), tl.float64)
        for first in range(0, numel, LANES):
            at = first + lanes
            is_mine = tl.load(groups + at, mask=at < numel, other=-1) == program
            found += tl.where(is_mine, tl.load(sums + at, mask=at < numel, other=0.0), 0.0)
        tl.store(totals + program, tl.sum(found))
    else:
        at = (program - num_groups) * LANES + lanes
        value = tl.load(sums + at, mask=at < numel, other=0.0)
        is_bad = (at < numel) & ~(tl.abs(value) < float("inf"))
        place = nonfinite + tl.load(places + at, mask=at < numel, other=0)
        # Counts are exact in any order.
        tl.atomic_add(place, tl.full((LANES,), 1.0, tl.float64), mask=is_bad, sem="relaxed")


@triton.jit(do_not_specialize=["numel"])
def _verdict_kernel(
    square_sums, nonfinite, shares, numbers, verdict, numel,
    NUM_GROUPS: tl.constexpr, NEEDS_FINITE: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    clip_norm, skip_above = tl.load(numbers), tl.load(numbers + 1)
    divisor, eps = tl.load(numbers + 2), tl.load(numbers + 3)
    largest = tl.load(numbers + 4)
    # A row of shares for each group, and one for the norm that a step may be skipped for.
    group = tl.arange(0, GROUPS)
    total = tl.zeros((GROUPS,), tl.float64)
    members = tl.zeros((GROUPS,), tl.int64)
    for other in range(NUM_GROUPS):
        share = tl.load(shares + group * NUM_GROUPS + other, mask=group <= NUM_GROUPS, other=0)
        total += tl.where(share != 0, tl.load(square_sums + other), 0.0)
        members += share
    norm = tl.sqrt(total) / divisor
    ratio = clip_norm / (norm + eps)
    factor = tl.where((members > 0) & (ratio < 1.0), ratio, 1.0)
    # At the places that verdicts.py names.
    tl.store(verdict + 2 + group, factor.to(tl.float32), mask=group < NUM_GROUPS)
    is_bad = tl.sum(tl.where((group == NUM_GROUPS) & (norm > skip_above), 1, 0))
    if NEEDS_FINITE:
        own = tl.sqrt(tl.load(square_sums + group, mask=group < NUM_GROUPS, other=0.0)) / divisor
        is_bad += tl.sum(tl.where(own * factor > largest, 1, 0))
        for first in range(0, numel, LANES):
            at = first + tl.arange(0, LANES)
            is_bad += tl.sum((tl.load(nonfinite + at, mask=at < numel, other=0.0) != 0.0).to(tl.int32))
    tl.store(verdict, tl.where(is_bad > 0, 0.0, 1.0))
    tl.store(verdict + 1, 1.0)


_BLOCK, _LANES, _WARPS = 16384, 2048, 8
_SUMS = 512
"""Sums of blocks that are added at a time."""


def fused_square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each tensor, in fp64."""
    return _sums(tensors, zeros=False)


def fused_zero_counts(tensors: Sequence[Tensor]) -> Tensor:
    """How many elements of each tensor are zero, as fp64."""
    return _sums(tensors, zeros=True)


def fused_totals(sums: Tensor, group_of: Tensor, place_of: Tensor, groups: Tensor, nonfinite: Tensor) -> None:
    """`add_totals`, in one launch."""
    programs = len(groups) + -(-len(sums) // _SUMS)
    arguments = (sums, group_of, place_of, groups, nonfinite, len(groups), len(sums), _SUMS)
    is_aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in arguments[:5])  # the vector's parts begin anywhere
    with torch.cuda.device_of(sums):
        launch(_totals_kernel, (_totals_kernel, sums.device, is_aligned), programs, arguments, warps=4)


def fused_verdict(square_sums: Tensor, nonfinite: Tensor, bounds: Bounds) -> Tensor:
    """`verdict_of`, in one launch. Numbers go there in memory: what is passed to a kernel is no more than an fp32."""
    device, groups = square_sums.device, len(bounds.together)
    verdict = torch.empty(FIRST + groups, dtype=torch.float32, device=device)
    with working_on(device):
        shares, numbers = _verdict_tables(bounds, place_of(device))
        arguments = (square_sums, nonfinite, shares, numbers, verdict, len(nonfinite))
        constants = (groups, bounds.needs_finite, triton.next_power_of_2(groups + 1), _SUMS)
        is_aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in (square_sums, nonfinite))
        key = (_verdict_kernel, device, is_aligned, constants)
        launch(_verdict_kernel, key, 1, (*arguments, *constants), warps=4)
    return verdict


@lru_cache(maxsize=64)
def _verdict_tables(bounds: Bounds, place: Place) -> tuple[Tensor, Tensor]:
    groups = range(len(bounds.together))
    shares = [[int(other in members) for other in groups] for members in (*bounds.together, bounds.families)]
    numbers = as_integers((bounds.clip_norm, bounds.skip_above, bounds.divisor, EPS, LARGEST))
    return row_table(shares, place), row_table([numbers], place).view(torch.float64)


def _sums(tensors: Sequence[Tensor], *, zeros: bool) -> Tensor:
    if not facts_of(tensors).are_contiguous:
        tensors = [tensor.contiguous() for tensor in tensors]
    device = facts_of(tensors).device
    totals = torch.empty(len(tensors), dtype=torch.float64, device=device)
    with working_on(device):
        place = place_of(device)
        for (dtype,), (chosen,), some in by_dtypes((tensors,)):
            facts = facts_of(chosen)
            blocks = cut(facts.numels, _BLOCK, place)
            sums = torch.empty(max(blocks.total, 1), dtype=torch.float64, device=device)
            if blocks.total:
                addresses = address_table(facts.addresses, place)
                key, constants = (
                    (_block_sums_kernel, device, dtype, zeros),
                    (TRITON_DTYPES[dtype], zeros, _BLOCK, _LANES),
                )
                tables = (blocks.of, blocks.numels, addresses)
                launch(_block_sums_kernel, key, blocks.total, (*tables, sums, *constants), warps=_WARPS)
            found = totals if not some else torch.empty(len(chosen), dtype=torch.float64, device=device)
            arguments = (sums, blocks.starts, found, _SUMS)
            launch(_tensor_sums_kernel, (_tensor_sums_kernel, device), len(chosen), arguments, warps=4)
            if some:
                totals[row_table([some], place)] = found
    return totals

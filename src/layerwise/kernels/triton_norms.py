"""The norms of matrices in Triton: a batch in the dtype of its products, near norm 1, and the factors that are left to it.

Imported only where `choose_products` says so. Every sum has one order, which depends on a matrix's shape alone.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerwise.kernels.triton_launch import launch
from layerwise.kernels.triton_products import new_batch


@triton.jit
def _block(program, num_blocks, num_across, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Matrix, rows and columns of a program's block, its mask, and whether it needs one."""
    batch = (program // num_blocks).to(tl.int64)
    block = program % num_blocks
    top, left = block // num_across * ROWS, block % num_across * COLS
    row, col = (top + tl.arange(0, ROWS))[:, None], (left + tl.arange(0, COLS))[None, :]
    is_whole = (top + ROWS <= rows) & (left + COLS <= cols)
    return batch, block, row.to(tl.int64), col, (row < rows) & (col < cols), is_whole


@triton.jit
def _square_sum(at, mask, into):
    v = tl.load(at, mask=mask, other=None if mask is None else 0.0).to(tl.float32).to(tl.float64)
    tl.store(into, tl.sum(v * v))


@triton.jit(do_not_specialize=["num_blocks", "num_across", "rows", "cols", "stride_batch", "stride_row"])
def square_sums_kernel(
    x, sums, num_blocks, num_across, rows, cols, stride_batch, stride_row,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum of squares of a block, in fp64, where no square of an fp32 number over- or underflows."""
    # Backwards: what was written last is in the cache, and so will be what is read last here, where the next pass begins.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, block, row, col, mask, is_whole = _block(program, num_blocks, num_across, rows, cols, ROWS, COLS)
    at, into = x + batch * stride_batch + row * stride_row + col, sums + batch * num_blocks + block
    if is_whole & ALIGNED:
        _square_sum(tl.multiple_of(at, [16, 16]), None, into)
    else:
        _square_sum(at, mask, into)


@triton.jit(do_not_specialize=["num_blocks", "numel"])
def scales_kernel(sums, exponents, scales, squared_scales, counters, num_blocks, numel, BLOCKS: tl.constexpr):
    """The exponent that brings a matrix's mean square near 2^-6, and the factor left from there to Frobenius norm 1; and a
    zero, to count its tiles from."""
    batch = tl.program_id(0).to(tl.int64)
    partial = tl.zeros((BLOCKS,), tl.float64)
    for first in range(0, num_blocks, BLOCKS):
        at = first + tl.arange(0, BLOCKS)
        partial += tl.load(sums + batch * num_blocks + at, mask=at < num_blocks, other=0.0)
    total = tl.sum(partial, 0)
    is_plain = (total > 0.0) & (total < float("inf"))
    mean = tl.where(is_plain, total / numel, 1.0)
    power = (mean.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1023
    # Not near 1: with all of the norm in one element of 2^32, fp16 still holds it.
    exponent = tl.where(is_plain, -(power >> 1) - 3, 0)
    root = tl.sqrt(tl.where(is_plain, total, 1.0))
    scale = _times_power_of_two(1.0 / root, -exponent).to(tl.float32)
    scale = tl.where(is_plain | (total == 0.0), scale, float("nan"))
    tl.store(exponents + batch, exponent)
    tl.store(scales + batch, scale)
    tl.store(squared_scales + batch, scale * scale)
    tl.store(counters + batch, 0)
    tl.store(counters + batch + 1, 0)


@triton.jit
def _times_power_of_two(x, exponent):
    """x * 2^exponent, by two factors: one alone might be no float."""
    half = exponent >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    second = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return x * first * second


@triton.jit
def _rescale(read, into, mask, exponent):
    v = _times_power_of_two(tl.load(read, mask=mask).to(tl.float32), exponent)
    tl.store(into, v.to(into.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        *("num_blocks", "num_across", "rows", "cols", "stride_batch", "stride_row"),
        *("out_stride_batch", "out_stride_row"),
    ]
)
def rescale_kernel(
    x, out, exponents, num_blocks, num_across, rows, cols, stride_batch, stride_row, out_stride_batch, out_stride_row,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A copy times 2^exponent."""
    program = tl.program_id(0)
    batch, _block_number, row, col, mask, is_whole = _block(program, num_blocks, num_across, rows, cols, ROWS, COLS)
    read = x + batch * stride_batch + row * stride_row + col
    into = out + batch * out_stride_batch + row * out_stride_row + col
    exponent = tl.load(exponents + batch)
    if is_whole & ALIGNED:
        _rescale(tl.multiple_of(read, [16, 16]), tl.multiple_of(into, [16, 16]), None, exponent)
    else:
        _rescale(read, into, mask, exponent)


_ROWS, _COLS, _WARPS = 32, 256, 8
"""A block of the passes over elements."""
_SUMS, _MANY_SUMS = 1024, 8192
"""Sums of blocks that are added at a time; of a matrix with many, the second."""


class Norms(NamedTuple):
    """What a batch's norms are kept in."""

    sums: Tensor  # (batch, blocks), fp64
    exponents: Tensor  # (batch,), int32
    scales: Tensor  # (batch,), fp32: from there to Frobenius norm 1
    squared: Tensor  # (batch,), fp32: their squares
    counters: Tensor  # (batch + 1,), int32: zeros, for whoever multiplies

    @classmethod
    def of(cls, batch: int, rows: int, cols: int, memory: Tensor) -> Norms:
        """In `norms_nbytes` of memory. Each begins at a multiple of 16 bytes: kernels are compiled for that."""
        blocks, padded = num_blocks(rows, cols), _padded(batch)
        ends = list(accumulate((batch * blocks * 8, *[padded * 4] * 4), initial=0))
        sums, *others = (memory[first:stop] for first, stop in pairwise([-(-end // 16) * 16 for end in ends]))
        exponents, scales, squared, counters = (other.view(torch.int32) for other in others)
        wide = sums[: batch * blocks * 8].view(torch.float64).view(batch, blocks)
        scales, squared = (other[:batch].view(torch.float32) for other in (scales, squared))
        return cls(wide, exponents[:batch], scales, squared, counters[: batch + 1])


def norms_nbytes(batch: int, rows: int, cols: int) -> int:
    """Bytes for the norms of a batch; what comes after them may be read in whole lines of the cache."""
    nbytes = (batch * num_blocks(rows, cols) * 8 + 15) // 16 * 16 + 4 * 4 * _padded(batch)
    return -(-nbytes // 256) * 256


def _padded(batch: int) -> int:
    """Numbers of four bytes, one for each matrix and one more, up to a multiple of 16 bytes."""
    return -(-(batch + 1) // 4) * 4


def num_blocks(rows: int, cols: int) -> int:
    """Blocks of a matrix whose squares are summed."""
    return -(-rows // _ROWS) * -(-cols // _COLS)


def normalised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x times a power of two per matrix, in `dtype`; and the factors to Frobenius norm 1, plain and squared."""
    batch, rows, cols = x.shape
    memory = torch.empty(norms_nbytes(batch, rows, cols), dtype=torch.uint8, device=x.device)
    norms = Norms.of(batch, rows, cols, memory)
    out = new_batch(batch, rows, cols, dtype, x.device)
    normalise_into(out, x if x.stride(2) == 1 else x.contiguous(), norms)
    return out, norms.scales, norms.squared


def normalise_into(out: Tensor, x: Tensor, norms: Norms) -> None:
    """Leave in `out`, which may be x itself, x times a power of two per matrix, and in `norms` the factors from there."""
    batch, rows, cols = x.shape
    blocks = num_blocks(rows, cols)
    size, strides = (blocks, -(-cols // _COLS), rows, cols), x.stride()[:2]
    # Then rows begin at multiples of 16 bytes, as those of `out` do; no compiler sees it in the strides.
    is_aligned = all(number % 8 == 0 for number in strides) and x.data_ptr() % 16 == 0
    is_huge = max(*strides, *out.stride()) >= 2**31
    key = (x.device, x.dtype, out.dtype, is_aligned, x.data_ptr() % 16 == 0, is_huge)
    constants = (is_aligned, _ROWS, _COLS)
    sums, exponents = norms[:2]
    launch(square_sums_kernel, ("sums", *key), batch * blocks, (x, sums, *size, *strides, *constants), warps=_WARPS)
    numel = float(rows * cols)
    at_a_time = _SUMS if blocks <= 4 * _SUMS else _MANY_SUMS
    launch(scales_kernel, ("scales", x.device, at_a_time), batch, (*norms, blocks, numel, at_a_time), warps=4)
    arguments = (x, out, exponents, *size, *strides, *out.stride()[:2], *constants)
    launch(rescale_kernel, ("rescale", *key), batch * blocks, arguments, warps=_WARPS)

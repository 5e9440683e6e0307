"""The products of Newton-Schulz as Triton kernels: symmetric ones compute a triangle of tiles and mirror it.

Imported only where `choose_products` says so: it needs Triton. All kernels take batches of row-major matrices whose rows
begin at multiples of 16 bytes, read and written through tensor descriptors, which clip at a matrix's own edges. Sizes
are arguments at run time: one compilation serves all shapes that share tiles and dtypes. What a matrix gets is a
function of its own values and shape: no sum crosses matrices, and no sum is cut by how many there are.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from layerwise.kernels.products import Tile
from layerwise.kernels.triton_launch import launch

NOWHERE = tl.constexpr(1 << 28)
"""A row that no matrix has: a store there writes nothing. Triton's fused loops take no `if`."""


@triton.jit
def _add(out, addend, batch, row, col, factor, ROWS: tl.constexpr, COLS: tl.constexpr):
    return out + factor * addend.load([batch, row, col]).reshape((ROWS, COLS)).to(tl.float32)


@triton.jit
def _finish_symmetric(
    acc, first, second, out, mirror, alpha, beta, gamma, diagonal, scale, batch, row, col, block,
    NUM_ADDENDS: tl.constexpr, HAS_DIAGONAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Store a part of a tile and its mirror image. `block` is the first column of the square block that it lies in."""
    found = acc * alpha
    if NUM_ADDENDS > 0:
        found = _add(found, first, batch, row, col, beta, ROWS, COLS)
    if NUM_ADDENDS > 1:
        found = _add(found, second, batch, row, col, gamma, ROWS, COLS)
    if HAS_DIAGONAL:
        is_diagonal = (row + tl.arange(0, ROWS))[:, None] == (col + tl.arange(0, COLS))[None, :]
        found += tl.where(is_diagonal, diagonal, 0.0)
    found = (found * scale).to(out.dtype)
    # Above the diagonal the mirror image of another block is what counts, on it there is none: were an element written
    # twice, its two values might differ in the last bit, and the later one would win.
    out.store([batch, tl.where(row < block, NOWHERE, row), col], found.reshape((1, ROWS, COLS)))
    mirror.store([batch, tl.where(row <= block, NOWHERE, col), row], found.T.reshape((1, COLS, ROWS)))


@triton.jit(do_not_specialize=["num_tiles", "total", "step", "depth"])
def symmetric_kernel(
    left, right, first, second, out, mirror, tiles, num_tiles, total, step, depth, alpha, beta, gamma, diagonal, scales,
    HAS_SCALES: tl.constexpr, HAS_DIAGONAL: tl.constexpr, NUM_ADDENDS: tl.constexpr, LEFT_T: tl.constexpr, RIGHT_T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out = scale * (alpha * L R + beta * first + gamma * second + diagonal * I), where that is symmetric."""
    for tile in tl.range(tl.program_id(0), total, step, flatten=True):
        batch = tile // num_tiles
        packed = tl.load(tiles + tile % num_tiles)
        row = (packed // 65536) * BM
        col = (packed % 65536) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, depth, BK):
            if LEFT_T:
                a = left.load([batch, k, row]).reshape((BK, BM)).T
            else:
                a = left.load([batch, row, k]).reshape((BM, BK))
            if RIGHT_T:
                b = right.load([batch, col, k]).reshape((BN, BK)).T
            else:
                b = right.load([batch, k, col]).reshape((BK, BN))
            acc = tl.dot(a, b, acc)
        scale = 1.0
        if HAS_SCALES:
            scale = tl.load(scales + batch)
        if PARTS == 1:
            _finish_symmetric(acc, first, second, out, mirror, alpha, beta, gamma, diagonal, scale, batch, row, col, col, NUM_ADDENDS, HAS_DIAGONAL, BM, BN)  # fmt: skip
        else:
            HALF: tl.constexpr = BN // 2
            low, high = tl.split(tl.permute(tl.reshape(acc, (BM, 2, HALF)), (0, 2, 1)))
            _finish_symmetric(low, first, second, out, mirror, alpha, beta, gamma, diagonal, scale, batch, row, col, col, NUM_ADDENDS, HAS_DIAGONAL, BM, HALF)  # fmt: skip
            block = col + HALF // BM * BM
            _finish_symmetric(high, first, second, out, mirror, alpha, beta, gamma, diagonal, scale, batch, row, col + HALF, block, NUM_ADDENDS, HAS_DIAGONAL, BM, HALF)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_cols", "total", "step", "depth"])
def full_kernel(
    left, right, addend, out, num_rows, num_cols, total, step, depth, alpha, beta, scales,
    HAS_SCALES: tl.constexpr, HAS_ADDEND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = scale * (alpha * L R + beta * addend)."""
    per_matrix = num_rows * num_cols
    for tile in tl.range(tl.program_id(0), total, step, flatten=True):
        batch = tile // per_matrix
        inside = tile % per_matrix
        # Groups of rows of tiles, column by column: neighbours in time share what they read through the cache.
        begin = inside // (GROUP * num_cols) * GROUP
        height = tl.minimum(num_rows - begin, GROUP)
        row = (begin + inside % (GROUP * num_cols) % height) * BM
        col = inside % (GROUP * num_cols) // height * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, depth, BK):
            a = left.load([batch, row, k]).reshape((BM, BK))
            b = right.load([batch, k, col]).reshape((BK, BN))
            acc = tl.dot(a, b, acc)
        scale = 1.0
        if HAS_SCALES:
            scale = tl.load(scales + batch)
        HALF: tl.constexpr = BN // 2
        low, high = tl.split(tl.permute(tl.reshape(acc * alpha, (BM, 2, HALF)), (0, 2, 1)))
        if HAS_ADDEND:
            low = _add(low, addend, batch, row, col, beta, BM, HALF)
        out.store([batch, row, col], (low * scale).to(out.dtype).reshape((1, BM, HALF)))
        if HAS_ADDEND:
            high = _add(high, addend, batch, row, col + HALF, beta, BM, HALF)
        out.store([batch, row, col + HALF], (high * scale).to(out.dtype).reshape((1, BM, HALF)))


@triton.jit
def _block(num_blocks, num_across, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Matrix, rows and columns of this program's block, its mask, and whether it needs one."""
    batch = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
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
    batch, block, row, col, mask, is_whole = _block(num_blocks, num_across, rows, cols, ROWS, COLS)
    at, into = x + batch * stride_batch + row * stride_row + col, sums + batch * num_blocks + block
    if is_whole & ALIGNED:
        _square_sum(tl.multiple_of(at, [16, 16]), None, into)
    else:
        _square_sum(at, mask, into)


@triton.jit(do_not_specialize=["num_blocks", "numel"])
def scales_kernel(sums, exponents, scales, squared_scales, num_blocks, numel, BLOCKS: tl.constexpr):
    """The exponent that brings a matrix's mean square near 2^-6, and the factor left from there to Frobenius norm 1."""
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
    batch, _block_number, row, col, mask, is_whole = _block(num_blocks, num_across, rows, cols, ROWS, COLS)
    read = x + batch * stride_batch + row * stride_row + col
    into = out + batch * out_stride_batch + row * out_stride_row + col
    exponent = tl.load(exponents + batch)
    if is_whole & ALIGNED:
        _rescale(tl.multiple_of(read, [16, 16]), tl.multiple_of(into, [16, 16]), None, exponent)
    else:
        _rescale(read, into, mask, exponent)


_ROWS, _COLS, _WARPS = 32, 256, 8
"""A block of the passes over elements."""
_SUMS = 1024
"""Sums of blocks that are added at a time."""


def new_batch(batch: int, rows: int, cols: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised (batch, rows, cols) whose rows begin at multiples of 16 bytes."""
    padding = -cols % (16 // dtype.itemsize)
    found = torch.empty(batch, rows, cols + padding, dtype=dtype, device=device)
    return found[:, :, :cols] if padding else found


def as_batch(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of x, if it is such a batch as `new_batch` makes, of as many bytes; else a new one."""
    if x.dtype.itemsize == dtype.itemsize and x.is_contiguous() and x.shape[2] % 8 == 0 and x.data_ptr() % 16 == 0:
        return x.view(dtype)
    batch, rows, cols = x.shape
    return new_batch(batch, rows, cols, dtype, x.device)


class Norms(NamedTuple):
    """What a batch's norms are kept in."""

    sums: Tensor  # (batch, blocks), fp64
    exponents: Tensor  # (batch,), int32
    scales: Tensor  # (batch,), fp32: from there to Frobenius norm 1
    squared: Tensor  # (batch,), fp32: their squares

    @classmethod
    def of(cls, batch: int, rows: int, cols: int, memory: Tensor) -> Norms:
        """In `norms_nbytes` of memory. Each begins at a multiple of 16 bytes: kernels are compiled for that."""
        blocks, padded = num_blocks(rows, cols), -(-batch // 4) * 4
        ends = list(accumulate((batch * blocks * 8, *[padded * 4] * 3), initial=0))
        sums, *others = (memory[first:stop] for first, stop in pairwise([-(-end // 16) * 16 for end in ends]))
        exponents, scales, squared = (other[: batch * 4] for other in others)
        wide = sums[: batch * blocks * 8].view(torch.float64).view(batch, blocks)
        return cls(wide, exponents.view(torch.int32), scales.view(torch.float32), squared.view(torch.float32))


def norms_nbytes(batch: int, rows: int, cols: int) -> int:
    """Bytes for the norms of a batch; what comes after them may be read in whole lines of the cache."""
    nbytes = (batch * num_blocks(rows, cols) * 8 + 15) // 16 * 16 + 3 * 16 * -(-batch // 4)
    return -(-nbytes // 256) * 256


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
    sums, exponents, scales, squared = norms
    launch(square_sums_kernel, ("sums", *key), batch * blocks, (x, sums, *size, *strides, *constants), warps=_WARPS)
    numel = float(rows * cols)
    launch(
        scales_kernel, ("scales", x.device), batch, (sums, exponents, scales, squared, blocks, numel, _SUMS), warps=4
    )
    arguments = (x, out, exponents, *size, *strides, *out.stride()[:2], *constants)
    launch(rescale_kernel, ("rescale", *key), batch * blocks, arguments, warps=_WARPS)


def symmetric(
    left: Tensor,
    right: Tensor,
    *,
    tile: Tile,
    alpha: float = 1.0,
    addends: tuple[tuple[Tensor, float], ...] = (),
    diagonal: float = 0.0,
    scales: Tensor | None = None,
    left_t: bool = False,
    right_t: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """scale * (alpha * left @ right + sum of factor * addend + diagonal * I), for operands whose product is symmetric.

    `left_t` and `right_t` take the transpose of an operand. Where rounding makes a product unsymmetric, its blocks below
    the diagonal count.
    """
    batch = left.shape[0]
    size, depth = (left.shape[2], left.shape[1]) if left_t else (left.shape[1], left.shape[2])
    if out is None:
        out = new_batch(batch, size, size, left.dtype, left.device)
    tiles = _lower_tiles(size, tile, left.device)
    total = batch * tiles.numel()
    programs = min(total, _multiprocessors(left.device))
    part = [tile.rows, tile.cols // tile.parts]
    left_block = [tile.depth, tile.rows] if left_t else [tile.rows, tile.depth]
    right_block = [tile.cols, tile.depth] if right_t else [tile.depth, tile.cols]
    (first, beta), (second, gamma) = (*addends, (None, 0.0), (None, 0.0))[:2]
    flags = (scales is not None, diagonal != 0.0, len(addends), left_t, right_t)
    arguments = (
        _descriptor(left, left_block), _descriptor(right, right_block), _descriptor(first, part), _descriptor(second, part),
        _descriptor(out, part), _descriptor(out, part[::-1]), tiles, tiles.numel(), total, programs, depth,
        alpha, beta, gamma, diagonal, scales, *flags, tile.rows, tile.cols, tile.depth, tile.parts,
    )  # fmt: skip
    key = ("symmetric", left.device, left.dtype, tile, flags)
    launch(symmetric_kernel, key, programs, arguments, warps=tile.warps, stages=tile.stages)
    return out


def full(
    left: Tensor,
    right: Tensor,
    *,
    tile: Tile,
    alpha: float = 1.0,
    addend: Tensor | None = None,
    beta: float = 0.0,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """scale * (alpha * left @ right + beta * addend)."""
    batch, rows, depth = left.shape
    cols = right.shape[2]
    if out is None:
        out = new_batch(batch, rows, cols, left.dtype, left.device)
    num_rows, num_cols = triton.cdiv(rows, tile.rows), triton.cdiv(cols, tile.cols)
    total = batch * num_rows * num_cols
    programs = min(total, _multiprocessors(left.device))
    half = [tile.rows, tile.cols // 2]
    flags = (scales is not None, addend is not None)
    arguments = (
        _descriptor(left, [tile.rows, tile.depth]), _descriptor(right, [tile.depth, tile.cols]),
        _descriptor(addend, half), _descriptor(out, half), num_rows, num_cols, total, programs, depth, alpha, beta,
        scales, *flags, tile.rows, tile.cols, tile.depth, _GROUP,
    )  # fmt: skip
    key = ("full", left.device, left.dtype, out.dtype, tile, flags)
    launch(full_kernel, key, programs, arguments, warps=tile.warps, stages=tile.stages)
    return out


_GROUP = 8
"""Rows of tiles that are walked together."""


def _descriptor(x: Tensor | None, block: list[int]) -> TensorDescriptor | None:
    """Made without the checks of its constructor, which take as long as a launch: `new_batch` keeps what they ask for."""
    if x is None:
        return None
    found = object.__new__(TensorDescriptor)
    found.base, found.shape, found.strides = x, list(x.shape), list(x.stride())
    found.block_shape, found.padding = [1, *block], "zero"
    return found


@cache
def _lower_tiles(size: int, tile: Tile, device: torch.device) -> Tensor:
    """Tiles that touch the diagonal or lie below it, as row * 65536 + col, in an order that suits the cache."""
    places = [
        (row, col)
        for row in range(triton.cdiv(size, tile.rows))
        for col in range(triton.cdiv(size, tile.cols))
        if row * tile.rows + tile.rows > col * tile.cols
    ]
    places.sort(key=lambda place: (place[0] // _GROUP, place[1], place[0]))
    return torch.tensor([row * 65536 + col for row, col in places], dtype=torch.int32, device=device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

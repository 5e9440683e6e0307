"""The products of Newton-Schulz as Triton kernels: symmetric ones compute a triangle of tiles and mirror it.

Imported only where `choose_products` says so: it needs Triton. All kernels take batches of row-major matrices whose rows
begin at multiples of 16 bytes, read and written through tensor descriptors, which clip at a matrix's own edges. Sizes
are arguments at run time: one compilation serves all shapes that share tiles and dtypes. What a matrix gets is a
function of its own values and shape: no sum crosses matrices, and no sum is cut by how many there are.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from layerwise.kernels.products import Tile, full_tile, symmetric_tile
from layerwise.kernels.tables import multiprocessors
from layerwise.kernels.triton_launch import launch

NOWHERE = tl.constexpr(1 << 28)
"""A row that no matrix has: a store there writes nothing. Triton's fused loops take no `if`."""


@triton.jit
def _add(out, addend, batch, row, col, factor, ROWS: tl.constexpr, COLS: tl.constexpr):
    # Rounded once, and written so: a compiler would choose which product to fuse, and `chain.cu` has another one.
    return tl.fma(addend.load([batch, row, col]).reshape((ROWS, COLS)).to(tl.float32), factor, out)


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
    tiles = tiles_of(size, size, tile, left.device, lower=True)
    total = batch * tiles.numel()
    programs = min(total, multiprocessors(left.device))
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
    programs = min(total, multiprocessors(left.device))
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
def tiles_of(rows: int, cols: int, tile: Tile, device: torch.device, *, lower: bool) -> Tensor:
    """Tiles as row * 65536 + col, in an order that suits the cache; `lower`: those that touch the diagonal or lie below it."""
    places = [
        (row, col)
        for row in range(triton.cdiv(rows, tile.rows))
        for col in range(triton.cdiv(cols, tile.cols))
        if not lower or row * tile.rows + tile.rows > col * tile.cols
    ]
    places.sort(key=lambda place: (place[0] // _GROUP, place[1], place[0]))
    return torch.tensor([row * 65536 + col for row, col in places], dtype=torch.int32, device=device)


class Product(NamedTuple):
    """out = scale * (alpha * left @ right + sum of factor * addend + diagonal * I), of batches."""

    left: tuple[Tensor, ...]
    """One memory, or two that follow each other in the batch."""
    right: Tensor | None
    """None: left's own transpose, on the side where the product is the smaller one."""
    out: Tensor
    alpha: float = 1.0
    addends: tuple[tuple[Tensor, float], ...] = ()
    diagonal: float = 0.0
    scales: Tensor | None = None
    is_symmetric: bool = True


def multiply(product: Product) -> None:
    """Compute it."""
    left, right, out, alpha, addends, diagonal, scales, is_symmetric = product
    if right is not None and not is_symmetric:
        addend, beta = addends[0] if addends else (None, 0.0)
        tile = full_tile(*out.shape[1:])
        full(left[0], right, tile=tile, alpha=alpha, addend=addend, beta=beta, scales=scales, out=out)
        return
    tile, first = symmetric_tile(out.shape[1]), 0
    for x_PRC in left:
        which = slice(first, first + x_PRC.shape[0])
        first = which.stop
        is_tall = right is None and x_PRC.shape[1] > x_PRC.shape[2]
        symmetric(
            x_PRC,
            x_PRC if right is None else right,
            tile=tile,
            alpha=alpha,
            addends=addends,
            diagonal=diagonal,
            scales=None if scales is None else scales[which],
            left_t=is_tall,
            right_t=right is None and not is_tall,
            out=out[which],
        )

"""Pairs of tensors as one Triton launch: every source into its target, or off it with a factor. Casts and any strides included."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerwise.kernels.lists import Tensors, facts_of
from layerwise.kernels.tables import Place, address_table, as_integers, block_table, place_of, row_table, working_on
from layerwise.kernels.triton_launch import launch
from layerwise.kernels.triton_lists import ALIGNMENT, TRITON_DTYPES, as_pointer, by_dtypes, taken
from layerwise.kernels.verdicts import IS_TAKEN


@triton.jit
def _pair(target, source, mask, factor, keep, SUBTRACT: tl.constexpr):
    """target = source, or target = keep * target - factor * source, whose factor comes negated."""
    value = tl.load(source, mask=mask)
    if SUBTRACT:
        value = tl.fma(factor, value.to(tl.float32), tl.load(target, mask=mask).to(tl.float32) * keep)
    if value.dtype != target.dtype.element_ty:
        value = value.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target, value, mask=mask)


@triton.jit
def _pair_kernel(
    blocks, walks, rows, verdict, DECIDED: tl.constexpr,
    TARGET: tl.constexpr, SOURCE: tl.constexpr, SUBTRACT: tl.constexpr, WALK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    packed = tl.load(blocks + tl.program_id(0))
    pair, block = packed >> 32, packed & 0xFFFFFFFF
    factor, keep = 0.0, 1.0
    if SUBTRACT:
        row = rows + pair * 4
        factor = tl.load(row + 2).to(tl.float64, bitcast=True).to(tl.float32)
        keep = tl.load(row + 3).to(tl.float64, bitcast=True).to(tl.float32)
    else:
        row = rows + pair * 2
    target, source = tl.load(row), tl.load(row + 1)
    is_aligned = (target | source) % ALIGNMENT == 0
    target, source = as_pointer(target, TARGET), as_pointer(source, SOURCE)
    walk = walks + pair * WALK
    numel = tl.load(walk)
    if numel > 0:
        BLOCK: tl.constexpr = SIDE * SIDE
        first = block * BLOCK
        lanes = tl.arange(0, BLOCK)
        target += first
        source += first
        if DECIDED:
            numel = taken(verdict, numel)
        if is_aligned & (first + BLOCK <= numel):
            into, read = tl.multiple_of(target + lanes, ALIGNMENT), tl.multiple_of(source + lanes, ALIGNMENT)
            _pair(into, read, None, factor, keep, SUBTRACT)
        else:
            _pair(target + lanes, source + lanes, first + lanes < numel, factor, keep, SUBTRACT)
    else:
        num_rows, num_cols, down, across = tl.load(walk + 1), tl.load(walk + 2), tl.load(walk + 3), tl.load(walk + 4)
        target_batch, target_row, target_col = tl.load(walk + 5), tl.load(walk + 6), tl.load(walk + 7)
        source_batch, source_row, source_col = tl.load(walk + 8), tl.load(walk + 9), tl.load(walk + 10)
        has_aligned_rows = tl.load(walk + 11) != 0
        if DECIDED:
            num_rows = taken(verdict, num_rows)
        batch, tile = block // (down * across), block % (down * across)
        top, left = tile // across * SIDE, tile % across * SIDE
        target += batch * target_batch + top * target_row + left * target_col
        source += batch * source_batch + top * source_row + left * source_col
        at_row, at_col = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
        mask = (top + at_row < num_rows) & (left + at_col < num_cols)
        is_whole = (top + SIDE <= num_rows) & (left + SIDE <= num_cols)
        if is_aligned & has_aligned_rows & is_whole:
            into = tl.multiple_of(target + at_row * target_row + at_col, [ALIGNMENT, ALIGNMENT])
            read = tl.multiple_of(source + at_row * source_row + at_col, [ALIGNMENT, ALIGNMENT])
            _pair(into, read, None, factor, keep, SUBTRACT)
        elif (target_col == 1) & (source_row == 1):  # one is the transpose of the other: the tile turns on the chip
            into, read = target + at_row * target_row + at_col, source + at_row + at_col * source_col
            _pair(into, read, mask, factor, keep, SUBTRACT)
        else:
            into = target + at_row * target_row + at_col * target_col
            read = source + at_row * source_row + at_col * source_col
            _pair(into, read, mask, factor, keep, SUBTRACT)


_SIDE, _WARPS = 32, 2
"""Of a square tile; a block of a pair that is walked flat has as many elements."""
_REGISTERS = 64
"""Enough for aligned blocks; the ways for odd places, which would take more, need not be the fastest."""
_WALK = 12
"""Numbers that say how a pair of views is walked."""


def fused_copy_(targets: Tensors, sources: Tensors) -> None:
    """Every source into its target, cast included; pairs have equal shapes and any strides."""
    _run_pairs(targets, sources, None, None)


def fused_subtract_(
    masters: Tensors,
    updates: Tensors,
    factors: Sequence[float],
    keeps: Sequence[float] | None = None,
    verdict: Tensor | None = None,
) -> None:
    """`W = keep * W - factor * U` for every pair; pairs have equal shapes and any strides."""
    _run_pairs(masters, updates, factors, [1.0] * len(masters) if keeps is None else keeps, verdict)


def _run_pairs(
    targets: Tensors,
    sources: Tensors,
    factors: Sequence[float] | None,
    keeps: Sequence[float] | None,
    verdict: Tensor | None = None,
) -> None:
    """One launch for all pairs that share dtypes."""
    for dtypes, (into, read), some in by_dtypes((targets, sources)):
        scale, keep = (
            numbers if numbers is None or not some else [numbers[index] for index in some]
            for numbers in (factors, keeps)
        )
        target, source = facts_of(into), facts_of(read)
        with working_on(target.device):
            place = place_of(target.device)
            tiles = _cut_pairs(target.shapes, source.shapes, target.strides, source.strides, dtypes, place)
            for index in tiles.others:  # dtypes that our kernels do not know, and views of too many dimensions
                if scale is None or keep is None:
                    into[index].copy_(read[index])
                else:
                    new = (into[index] * keep[index]).add_(read[index], alpha=-scale[index])
                    into[index].copy_(new if verdict is None else torch.where(verdict[IS_TAKEN] != 0, new, into[index]))
            if not tiles.total:
                continue
            columns: list[Iterable[int]] = [target.addresses, source.addresses]
            if scale is not None and keep is not None:
                columns += [as_integers(-factor for factor in scale), as_integers(keep)]
            tables = tiles.of, tiles.walks, address_table(tuple(chain.from_iterable(zip(*columns, strict=True))), place)
            decision = verdict, verdict is not None
            constants = (*(TRITON_DTYPES[dtype] for dtype in dtypes), scale is not None, _WALK, _SIDE)
            key = (_pair_kernel, target.device, dtypes, scale is not None, verdict is not None)
            arguments = (*tables, *decision, *constants)
            launch(_pair_kernel, key, tiles.total, arguments, warps=_WARPS, registers=_REGISTERS)


class _Tiles(NamedTuple):
    """How pairs of views are cut into blocks."""

    total: int
    of: Tensor  # for every block, whose it is
    walks: Tensor
    others: tuple[int, ...]  # pairs that our kernels cannot walk


@lru_cache(maxsize=256)
def _cut_pairs(
    shapes: tuple[tuple[int, ...], ...],
    source_shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    source_strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    place: Place,
) -> _Tiles:
    sizes = (dtypes[0].itemsize, dtypes[1].itemsize)
    pairs = zip(shapes, source_shapes, strides, source_strides, strict=True)
    found = [_walk(*pair, sizes) for pair in pairs]
    if not all(dtype in TRITON_DTYPES for dtype in dtypes):
        found = [None] * len(found)
    walks = [(0, (0,) * _WALK) if walk is None else walk for walk in found]
    counts = [count for count, _ in walks]
    others = tuple(index for index, walk in enumerate(found) if walk is None)
    return _Tiles(sum(counts), block_table(counts, place), row_table((walk for _, walk in walks), place), others)


def _walk(
    shape: tuple[int, ...],
    source_shape: tuple[int, ...],
    target: tuple[int, ...],
    source: tuple[int, ...],
    sizes: tuple[int, int],
) -> tuple[int, tuple[int, ...]] | None:
    """How many blocks a pair of views has, and how they are walked: flat, or as a batch of matrices in square tiles.
    None if they have too many dimensions for that.

    Dimensions may be taken in any order, and two that follow each other in both views are one.
    """
    if shape != source_shape:
        raise ValueError(f"a target of shape {tuple(shape)} and a source of shape {tuple(source_shape)} are no pair.")
    numel = math.prod(shape)
    if numel == 0:
        return 0, (0,) * _WALK
    dims: list[tuple[int, int, int]] = []
    for length, into, read in sorted(zip(shape, target, source, strict=True), key=lambda dim: (-dim[1], -dim[2])):
        if length == 1:
            continue
        if dims and dims[-1][1:] == (length * into, length * read):
            dims[-1] = (dims[-1][0] * length, into, read)
        else:
            dims.append((length, into, read))
    if not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
        return -(-numel // _SIDE**2), (numel, *[0] * (_WALK - 1))
    if len(dims) > 3:
        return None
    cols = dims.pop()
    # Rows are what the source has together, if the columns are not, else what there is most of: tiles are full.
    rows = max(dims, key=lambda dim: (cols[2] != 1 and dim[2] == 1, dim[0]), default=(1, 0, 0))
    batch = next((dim for dim in dims if dim is not rows), (1, 0, 0))
    down, across = -(-rows[0] // _SIDE), -(-cols[0] // _SIDE)
    strides = (batch[1] * sizes[0], rows[1] * sizes[0], batch[2] * sizes[1], rows[2] * sizes[1])
    is_aligned = cols[1:] == (1, 1) and all(stride % ALIGNMENT.value == 0 for stride in strides)
    walk = (0, rows[0], cols[0], down, across, batch[1], rows[1], cols[1], batch[2], rows[2], cols[2], int(is_aligned))
    return batch[0] * down * across, walk

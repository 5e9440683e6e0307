"""Element-wise work as Triton kernels: one launch for all tensors of a list, and one pass over memory where a chain of
foreach kernels takes several.

Imported only where `has_own_kernels` says so. A program finds in tables which tensor its block belongs to and where that
lies. What an element gets depends on itself alone, wherever it lies: fused multiplications and additions are written
out, so that no compiler chooses them differently from one way through a kernel to the other.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerwise.kernels.lists import facts_of
from layerwise.kernels.tables import Place, address_table, block_table, cut, place_of, row_table
from layerwise.kernels.triton_launch import launch

Tensors = Sequence[Tensor]

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

ALIGNMENT = tl.constexpr(16)
"""Bytes of the widest access. A block whose tensors all begin at multiples of it is read and written so: `multiple_of`
says it where the pointers are made, for no compiler sees it in a table, and a called function does not pass it on."""


@triton.jit
def find_block(blocks, numels, BLOCK: tl.constexpr):
    """The number of this program's tensor, the block's first element in it, and how many there are from there on."""
    packed = tl.load(blocks + tl.program_id(0))
    tensor = packed >> 32
    first = (packed & 0xFFFFFFFF) * BLOCK
    return tensor, first, tl.load(numels + tensor) - first


@triton.jit
def as_pointer(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def _momentum(grad, state, target, mask, momentum, rest, NESTEROV: tl.constexpr):
    g = tl.load(grad, mask=mask).to(tl.float32)
    m = tl.load(state, mask=mask)
    if NESTEROV:
        m = tl.fma(momentum, m, rest * g)
        direction = tl.fma(momentum, m, rest * g)
    else:
        m = tl.fma(rest, g, momentum * m)
        direction = m
    tl.store(state, m, mask=mask)
    tl.store(target, direction.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _momentum_kernel(
    blocks, numels, addresses, momentum, rest,
    GRAD: tl.constexpr, STATE: tl.constexpr, TARGET: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    row = addresses + tensor * 3
    grad, state, target = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    is_aligned = (grad | state | target) % ALIGNMENT == 0
    lanes = tl.arange(0, BLOCK)
    grad, state = as_pointer(grad, GRAD) + first, as_pointer(state, STATE) + first
    target = as_pointer(target, TARGET) + first
    if is_aligned & (left >= BLOCK):
        g, m = tl.multiple_of(grad + lanes, ALIGNMENT), tl.multiple_of(state + lanes, ALIGNMENT)
        _momentum(g, m, tl.multiple_of(target + lanes, ALIGNMENT), None, momentum, rest, NESTEROV)
    else:
        _momentum(grad + lanes, state + lanes, target + lanes, lanes < left, momentum, rest, NESTEROV)


@triton.jit
def _adamw(master, grad, avg, avg_sq, mask, beta1, rest1, beta2, rest2, root, eps, size):
    g = tl.load(grad, mask=mask).to(tl.float32)
    m = tl.fma(rest1, g, beta1 * tl.load(avg, mask=mask))
    v = tl.fma(rest2 * g, g, beta2 * tl.load(avg_sq, mask=mask))
    tl.store(avg, m, mask=mask)
    tl.store(avg_sq, v, mask=mask)
    denominator = tl.div_rn(tl.sqrt_rn(v), root) + eps
    tl.store(master, tl.fma(-size, tl.div_rn(m, denominator), tl.load(master, mask=mask)), mask=mask)


@triton.jit
def _adamw_kernel(
    blocks, numels, addresses, beta1, rest1, beta2, rest2, root, eps, size,
    MASTER: tl.constexpr, GRAD: tl.constexpr, AVG: tl.constexpr, AVG_SQ: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    row = addresses + tensor * 4
    master, grad, avg, avg_sq = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    is_aligned = (master | grad | avg | avg_sq) % ALIGNMENT == 0
    lanes = tl.arange(0, BLOCK)
    master, grad = as_pointer(master, MASTER) + first, as_pointer(grad, GRAD) + first
    avg, avg_sq = as_pointer(avg, AVG) + first, as_pointer(avg_sq, AVG_SQ) + first
    if is_aligned & (left >= BLOCK):
        w, g = tl.multiple_of(master + lanes, ALIGNMENT), tl.multiple_of(grad + lanes, ALIGNMENT)
        m, v = tl.multiple_of(avg + lanes, ALIGNMENT), tl.multiple_of(avg_sq + lanes, ALIGNMENT)
        _adamw(w, g, m, v, None, beta1, rest1, beta2, rest2, root, eps, size)
    else:
        w, g, m, v = master + lanes, grad + lanes, avg + lanes, avg_sq + lanes
        _adamw(w, g, m, v, lanes < left, beta1, rest1, beta2, rest2, root, eps, size)


@triton.jit
def _lion(master, grad, avg, mask, beta1, rest1, beta2, rest2, lr):
    g = tl.load(grad, mask=mask).to(tl.float32)
    m = tl.load(avg, mask=mask)
    direction = tl.fma(rest1, g, beta1 * m)
    sign = tl.where(direction > 0, lr, tl.where(direction < 0, -lr, lr * direction))  # zero stays zero, NaN stays NaN
    tl.store(master, tl.load(master, mask=mask) - sign, mask=mask)
    tl.store(avg, tl.fma(rest2, g, beta2 * m), mask=mask)


@triton.jit
def _lion_kernel(
    blocks, numels, addresses, beta1, rest1, beta2, rest2, lr,
    MASTER: tl.constexpr, GRAD: tl.constexpr, AVG: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tensor, first, left = find_block(blocks, numels, BLOCK)
    row = addresses + tensor * 3
    master, grad, avg = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    is_aligned = (master | grad | avg) % ALIGNMENT == 0
    lanes = tl.arange(0, BLOCK)
    master, grad, avg = as_pointer(master, MASTER) + first, as_pointer(grad, GRAD) + first, as_pointer(avg, AVG) + first
    if is_aligned & (left >= BLOCK):
        w, g = tl.multiple_of(master + lanes, ALIGNMENT), tl.multiple_of(grad + lanes, ALIGNMENT)
        m = tl.multiple_of(avg + lanes, ALIGNMENT)
        _lion(w, g, m, None, beta1, rest1, beta2, rest2, lr)
    else:
        _lion(master + lanes, grad + lanes, avg + lanes, lanes < left, beta1, rest1, beta2, rest2, lr)


@triton.jit
def _pair(target, source, mask, factor, SUBTRACT: tl.constexpr):
    """target = source, or target -= factor * source, whose factor comes negated."""
    value = tl.load(source, mask=mask)
    if SUBTRACT:
        value = tl.fma(factor, value.to(tl.float32), tl.load(target, mask=mask).to(tl.float32))
    if value.dtype != target.dtype.element_ty:
        value = value.to(tl.float32).to(target.dtype.element_ty)
    tl.store(target, value, mask=mask)


@triton.jit
def _pair_kernel(
    blocks, walks, rows,
    TARGET: tl.constexpr, SOURCE: tl.constexpr, SUBTRACT: tl.constexpr, WALK: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    packed = tl.load(blocks + tl.program_id(0))
    pair, block = packed >> 32, packed & 0xFFFFFFFF
    factor = 0.0
    if SUBTRACT:
        row = rows + pair * 3
        factor = tl.load(row + 2).to(tl.float64, bitcast=True).to(tl.float32)
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
        if is_aligned & (first + BLOCK <= numel):
            into, read = tl.multiple_of(target + lanes, ALIGNMENT), tl.multiple_of(source + lanes, ALIGNMENT)
            _pair(into, read, None, factor, SUBTRACT)
        else:
            _pair(target + lanes, source + lanes, first + lanes < numel, factor, SUBTRACT)
    else:
        num_rows, num_cols, down, across = tl.load(walk + 1), tl.load(walk + 2), tl.load(walk + 3), tl.load(walk + 4)
        target_batch, target_row, target_col = tl.load(walk + 5), tl.load(walk + 6), tl.load(walk + 7)
        source_batch, source_row, source_col = tl.load(walk + 8), tl.load(walk + 9), tl.load(walk + 10)
        has_aligned_rows = tl.load(walk + 11) != 0
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
            _pair(into, read, None, factor, SUBTRACT)
        elif (target_col == 1) & (source_row == 1):  # one is the transpose of the other: the tile turns on the chip
            into, read = target + at_row * target_row + at_col, source + at_row + at_col * source_col
            _pair(into, read, mask, factor, SUBTRACT)
        else:
            into = target + at_row * target_row + at_col * target_col
            read = source + at_row * source_row + at_col * source_col
            _pair(into, read, mask, factor, SUBTRACT)


# Small blocks: what counts is how many of them run beside each other, for AdamW divides while others read.
_BLOCK, _WARPS = 1024, 4
_SIDE, _PAIR_WARPS = 32, 2
"""Of a square tile; a block of a pair that is walked flat has as many elements."""
_PAIR_REGISTERS = 64
"""Enough for aligned blocks; the ways for odd places, which would take more, need not be the fastest."""
_WALK = 12
"""Numbers that say how a pair of views is walked."""


def fused_momentum_(
    grads: Tensors, momenta: Tensors, into: Tensors | None = None, *, momentum: float, nesterov: bool
) -> None:
    """`momentum_`, in place or into other tensors."""
    lists = grads, momenta, grads if into is None else into
    _run(_momentum_kernel, lists, (momentum, 1.0 - momentum), (nesterov,))


def fused_adamw_(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    betas: tuple[float, float],
    root: float,
    eps: float,
    size: float,
) -> None:
    """`adamw_` in place; `root` and `size` are what the step's number comes to."""
    beta1, beta2 = betas
    scalars = (beta1, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, size)
    _run(_adamw_kernel, (masters, grads, exp_avgs, exp_avg_sqs), scalars)


def fused_lion_(masters: Tensors, grads: Tensors, exp_avgs: Tensors, *, lr: float, betas: tuple[float, float]) -> None:
    """`lion_` in place."""
    beta1, beta2 = betas
    _run(_lion_kernel, (masters, grads, exp_avgs), (beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr))


def fused_copy_(targets: Tensors, sources: Tensors) -> None:
    """Every source into its target, cast included; pairs have equal shapes and any strides."""
    _run_pairs(targets, sources, None)


def fused_subtract_(masters: Tensors, updates: Tensors, factors: Sequence[float]) -> None:
    """`W -= factor * U` for every pair; pairs have equal shapes and any strides."""
    _run_pairs(masters, updates, factors)


def by_dtypes(lists: Sequence[Tensors]) -> Iterator[tuple[tuple[torch.dtype, ...], Sequence[Tensors], Sequence[int]]]:
    """The dtypes of each group of entries that share them, those entries, and their places; no places: all of them."""
    every = [facts_of(tensors) for tensors in lists]
    shared = tuple(facts.one_dtype for facts in every if facts.one_dtype is not None)
    if len(shared) == len(lists):
        yield shared, lists, ()
        return
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, key in enumerate(zip(*(facts.dtypes for facts in every), strict=True)):
        groups.setdefault(key, []).append(index)
    for key, some in groups.items():
        yield key, [[tensors[index] for index in some] for tensors in lists], some


def interleaved(columns: Sequence[Iterable[int]]) -> tuple[int, ...]:
    return tuple(chain.from_iterable(zip(*columns, strict=True)))


def _run(kernel: Any, lists: Sequence[Tensors], scalars: tuple[float, ...], flags: tuple[object, ...] = ()) -> None:
    """One launch for all entries that share dtypes."""
    if not all(facts_of(tensors).are_contiguous for tensors in lists):
        _run_contiguous(kernel, lists, scalars, flags)
        return
    for dtypes, chosen, _ in by_dtypes(lists):
        if not all(dtype in TRITON_DTYPES for dtype in dtypes):
            raise TypeError(f"element-wise work on fp32, bf16 and fp16, got {', '.join(map(str, dtypes))}.")
        facts = [facts_of(tensors) for tensors in chosen]
        numels, *others = (known.numels for known in facts)
        if any(other != numels for other in others):
            raise ValueError("element-wise work needs tensors of equal length in every list.")
        first = chosen[0][0]
        with torch.cuda.device_of(first):
            place = place_of(first.device)
            blocks = cut(numels, _BLOCK, place)
            if not blocks.total:
                continue
            tables = blocks.of, blocks.numels, address_table(interleaved([known.addresses for known in facts]), place)
            constants = (*(TRITON_DTYPES[dtype] for dtype in dtypes), *flags, _BLOCK)
            key = (kernel, first.device, dtypes, flags)
            launch(kernel, key, blocks.total, (*tables, *scalars, *constants), warps=_WARPS)


def _run_contiguous(
    kernel: Any, lists: Sequence[Tensors], scalars: tuple[float, ...], flags: tuple[object, ...]
) -> None:
    """With copies of what lies in pieces: its elements have no common order in memory."""
    of = {id(tensor): tensor for tensors in lists for tensor in tensors}  # one tensor may be in two lists
    copy_of = {key: tensor.contiguous() for key, tensor in of.items()}
    _run(kernel, [[copy_of[id(tensor)] for tensor in tensors] for tensors in lists], scalars, flags)
    changed = [key for key, tensor in of.items() if tensor is not copy_of[key]]
    fused_copy_([of[key] for key in changed], [copy_of[key] for key in changed])


def _run_pairs(targets: Tensors, sources: Tensors, factors: Sequence[float] | None) -> None:
    """One launch for all pairs that share dtypes."""
    for dtypes, (into, read), some in by_dtypes((targets, sources)):
        scale = factors if factors is None or not some else [factors[index] for index in some]
        target, source = facts_of(into), facts_of(read)
        with torch.cuda.device_of(into[0]):
            place = place_of(into[0].device)
            tiles = _cut_pairs(target.shapes, source.shapes, target.strides, source.strides, dtypes, place)
            for index in tiles.others:
                _one_by_one(into[index], read[index], None if scale is None else scale[index])
            if not tiles.total:
                continue
            columns: list[Iterable[int]] = [target.addresses, source.addresses]
            if scale is not None:  # in fp64, as integers
                columns.append(array("q", array("d", [-factor for factor in scale]).tobytes()))
            tables = tiles.of, tiles.walks, address_table(interleaved(columns), place)
            constants = (*(TRITON_DTYPES[dtype] for dtype in dtypes), scale is not None, _WALK, _SIDE)
            key = (_pair_kernel, into[0].device, dtypes, scale is not None)
            launch(_pair_kernel, key, tiles.total, (*tables, *constants), warps=_PAIR_WARPS, registers=_PAIR_REGISTERS)


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


def _one_by_one(target: Tensor, source: Tensor, factor: float | None) -> None:
    """For dtypes that our kernels do not know, and for views of too many dimensions."""
    if factor is None:
        target.copy_(source)
    else:
        target.add_(source, alpha=-factor)


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

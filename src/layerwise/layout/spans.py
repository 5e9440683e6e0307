"""Where elements of a param lie: one address for flat buffers, for somebody else's shards, and for both at once.

A span is an interval of the row-major elements of a block of its param, at an offset of a shard. In a flat buffer the
block is the whole param; a DTensor's local tensor is the whole of a block; a flat buffer over tensor-parallel shards is
an interval of one. A region is what such a span has of a matrix: a dense box that has an address in the shard and one in
the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple, Protocol

from layerwise.routing.geometry import Box, flat_index, interval_boxes, regions_within, row_major_strides


class Block(NamedTuple):
    """A box of a param of this shape."""

    shape: tuple[int, ...]
    box: Box


class Span(NamedTuple):
    """Elements [start, stop) of the row-major elements of a block of a param, at `shard_offset` of a shard."""

    fqn: str
    block: Block | None
    """None is the whole param: its elements in order need no shape."""
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def part(self) -> slice:
        """Where it lies in its shard."""
        return slice(self.shard_offset, self.shard_offset + self.numel)


class Boxed(Protocol):
    """A matrix, or anything else that is a box of a row-major grid over a param's elements."""

    @property
    def grid(self) -> tuple[int, ...]: ...
    @property
    def box(self) -> Box: ...


class Address(NamedTuple):
    """Where the elements of a dense box lie in a flat tensor."""

    offset: int
    strides: tuple[int, ...]


class Region(NamedTuple):
    """What a span has of a matrix, or one dense box of it."""

    shape: tuple[int, ...]
    in_shard: Address
    in_matrix: Address

    @property
    def numel(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def is_stretch(self) -> bool:
        """Whether its elements lie side by side and in order, in the shard and in the matrix.

        >>> Region((4, 6), Address(0, (6, 1)), Address(12, (6, 1))).is_stretch
        True
        >>> Region((4, 6), Address(0, (6, 1)), Address(12, (9, 1))).is_stretch
        False
        """
        plain = row_major_strides(self.shape)
        return all(
            size == 1 or (there == expected and here == expected)
            for size, expected, there, here in zip(
                self.shape, plain, self.in_shard.strides, self.in_matrix.strides, strict=True
            )
        )


def regions_of(matrix: Boxed, span: Span) -> tuple[Region, ...]:
    """What a span of its param has of a matrix, in the span's order."""
    if span.block is not None:
        return tuple(_in_block(matrix, span, span.block))
    grid, box = matrix.grid, matrix.box
    base = span.shard_offset - span.start
    if len(grid) == 1:  # nearly always
        start, stop = max(span.start, box.starts[0]), min(span.stop, box.stops[0])
        if start >= stop:
            return ()
        return (Region((stop - start,), Address(base + start, _ONE), Address(start - box.starts[0], _ONE)),)
    outer, inner = row_major_strides(grid), row_major_strides(box.shape)
    return tuple(
        Region(
            region.shape,
            Address(base + flat_index(region.starts, grid), outer),
            Address(flat_index(region.shifted_from(box.starts).starts, box.shape), inner),
        )
        for region in regions_within(grid, box, span.start, span.stop)
    )


_ONE = (1,)


def numel_in(matrix: Boxed, span: Span) -> int:
    """How many elements of a matrix a span has."""
    return sum(region.numel for region in regions_of(matrix, span))


def _in_block(matrix: Boxed, span: Span, block: Block) -> Iterator[Region]:
    """In the coarsest grid that cuts both the param and the matrix's own grid into factors: there both are boxes, and
    both addresses are linear."""
    fine = refined(block.shape, matrix.grid)
    shard_strides, shard_zero = _address(block.shape, block.box, fine)
    matrix_strides, matrix_zero = _address(matrix.grid, matrix.box, fine)
    shard_zero += span.shard_offset - span.start
    wanted = list(in_fine(matrix.box, matrix.grid, fine))
    for piece in interval_boxes(block.box.shape, span.start, span.stop):
        here = Box(
            tuple(start + zero for start, zero in zip(piece.starts, block.box.starts, strict=True)),
            tuple(stop + zero for stop, zero in zip(piece.stops, block.box.starts, strict=True)),
        )
        for held in in_fine(here, block.shape, fine):
            for part in wanted:
                both = held.intersect(part)
                if both is not None:
                    yield Region(
                        both.shape,
                        Address(shard_zero + _dot(both.starts, shard_strides), shard_strides),
                        Address(matrix_zero + _dot(both.starts, matrix_strides), matrix_strides),
                    )


def refined(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The coarsest grid that has the borders of all of these shapes of one number of elements."""
    borders = {1}
    for shape in shapes:
        cursor = 1
        for size in reversed(shape):
            cursor *= size
            borders.add(cursor)
    return tuple(outer // inner for inner, outer in pairwise(sorted(borders)))[::-1] or (1,)


def factors(shape: tuple[int, ...], fine: tuple[int, ...]) -> Iterator[range]:
    """Which axes of a finer grid make up each axis of a shape."""
    axis = 0
    for size in shape:
        first, covered = axis, 1
        while covered < size:
            covered *= fine[axis]
            axis += 1
        yield range(first, axis)


def in_fine(box: Box, shape: tuple[int, ...], fine: tuple[int, ...]) -> Iterator[Box]:
    """A box of a shape as boxes of a finer grid, in order."""
    choices = []
    for start, stop, axes in zip(box.starts, box.stops, factors(shape, fine), strict=True):
        if axes:
            choices.append(list(interval_boxes(tuple(fine[axis] for axis in axes), start, stop)))
        elif start >= stop:
            return
    if not choices:  # a single element
        yield Box.whole(fine)
    else:
        for parts in product(*choices):
            yield Box(
                tuple(start for part in parts for start in part.starts),
                tuple(stop for part in parts for stop in part.stops),
            )


def _address(shape: tuple[int, ...], box: Box, fine: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """How elements of a finer grid are found in a dense tensor of a box of this shape: strides, and where index 0 would
    lie."""
    strides = [0] * len(fine)
    own = row_major_strides(box.shape)
    for axes, stride in zip(factors(shape, fine), own, strict=True):
        for axis in reversed(axes):
            strides[axis] = stride
            stride *= fine[axis]
    return tuple(strides), -_dot(box.starts, own)


def _dot(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return sum(one * other for one, other in zip(left, right, strict=True))

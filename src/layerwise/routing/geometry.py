"""Row-major grids, the boxes in them and the intervals of their flattened elements: integer arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


def ceil_to(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class Box(NamedTuple):
    """A rectangular part of a row-major grid: `starts[d] <= index[d] < stops[d]`."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a grid."""
        return cls((0,) * len(shape), shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """What both boxes cover, or None."""
        starts = tuple(max(a, b) for a, b in zip(self.starts, other.starts, strict=True))
        stops = tuple(min(a, b) for a, b in zip(self.stops, other.stops, strict=True))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return Box(starts, stops)

    def moved(self, steps: int) -> Box:
        """The same box further along the first dim."""
        if len(self.starts) == 1:
            return Box((self.starts[0] + steps,), (self.stops[0] + steps,))
        return Box((self.starts[0] + steps, *self.starts[1:]), (self.stops[0] + steps, *self.stops[1:]))

    def shifted_from(self, origin: tuple[int, ...]) -> Box:
        """The same box with `origin` as the new zero."""
        return Box(
            tuple(start - zero for start, zero in zip(self.starts, origin, strict=True)),
            tuple(stop - zero for stop, zero in zip(self.stops, origin, strict=True)),
        )


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How many elements one step along each dim of a dense row-major grid skips."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def flat_index(index: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Position of `index` among the flattened elements of a row-major grid of `shape`."""
    return sum(i * stride for i, stride in zip(index, row_major_strides(shape), strict=True))


def collapse(grid: tuple[int, ...], box: Box) -> tuple[tuple[int, ...], Box]:
    """The same elements in as few dims as possible: a dim that the box covers fully joins the one before it.

    A whole matrix, a block of rows and one expert of a stack all become one interval of a 1-D grid, which is what makes
    their exchange one contiguous copy; a block of columns stays 2-D.
    """
    dims = list(grid)
    starts, stops = list(box.starts), list(box.stops)
    for dim in range(len(dims) - 1, 0, -1):
        size = dims[dim]
        if starts[dim] == 0 and stops[dim] == size:
            dims[dim - 1] *= size
            starts[dim - 1] *= size
            stops[dim - 1] *= size
            del dims[dim], starts[dim], stops[dim]
    # A width-1 leading dim (one expert of a stack) fixes an offset and nothing else: fold it into the next dim.
    while len(dims) > 1 and stops[0] - starts[0] == 1:
        offset = starts[0] * dims[1]
        dims[1] *= dims[0]
        starts[1] += offset
        stops[1] += offset
        del dims[0], starts[0], stops[0]
    return tuple(dims), Box(tuple(starts), tuple(stops))


def interval_boxes(grid: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The flat interval [start, stop) of a row-major grid as boxes, in flat order: a partial first row, whole rows, a
    partial last one."""
    if start >= stop:
        return
    if len(grid) == 1:
        yield Box((start,), (stop,))
        return
    inner = math.prod(grid[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for rest in interval_boxes(grid[1:], start - first * inner, stop - first * inner):
            yield Box((first, *rest.starts), (first + 1, *rest.stops))
        return
    head, tail = start % inner, stop % inner
    if head:
        for rest in interval_boxes(grid[1:], head, inner):
            yield Box((first, *rest.starts), (first + 1, *rest.stops))
        first += 1
    whole_stop = last if tail else last + 1
    if first < whole_stop:
        yield Box((first, *(0,) * (len(grid) - 1)), (whole_stop, *grid[1:]))
    if tail:
        for rest in interval_boxes(grid[1:], 0, tail):
            yield Box((last, *rest.starts), (last + 1, *rest.stops))


def regions_within(grid: tuple[int, ...], box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """The parts of a box that lie in the flat interval [start, stop) of its grid, in flat order."""
    if len(grid) == 1:  # nearly always
        start, stop = max(start, box.starts[0]), min(stop, box.stops[0])
        return (Box((start,), (stop,)),) if start < stop else ()
    found = (piece.intersect(box) for piece in interval_boxes(grid, start, stop))
    return tuple(piece for piece in found if piece is not None)

"""Logical matrices: which 2-D blocks of a param Newton-Schulz sees.

A matrix is a box in a row-major grid over the param's elements; its first dims are its rows, its last its columns.
Whole weights, row blocks of a fused weight, experts of a stack, interleaved and column blocks are all boxes, so the
engine knows one case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerwise.routing.geometry import Box, collapse, flat_index, interval_boxes
from layerwise.routing.spec import ModuleKind, ParamSpec


@dataclass(frozen=True, slots=True)
class Matrix:
    """One logical matrix of a param."""

    fqn: str
    index: int
    """Which matrix of its param."""
    rows: int
    cols: int
    grid: tuple[int, ...]
    """The param's elements as a row-major grid with as few dims as the box allows; 1-D for a matrix that is contiguous
    in its param."""
    box: Box
    """The part of the grid that is this matrix, in the matrix's own row-major order."""

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def label(self) -> str:
        return f"{self.fqn}[{self.index}]"

    @property
    def flat_start(self) -> int:
        """First element of the matrix among the param's flattened elements."""
        return self.box.starts[0] if len(self.grid) == 1 else flat_index(self.box.starts, self.grid)

    @property
    def flat_stop(self) -> int:
        """One past its last element; in between there may be elements of other matrices."""
        if len(self.grid) == 1:
            return self.box.stops[0]
        return flat_index(tuple(stop - 1 for stop in self.box.stops), self.grid) + 1

    def numel_within(self, start: int, stop: int) -> int:
        """How many of its elements lie in the param's flat interval [start, stop)."""
        if len(self.grid) == 1:  # nearly always, and asked for every shard of every matrix: no boxes are built for it
            return max(0, min(stop, self.box.stops[0]) - max(start, self.box.starts[0]))
        return sum(region.numel for region in self.regions(start, stop))

    def regions(self, start: int, stop: int) -> tuple[Box, ...]:
        """The parts of this matrix inside the param's flat interval [start, stop), as boxes of the grid in flat
        order."""
        if len(self.grid) == 1:
            start, stop = max(start, self.box.starts[0]), min(stop, self.box.stops[0])
            return (Box((start,), (stop,)),) if start < stop else ()
        found = (piece.intersect(self.box) for piece in interval_boxes(self.grid, start, stop))
        return tuple(piece for piece in found if piece is not None)


def _matrix(fqn: str, index: int, rows: int, cols: int, grid: tuple[int, ...], box: Box) -> Matrix:
    small_grid, small_box = collapse(grid, box)
    return Matrix(fqn=fqn, index=index, rows=rows, cols=cols, grid=small_grid, box=small_box)


def _row_blocks_of(param: ParamSpec, rows: int, cols: int, sizes: tuple[int, ...]) -> tuple[Matrix, ...]:
    if any(size <= 0 for size in sizes) or sum(sizes) != rows:
        raise ValueError(
            f"param {param.fqn!r} has shape {param.shape}: row blocks {sizes} must be positive and sum to {rows}, got {sum(sizes)}. "
            "Fix matrix_splits() of its module or row_blocks of the rule that matched it."
        )
    blocks, start = [], 0
    for index, size in enumerate(sizes):
        blocks.append(_matrix(param.fqn, index, size, cols, (rows, cols), Box((start, 0), (start + size, cols))))
        start += size
    return tuple(blocks)


def matrices_of(param: ParamSpec, row_blocks: tuple[int, ...] = ()) -> tuple[Matrix, ...]:
    """The logical matrices of a param: row blocks, one per expert of a stack, one for a flattened convolution, or the
    whole."""
    if len(param.shape) < 2:
        raise ValueError(
            f"param {param.fqn!r} has shape {param.shape}: a matrix rule needs at least two dims. Route it to 'other'."
        )
    if param.numel == 0:
        raise ValueError(
            f"param {param.fqn!r} has shape {param.shape}: a matrix rule needs elements. Route it to 'other'."
        )
    if len(param.shape) == 2 or param.module_kind is ModuleKind.CONV:
        rows, cols = param.shape[0], math.prod(param.shape[1:])
        return _row_blocks_of(param, rows, cols, row_blocks or (rows,))
    if len(param.shape) == 3:
        if row_blocks:
            raise ValueError(
                f"param {param.fqn!r} is a stack of shape {param.shape}: row_blocks={row_blocks} applies to 2-D params only. "
                "Leave it out: every entry of the stack is one matrix."
            )
        experts, rows, cols = param.shape
        return tuple(
            _matrix(param.fqn, index, rows, cols, param.shape, Box((index, 0, 0), (index + 1, rows, cols)))
            for index in range(experts)
        )
    raise ValueError(
        f"param {param.fqn!r} has shape {param.shape}: expected a matrix, a stack (E, M, N) or a convolution, got {len(param.shape)} dims. "
        "Route it to 'other'."
    )

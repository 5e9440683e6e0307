"""Logical matrices: which 2-D blocks of a param Newton-Schulz sees.

A matrix is a box in a row-major grid over the param's elements; its first dims are its rows, its last its columns.
Whole weights, row blocks of a fused weight, experts of a stack, interleaved and column blocks are all boxes, so the
engine knows one case.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice

from layerwise.routing.geometry import Box, collapse, flat_index, regions_within
from layerwise.routing.spec import ModuleKind, ParamSpec
from layerwise.routing.split import Split, whole


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
    transposed: bool = False
    """Stored (in, out): rows and cols are those of storage, the logical matrix is the other way round."""
    whole: tuple[int, int] | None = None
    """Rows and cols of the matrix that it is a block of, where tensor parallelism has cut that one and blocks are orthogonalised
    by themselves."""

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def logical_shape(self) -> tuple[int, int]:
        """(out, in), which per-row state goes by."""
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)

    @property
    def scaled_as(self) -> tuple[int, int]:
        """(out, in), which scale factors go by: of the whole, also for a block of it."""
        rows, cols = self.whole or (self.rows, self.cols)
        return (cols, rows) if self.transposed else (rows, cols)

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
        return regions_within(self.grid, self.box, start, stop)


def default_split(param: ParamSpec) -> Split:
    """What a param is when nobody says otherwise: one matrix, a flattened convolution, or a stack."""
    if len(param.shape) < 2:
        raise ValueError(
            f"param {param.fqn!r} has shape {param.shape}: a matrix rule needs at least two dims. Route it to 'other'."
        )
    if param.numel == 0:
        raise ValueError(
            f"param {param.fqn!r} has shape {param.shape}: a matrix rule needs elements. Route it to 'other'."
        )
    if len(param.shape) == 2 or param.module_kind is ModuleKind.CONV:
        return whole(param.shape)
    if len(param.shape) == 3:
        return Split(grid=param.shape, roles="arc")
    raise ValueError(
        f"param {param.fqn!r} has shape {param.shape}: expected a matrix, a stack (E, M, N) or a convolution, got "
        f"{len(param.shape)} dims. Route it to 'other', or say how it splits."
    )


def matrices_of(param: ParamSpec, split: Split | None = None) -> tuple[Matrix, ...]:
    """The logical matrices of a param, as `split` says or by default."""
    chosen = default_split(param) if split is None else split
    misfit = chosen.misfit(param.shape)
    if misfit is not None:
        raise ValueError(
            f"param {param.fqn!r} has shape {param.shape}: {misfit} Fix matrix_splits() of its module or the rule that "
            "matched it."
        )
    # Entries of a stack are one another's copies, moved on: the boxes of the first are enough to make all of them.
    entries = chosen.grid[0] if chosen.roles[0] == "a" else 1
    parts = list(islice(chosen.parts(), chosen.num_parts // entries))
    collapsed = [collapse(chosen.grid, part.box) for part in parts]
    is_transposed = chosen.transposed
    firsts = [(part.rows, part.cols, grid, box) for part, (grid, box) in zip(parts, collapsed, strict=True)]
    index = count()
    # Without names of fields: a model has tens of thousands of matrices, and they are slow to pass.
    return tuple(
        Matrix(param.fqn, next(index), rows, cols, grid, box.moved(entry * (grid[0] // entries)), is_transposed)
        for entry in range(entries)
        for rows, cols, grid, box in firsts
    )

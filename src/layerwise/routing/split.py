"""How a param breaks into logical matrices: one small value that covers every way weights are fused, stacked and
stored.

A split views the param's elements as a row-major grid and gives each axis a role: `r` axes make up the rows, `c` axes
the columns, and every index
along an `a` axis is a matrix apart. One axis may be cut into blocks of unequal size, each block a matrix of its own.

| stored as | grid | roles | blocks |
|---|---|---|---|
| a plain weight (M, N) | (M, N) | rc | |
| query, key, value one after the other | (q + k + v, N) | rc | axis 0: q, k, v |
| query, key, value head by head | (heads, 3 d, N) | rrc | axis 1: d, d, d |
| gate and up taking turns | (h, 2, N) | rac | |
| each head of an output projection (D, heads d) | (D, heads, d) | rac | |
| experts (E, M, N), each fused gate and up | (E, 2 h, N) | arc | axis 1: h, h |
| stored transposed (in, out) | (in, out) | cr | |
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeGuard

from layerwise.config.habits import understands
from layerwise.routing.geometry import Box

_ROLES = frozenset("rca")


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of a split: its box in the grid, and its rows and columns as they are stored."""

    box: Box
    rows: int
    cols: int


@understands()
@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a param breaks into matrices. Plain numbers: it can be written down in a config file.

    >>> Split(grid=(96, 32), roles="rc", blocks=(32, 32, 32)).num_parts  # query, key, value one after the other
    3

    Args:
        grid: sizes of the axes as which the param's elements are viewed, in storage order; their product is its size.
        roles: a letter for each axis of the grid: "r" makes up rows, "c" columns, and each index along "a" is a matrix apart.
        block_axis: number of the axis that `blocks` cut; 0, since fused weights are mostly cut by rows.
        blocks: sizes of the blocks along that axis, each a matrix of its own; () does not cut.
    """

    grid: tuple[int, ...]
    roles: str
    block_axis: int = 0
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(f"split into grid {self.grid}: {problem}")

    def _problem(self) -> str | None:
        if len(self.roles) != len(self.grid) or not set(self.roles) <= _ROLES:
            return f"roles {self.roles!r} must name one of r, c, a for each of the {len(self.grid)} axes."
        if not all(map(is_size, (*self.grid, *self.blocks, self.block_axis))):
            return f"axes and blocks must be whole numbers, got {self.grid}, blocks {self.blocks} of axis {self.block_axis!r}."
        if any(size <= 0 for size in self.grid):
            return "every axis must be positive."
        kept = self.roles.replace("a", "")
        if "r" not in kept or "c" not in kept or sum(left != right for left, right in pairwise(kept)) != 1:
            return f"roles {self.roles!r} must have all rows on one side and all columns on the other."
        if self.blocks:
            if not 0 <= self.block_axis < len(self.grid):
                return f"block axis {self.block_axis} is not one of the {len(self.grid)} axes."
            size = self.grid[self.block_axis]
            if any(block <= 0 for block in self.blocks) or sum(self.blocks) != size:
                return f"blocks {self.blocks} must be positive and sum to {size}, got {sum(self.blocks)}."
        return None

    def misfit(self, shape: tuple[int, ...]) -> str | None:
        """Why a param of this shape cannot be split so, as a sentence, or None."""
        if math.prod(self.grid) != math.prod(shape):
            return f"its split has {math.prod(self.grid)} elements in grid {self.grid}, the param {math.prod(shape)}."
        if not (_borders(shape) <= _borders(self.grid) or _borders(self.grid) <= _borders(shape)):
            return f"its split has grid {self.grid}, which does not cut the axes of the param into factors, in order."
        return None

    @property
    def transposed(self) -> bool:
        """Whether columns of the logical matrix are stored as rows. Orthogonalising does not care; scale factors and
        per-row state do."""
        return self.roles.replace("a", "")[0] == "c"

    @property
    def is_whole(self) -> bool:
        """Whether the param is one matrix."""
        return len(self.blocks) <= 1 and all(
            size == 1 for size, role in zip(self.grid, self.roles, strict=True) if role == "a"
        )

    @property
    def num_parts(self) -> int:
        """How many matrices it makes."""
        apart = math.prod(size for size, role in zip(self.grid, self.roles, strict=True) if role == "a")
        return apart * max(1, len(self.blocks))

    def parts(self) -> Iterator[Part]:
        """The matrices, indices apart first, then blocks, in storage order."""
        apart = [axis for axis, role in enumerate(self.roles) if role == "a"]
        for chosen in product(*(range(self.grid[axis]) for axis in apart)):
            starts, stops = [0] * len(self.grid), list(self.grid)
            for axis, index in zip(apart, chosen, strict=True):
                starts[axis], stops[axis] = index, index + 1
            for first, last in self._block_bounds():
                if self.blocks:
                    starts[self.block_axis], stops[self.block_axis] = first, last
                yield self._part(Box(tuple(starts), tuple(stops)))

    def _block_bounds(self) -> Iterator[tuple[int, int]]:
        cursor = 0
        for size in self.blocks or (0,):
            yield cursor, cursor + size
            cursor += size

    def _part(self, box: Box) -> Part:
        lead = self.roles.replace("a", "")[0]
        sizes = [(size, role) for size, role in zip(box.shape, self.roles, strict=True) if role != "a"]
        rows = math.prod(size for size, role in sizes if role == lead)
        return Part(box=box, rows=rows, cols=box.numel // rows)

    def describe(self) -> str:
        """The split in words, for reasons and tables; empty for a plain weight."""
        words = []
        apart = math.prod(size for size, role in zip(self.grid, self.roles, strict=True) if role == "a")
        if "a" in self.roles:
            words.append(f"{apart} matrices apart")
        if len(self.blocks) > 1:
            logical = "row" if self.roles[self.block_axis] == "r" else "column"
            # Blocks of one axis take turns where an outer axis of the same kind goes round them.
            turns = self.roles[self.block_axis] in self.roles[: self.block_axis]
            words.append(f"{'interleaved ' if turns else ''}{logical} blocks of {', '.join(map(str, self.blocks))}")
        if self.transposed:
            words.append("stored transposed")
        return ", ".join(words)

    def to_json(self) -> dict[str, object]:
        """As plain data: what TOML rules and plans hold."""
        found: dict[str, object] = {"grid": list(self.grid), "roles": self.roles}
        if self.blocks:
            found.update(block_axis=self.block_axis, blocks=list(self.blocks))
        return found


def is_size(value: object) -> TypeGuard[int]:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def _borders(sizes: tuple[int, ...]) -> set[int]:
    """Where axes begin, counted in elements from the end: a grid cuts a shape into factors if it has all of its
    borders."""
    found, cursor = set(), 1
    for size in reversed(sizes):
        cursor *= size
        found.add(cursor)
    return found


def whole(shape: tuple[int, ...]) -> Split:
    """A plain (M, N) weight, or a convolution (M, ...) flattened to rows x everything else."""
    return Split(grid=(shape[0], math.prod(shape[1:])), roles="rc")


def row_blocks(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Split:
    """Row blocks one after the other: fused query, key and value, or gate and up."""
    return Split(grid=(shape[0], math.prod(shape[1:])), roles="rc", block_axis=0, blocks=sizes)


def interleaved_rows(shape: tuple[int, int], groups: int, sizes: tuple[int, ...]) -> Split:
    """Row blocks that repeat for each of `groups` heads: all queries make one matrix, all keys another."""
    return Split(grid=(groups, sum(sizes), shape[1]), roles="rrc", block_axis=1, blocks=sizes)


def per_row_head(shape: tuple[int, int], heads: int) -> Split:
    """A matrix for each head of a projection onto heads."""
    return Split(grid=(heads, shape[0] // heads, shape[1]), roles="arc")


def per_column_head(shape: tuple[int, int], heads: int) -> Split:
    """A matrix for each head of a projection from heads."""
    return Split(grid=(shape[0], heads, shape[1] // heads), roles="rac")


def stack(shape: tuple[int, int, int], *, transposed: bool = False, sizes: tuple[int, ...] = ()) -> Split:
    """A matrix (or one for each block of the output axis) for each entry of a stack (E, M, N)."""
    roles = "acr" if transposed else "arc"
    return Split(grid=shape, roles=roles, block_axis=2 if transposed else 1, blocks=sizes)


def transposed(shape: tuple[int, int], sizes: tuple[int, ...] = ()) -> Split:
    """A weight stored (in, out), with output blocks along its columns."""
    return Split(grid=shape, roles="cr", block_axis=1, blocks=sizes)

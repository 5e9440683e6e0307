"""Shards that are boxes of one param each: what somebody else has cut, or not cut at all.

Every rank's box is known to every rank, as plain numbers. Ranks with the same box hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TypeAlias

from layerwise.config.layouts import WorkPolicy
from layerwise.dtypes import DType
from layerwise.layout.cost import DEFAULT_COST, DEFAULT_HARDWARE, Hardware, NewtonSchulz
from layerwise.layout.meshes import Placed, copied_on
from layerwise.layout.shards import Held, Ranks, nearest
from layerwise.layout.spans import Block, Span, numel_in
from layerwise.routing.geometry import Box, interval_boxes
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamTable


def shards_of_params(
    table: ParamTable,
    routes: Mapping[str, Route],
    world_by_domain: Mapping[str, int],
    placed: Mapping[str, Placed],
    *,
    cost: NewtonSchulz = DEFAULT_COST,
    hardware: Hardware = DEFAULT_HARDWARE,
) -> tuple[BoxShards, ...]:
    """Every trainable param as it is placed, in backward order; whole on every rank of its domain where nothing is said of
    it. The cost says whether ranks that hold a matrix whole share the work or repeat it."""
    trainable = [param for param in reversed(table.params) if routes[param.fqn].family != "frozen"]
    alike: dict[tuple[Placed, tuple[int, ...], int], Boxes] = {}
    found = []
    for index, param in enumerate(trainable):
        world = world_by_domain[param.domain]
        key = placed.get(param.fqn, copied_on(world)), param.shape, world
        if key not in alike:
            alike[key] = Boxes(param.shape, key[0].boxes(param.shape, world))
        work = _share_or_repeat(routes[param.fqn], world, cost, hardware)
        found.append(BoxShards(index, param.domain, param.fqn, alike[key], work=work))
    return tuple(found)


def _share_or_repeat(route: Route, world: int, cost: NewtonSchulz, hardware: Hardware) -> WorkPolicy:
    """What is quicker for a matrix that several ranks hold whole: one of them does the work and sends it to the others, in
    bf16, or each does it. Both save the same part of the whole, so how many ranks there are does not matter, unless it is
    one. A matrix that nobody holds whole has to go home in any case: where there are copies of its pieces, sharing moves
    fewer bytes than repeating does."""
    largest = max(route.matrices, key=lambda matrix: cost.flops(matrix.rows, matrix.cols), default=None)
    if world == 1 or largest is None:
        return "repeat"
    done = hardware.ns_ms(cost.flops(largest.rows, largest.cols))
    sent = hardware.wire_ms(largest.rows * largest.cols * DType.BF16.itemsize)
    return "repeat" if done <= sent else "balance"


class Boxes:
    """What every rank has of a param of some shape. Layers are alike: all params that are cut in the same way share one of
    these, and what is found for a matrix of one of them is found for all."""

    def __init__(self, shape: tuple[int, ...], by_rank: tuple[Box, ...]) -> None:
        self.shape = shape
        self.by_rank = by_rank
        """The box of every rank of its domain."""
        self._pieces: dict[_Place, list[_Piece]] = {}
        self._runs: dict[_Place, list[Held]] = {}
        self._sources: dict[tuple[_Place, int], list[Held]] = {}
        self._ordered: dict[_Place, bool] = {}

    @property
    def world(self) -> int:
        return len(self.by_rank)

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of every rank."""
        return tuple(box.numel for box in self.by_rank)

    @cached_property
    def ranks_by_box(self) -> dict[Box, Ranks]:
        """Who has each of the boxes that there are."""
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.by_rank):
            found.setdefault(box, []).append(rank)
        return {
            box: range(ranks[0], ranks[-1] + 1) if len(ranks) == ranks[-1] - ranks[0] + 1 else tuple(ranks)
            for box, ranks in found.items()
        }

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """How many ranks have each of the boxes that are not empty."""
        return tuple(len(ranks) for box, ranks in self.ranks_by_box.items() if box.numel)

    @cached_property
    def described(self) -> dict[str, str]:
        """The same as plain data."""
        return {str(list(map(list, box))): repr(ranks) for box, ranks in self.ranks_by_box.items()}

    def holders(self, matrix: Matrix) -> list[Held]:
        """How much of a matrix each rank holds, copies counted for each of them."""
        place = matrix.grid, matrix.box
        if place not in self._runs:
            self._runs[place] = _as_runs((rank, numel) for ranks, numel in self._pieces_of(matrix) for rank in ranks)
        return self._runs[place]

    def sources(self, matrix: Matrix, home: int) -> list[Held]:
        """How much of a matrix each rank would send to a home; of copies, the nearest does."""
        place = matrix.grid, matrix.box
        pieces = self._pieces_of(matrix)
        if place not in self._ordered:
            self._ordered[place] = self._is_ordered(pieces)
        # Copies of a mesh lie one behind the other: then it is the same number of them for all pieces, and for all homes
        # beside which it lies.
        key = place, home * len(pieces[0][0]) // self.world if self._ordered[place] else -1 - home
        if key not in self._sources:
            self._sources[key] = _as_runs((nearest(ranks, home, self.world), numel) for ranks, numel in pieces)
        return self._sources[key]

    def _is_ordered(self, pieces: Sequence[_Piece]) -> bool:
        """Whether every piece has as many copies, and each of those is the nearest to itself."""
        copies = len(pieces[0][0])
        return all(
            len(ranks) == copies and all(rank * copies // self.world == number for number, rank in enumerate(ranks))
            for ranks, _ in pieces
        )

    def _pieces_of(self, matrix: Matrix) -> list[_Piece]:
        place = matrix.grid, matrix.box
        if place not in self._pieces:
            wanted = _as_one_box(self.shape, matrix)
            numels = ((ranks, self._numel(matrix, wanted, box)) for box, ranks in self.ranks_by_box.items())
            self._pieces[place] = [(ranks, numel) for ranks, numel in numels if numel]
        return self._pieces[place]

    def _numel(self, matrix: Matrix, wanted: Box | None, box: Box) -> int:
        if wanted is None:
            return numel_in(matrix, Span("", Block(self.shape, box), 0, box.numel, 0)) if box.numel else 0
        numel = 1
        for first, other, stop, end in zip(wanted.starts, box.starts, wanted.stops, box.stops, strict=True):
            common = (stop if stop < end else end) - (first if first > other else other)
            if common <= 0:
                return 0
            numel *= common
        return numel


_Place: TypeAlias = tuple[tuple[int, ...], Box]
"""Where a matrix lies in its param: its grid and its box."""

_Piece: TypeAlias = tuple[Ranks, int]
"""Who holds some of a matrix, and how many elements that is."""


def _as_one_box(shape: tuple[int, ...], matrix: Matrix) -> Box | None:
    """The part of a param that is a matrix, where that is one box of it: nearly always."""
    if matrix.grid == shape:
        return matrix.box
    if len(matrix.grid) > 1:
        return None
    found = list(islice(interval_boxes(shape, matrix.box.starts[0], matrix.box.stops[0]), 2))
    return found[0] if len(found) == 1 else None


def _as_runs(numels: Iterable[tuple[int, int]]) -> list[Held]:
    """Ranks with as many elements each, from pairs of a rank and its elements. A rank with several pieces has their sum."""
    by_rank: dict[int, int] = {}
    for rank, numel in numels:
        by_rank[rank] = by_rank.get(rank, 0) + numel
    found: list[Held] = []
    for rank, numel in sorted(by_rank.items()):
        if found and found[-1][1:] == (rank, numel):
            found[-1] = found[-1][0], rank + 1, numel
        else:
            found.append((rank, rank + 1, numel))
    return found


@dataclass(frozen=True)
class BoxShards:
    """One param; each rank's shard is a box of it, row by row."""

    index: int
    domain: str
    fqn: str
    boxes: Boxes
    work: WorkPolicy = "balance"
    tie: str = ""

    @property
    def label(self) -> str:
        return f"param {self.fqn!r}"

    @property
    def world(self) -> int:
        return self.boxes.world

    @property
    def shape(self) -> tuple[int, ...]:
        return self.boxes.shape

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    def param_numel(self, fqn: str) -> int:
        return math.prod(self.shape)

    def shard_numel(self, rank: int) -> int:
        return self.boxes.numels[rank]

    def shard_numels(self) -> tuple[int, ...]:
        return self.boxes.numels

    def spans(self, rank: int) -> tuple[Span, ...]:
        box = self.boxes.by_rank[rank]
        if not box.numel:
            return ()
        # The whole of a param needs no shape.
        block = None if box.shape == self.shape else Block(self.shape, box)
        return (Span(self.fqn, block, 0, box.numel, 0),)

    def spans_of(self, fqn: str, rank: int) -> Sequence[Span]:
        return self.spans(rank)

    def copies(self, span: Span, rank: int) -> Ranks:
        return self.boxes.ranks_by_box[self.boxes.by_rank[rank]]

    def ranks_of(self, matrix: Matrix) -> Ranks:
        return tuple(rank for first, stop, _ in self.holders(matrix) for rank in range(first, stop))

    def holders(self, matrix: Matrix) -> list[Held]:
        return self.boxes.holders(matrix)

    def to_json(self) -> dict[str, object]:
        """As plain data, for ranks to compare."""
        return {"label": self.label, "domain": self.domain, "boxes": self.boxes.described, "work": self.work}

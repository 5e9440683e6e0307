"""Shards that are boxes of one param each: what somebody else has cut, or not cut at all.

Every rank's box is known to every rank, as plain numbers. Ranks with the same box hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import TypeAlias

from layerwise.config.layouts import WorkPolicy
from layerwise.dtypes import DType
from layerwise.layout.blocks import count_blocks
from layerwise.layout.cost import DEFAULT_COST, DEFAULT_HARDWARE, Hardware, NewtonSchulz
from layerwise.layout.meshes import Placed, copied_on
from layerwise.layout.shards import Held, Ranks, nearest, ranks_in
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
        shard = BoxShards(index, param.domain, param.fqn, alike[key])
        # A block of tensor parallelism is whole where it lies, unless data parallelism has cut it again: nothing has to move.
        is_there = count_blocks([routes[param.fqn]]) > 0 and not shard.has_copies
        work = "stay" if is_there else _share_or_repeat(routes[param.fqn], world, cost, hardware)
        found.append(replace(shard, work=work))
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
        self._kinds: dict[_Place, _Kind] = {}
        self._pieces: dict[_Kind, list[_Piece]] = {}
        self._runs: dict[_Kind, list[Held]] = {}
        self._sources: dict[tuple[_Kind, int], list[Held]] = {}
        self._ordered: dict[_Kind, bool] = {}

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
        return tuple(len(ranks) for ranks in self.ranks_by_box.values() if self.numels[ranks[0]])

    @cached_property
    def _by_first_dim(self) -> dict[_Interval, list[tuple[Box, Ranks]]]:
        """Boxes by where they begin and end along the first dim: an expert is on few of the ranks that a stack lies on."""
        found: dict[_Interval, list[tuple[Box, Ranks]]] = {}
        for box, ranks in self.ranks_by_box.items():
            if self.numels[ranks[0]]:
                found.setdefault((*box.starts[:1], *box.stops[:1]), []).append((box, ranks))
        return found

    @cached_property
    def described(self) -> dict[str, str]:
        """The same as plain data."""
        return {str(list(map(list, box))): repr(ranks) for box, ranks in self.ranks_by_box.items()}

    def holders(self, matrix: Matrix) -> list[Held]:
        """How much of a matrix each rank holds, copies counted for each of them."""
        kind = self._kind_of(matrix)
        if kind not in self._runs:
            pieces = self._pieces_of(matrix, kind)
            self._runs[kind] = _as_runs((rank, numel) for ranks, numel in pieces for rank in ranks)
        return self._runs[kind]

    def sources(self, matrix: Matrix, home: int) -> list[Held]:
        """How much of a matrix each rank would send to a home; of copies, the nearest does."""
        kind = self._kind_of(matrix)
        pieces = self._pieces_of(matrix, kind)
        if kind not in self._ordered:
            self._ordered[kind] = self._is_ordered(pieces)
        # Copies of a mesh lie one behind the other: then it is the same number of them for all pieces, and for all homes
        # beside which it lies.
        key = kind, home * len(pieces[0][0]) // self.world if self._ordered[kind] else -1 - home
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

    def _kind_of(self, matrix: Matrix) -> _Kind:
        """What matrices have in common that are held alike. Experts between the same borders along the first dim are: where
        one ends and the next begins is between no two ranks."""
        place = matrix.grid, matrix.box
        if place not in self._kinds:
            wanted = _as_one_box(self.shape, matrix)
            near = [within for within in self._by_first_dim if wanted is None or _meet(wanted, within)]
            if wanted is not None and len(near) == 1 and near[0] and _is_inside(wanted, near[0]):
                length = wanted.stops[0] - wanted.starts[0]
                self._kinds[place] = near[0], (length,), wanted.starts[1:], wanted.stops[1:]
            else:
                self._kinds[place] = matrix.grid, matrix.box.starts, matrix.box.stops
        return self._kinds[place]

    def _pieces_of(self, matrix: Matrix, kind: _Kind) -> list[_Piece]:
        if kind not in self._pieces:
            wanted = _as_one_box(self.shape, matrix)
            near = chain.from_iterable(
                boxes for within, boxes in self._by_first_dim.items() if wanted is None or _meet(wanted, within)
            )
            numels = ((ranks, self._numel(matrix, wanted, box)) for box, ranks in near)
            self._pieces[kind] = [(ranks, numel) for ranks, numel in numels if numel]
        return self._pieces[kind]

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

_Kind: TypeAlias = tuple[tuple[int, ...], ...]
"""What says who holds a matrix."""

_Interval: TypeAlias = tuple[int, ...]
"""From where to where along the first dim; nothing where there is none."""

_Piece: TypeAlias = tuple[Ranks, int]
"""Who holds some of a matrix, and how many elements that is."""


def _meet(wanted: Box, within: _Interval) -> bool:
    """Whether a box has anything between two places along the first dim."""
    return not within or (wanted.starts[0] < within[1] and within[0] < wanted.stops[0])


def _is_inside(wanted: Box, within: _Interval) -> bool:
    return within[0] <= wanted.starts[0] and wanted.stops[0] <= within[1]


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
    by_numel: dict[int, list[int]] = {}
    for rank, numel in sorted(by_rank.items()):
        by_numel.setdefault(numel, []).append(rank)
    return sorted((*stretch, numel, step) for numel, ranks in by_numel.items() for stretch, step in _stretches(ranks))


def _stretches(ranks: Sequence[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Ranks in order as (first, stop) and step: neighbours together, and others if three of them are as far apart."""
    begin = 0
    while begin < len(ranks):
        end, step = begin + 1, 1
        if end < len(ranks):
            step = ranks[end] - ranks[begin]
            while end < len(ranks) and ranks[end] - ranks[end - 1] == step:
                end += 1
        if step > 1 and end - begin < 3:
            end, step = begin + 1, 1
        yield (ranks[begin], ranks[end - 1] + 1), step
        begin = end


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

    @property
    def most_spans(self) -> int:
        return 1

    @property
    def num_holders(self) -> int:
        return sum(self.boxes.copies)

    @property
    def has_copies(self) -> bool:
        return max(self.boxes.copies, default=1) > 1

    @property
    def is_parted(self) -> bool:
        return len(self.boxes.copies) > 1

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
        return ranks_in(self.holders(matrix))

    def holders(self, matrix: Matrix) -> list[Held]:
        return self.boxes.holders(matrix)

    def to_json(self) -> dict[str, object]:
        """As plain data, for ranks to compare."""
        return {"label": self.label, "domain": self.domain, "boxes": self.boxes.described, "work": self.work}

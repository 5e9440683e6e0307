"""Shards that are boxes of one param each: what somebody else has cut, or not cut at all.

Every rank's box is known to every rank, as plain numbers. Ranks with the same box hold copies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layerwise.config.layouts import WorkPolicy
from layerwise.dtypes import DType
from layerwise.layout.cost import DEFAULT_COST, DEFAULT_HARDWARE, Hardware, NewtonSchulz
from layerwise.layout.meshes import Placed, copied_on
from layerwise.layout.shards import Held, Ranks
from layerwise.layout.spans import Block, Span, numel_in
from layerwise.routing.geometry import Box
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
    return tuple(
        BoxShards(
            index,
            param.domain,
            param.fqn,
            param.shape,
            placed.get(param.fqn, copied_on(world)).boxes(param.shape, world),
            work=_share_or_repeat(routes[param.fqn], world, cost, hardware),
        )
        for index, param in enumerate(trainable)
        for world in (world_by_domain[param.domain],)
    )


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


@dataclass(frozen=True)
class BoxShards:
    """One param; each rank's shard is a box of it, row by row."""

    index: int
    domain: str
    fqn: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """Of every rank of its domain."""
    work: WorkPolicy = "balance"
    tie: str = ""

    @property
    def label(self) -> str:
        return f"param {self.fqn!r}"

    @property
    def world(self) -> int:
        return len(self.boxes)

    @property
    def fqns(self) -> tuple[str, ...]:
        return (self.fqn,)

    @cached_property
    def _ranks_by_box(self) -> dict[Box, Ranks]:
        found: dict[Box, list[int]] = {}
        for rank, box in enumerate(self.boxes):
            found.setdefault(box, []).append(rank)
        return {
            box: range(ranks[0], ranks[-1] + 1) if len(ranks) == ranks[-1] - ranks[0] + 1 else tuple(ranks)
            for box, ranks in found.items()
        }

    def param_numel(self, fqn: str) -> int:
        return math.prod(self.shape)

    def shard_numel(self, rank: int) -> int:
        return self.boxes[rank].numel

    def spans(self, rank: int) -> tuple[Span, ...]:
        box = self.boxes[rank]
        if not box.numel:
            return ()
        # The whole of a param needs no shape.
        block = None if box.shape == self.shape else Block(self.shape, box)
        return (Span(self.fqn, block, 0, box.numel, 0),)

    def spans_of(self, fqn: str, rank: int) -> Sequence[Span]:
        return self.spans(rank)

    def copies(self, span: Span, rank: int) -> Ranks:
        return self._ranks_by_box[self.boxes[rank]]

    def ranks_of(self, matrix: Matrix) -> Ranks:
        return tuple(rank for rank in range(self.world) if self._numel_on(matrix, rank))

    def holders(self, matrix: Matrix) -> list[Held]:
        found: list[Held] = []
        for rank in range(self.world):
            numel = self._numel_on(matrix, rank)
            if numel and found and found[-1][1:] == (rank, numel):
                found[-1] = found[-1][0], rank + 1, numel
            elif numel:
                found.append((rank, rank + 1, numel))
        return found

    def to_json(self) -> dict[str, object]:
        """As plain data, for ranks to compare."""
        boxes = {str(list(map(list, box))): repr(ranks) for box, ranks in self._ranks_by_box.items()}
        return {"label": self.label, "domain": self.domain, "boxes": boxes, "work": self.work}

    def _numel_on(self, matrix: Matrix, rank: int) -> int:
        return sum(numel_in(matrix, span) for span in self.spans(rank))

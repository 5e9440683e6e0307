"""What a storage plan is made of: buffers, the buckets that they are cut into, and where params lie in these."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from layerwise.config.layouts import FACTS_BY_LAYOUT, Layout, LayoutFacts, WorkPolicy
from layerwise.dtypes import DType
from layerwise.layout.intervals import Intervals
from layerwise.layout.shards import Held, Ranks
from layerwise.layout.spans import Span
from layerwise.routing.defaults import Family
from layerwise.routing.matrices import Matrix


@dataclass(frozen=True, slots=True, order=True)
class BufferKey:
    """What params of one buffer have in common."""

    domain: str
    chunk: int
    family: Family
    dtype: DType
    layout: Layout

    @property
    def facts(self) -> LayoutFacts:
        return FACTS_BY_LAYOUT[self.layout]

    @property
    def label(self) -> str:
        chunk = f"chunk {self.chunk}/" if self.chunk else ""
        return f"{self.domain}/{chunk}{self.family}/{self.dtype}/{self.layout}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A param's place in its bucket, in elements."""

    fqn: str
    offset: int
    numel: int
    recipe: str = ""
    """How it is kept, where that is not in its own dtype. Never a reason for another buffer: borders of shards, and with
    them sums, are the same for every recipe."""

    @property
    def part(self) -> slice:
        return slice(self.offset, self.offset + self.numel)


ReduceKind = Literal["reduce_scatter", "all_reduce", "ordered", "none"]
"""What becomes of a bucket's gradient. none: there is none, since somebody else reduces the params' own."""
PublishKind = Literal["all_gather", "uneven_all_gather", "none"]


@dataclass(frozen=True)
class BucketPlan:
    """A slice of a buffer that is communicated together, and a shard of it on every rank. Its collectives come from its
    own fields, never from a global flag."""

    index: int
    """Position in the order in which all buckets of the model are reduced."""
    buffer: int
    domain: str
    offset: int
    """Start in its buffer, in elements."""
    shards: Intervals
    """Which of its elements each rank has."""
    work: WorkPolicy
    reducer: ReduceKind
    publisher: PublishKind
    placements: tuple[Placement, ...]
    tie: str = ""
    """Name of the tie, where the bucket is the copy of a weight that lives on another pipeline stage too."""

    @property
    def label(self) -> str:
        return f"bucket {self.index}"

    @property
    def numel(self) -> int:
        return self.shards.numel

    @property
    def world(self) -> int:
        """Ranks of its domain."""
        return self.shards.world

    @property
    def fqns(self) -> tuple[str, ...]:
        return tuple(placement.fqn for placement in self.placements)

    @cached_property
    def is_staged(self) -> bool:
        """Whether gathers land in staging memory, because some of its params are kept otherwise than they are sent."""
        return any(placement.recipe for placement in self.placements)

    @cached_property
    def _placement_of(self) -> dict[str, Placement]:
        return {placement.fqn: placement for placement in self.placements}

    def param_numel(self, fqn: str) -> int:
        return self._placement_of[fqn].numel

    def shard_numel(self, rank: int) -> int:
        return self.shards.stop(rank) - self.shards.start(rank)

    def shard_numels(self) -> tuple[int, ...]:
        """Elements of every rank's shard."""
        return self.shards.numels()

    def shard_part(self, rank: int) -> slice:
        """Where a rank's shard lies in the bucket."""
        return slice(self.shards.start(rank), self.shards.stop(rank))

    def spans(self, rank: int) -> tuple[Span, ...]:
        low, high = self.shards.start(rank), self.shards.stop(rank)
        found: list[Span] = []
        first = max(0, bisect_right(self.placements, low, key=lambda placement: placement.offset) - 1)
        for placement in self.placements[first:]:
            if placement.offset >= high:
                break
            found.extend(self._within(placement, low, high))
        return tuple(found)

    def spans_of(self, fqn: str, rank: int) -> Sequence[Span]:
        return self._within(self._placement_of[fqn], self.shards.start(rank), self.shards.stop(rank))

    @staticmethod
    def _within(placement: Placement, low: int, high: int) -> tuple[Span, ...]:
        start, stop = max(low, placement.offset), min(high, placement.offset + placement.numel)
        if start >= stop:
            return ()
        return (Span(placement.fqn, None, start - placement.offset, stop - placement.offset, start - low),)

    def copies(self, span: Span, rank: int) -> Ranks:
        return self.shards.copies(rank)

    def ranks_of(self, matrix: Matrix) -> Ranks:
        offset = self._placement_of[matrix.fqn].offset
        return self.shards.ranks(offset + matrix.flat_start, offset + matrix.flat_stop)

    def holders(self, matrix: Matrix) -> list[Held]:
        placement = self._placement_of[matrix.fqn]
        if len(matrix.grid) == 1:  # nearly always
            start = placement.offset + matrix.box.starts[0]
            return self.shards.held(start, start + matrix.rows * matrix.cols)
        if not self.shards.is_split:
            return [(0, self.world, matrix.numel, 1)]
        found = (
            (rank, rank + 1, matrix.numel_within(start - placement.offset, stop - placement.offset), 1)
            for rank in self.ranks_of(matrix)
            for start, stop in ((self.shards.start(rank), self.shards.stop(rank)),)
        )
        return [run for run in found if run[2]]

    def to_json(self) -> dict[str, object]:
        return {
            "label": self.label,
            "offset": self.offset,
            "numel": self.numel,
            "shards": self.shards.to_json(),
            "work": self.work,
            "tie": self.tie,
            "reducer": self.reducer,
            "publisher": self.publisher,
            "params": [
                [placement.fqn, placement.offset, placement.numel, *([placement.recipe] if placement.recipe else [])]
                for placement in self.placements
            ],
        }

    def offset_of(self, fqn: str) -> int:
        """Where a param begins in the bucket."""
        return self._placement_of[fqn].offset


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One contiguous allocation."""

    index: int
    key: BufferKey
    buckets: tuple[BucketPlan, ...]
    numel: int

    @property
    def has_grads(self) -> bool:
        """Whether there are gradients beside the weights, of the same length; or else params have their own."""
        return self.buckets[0].reducer != "none"

    @property
    def param_numel(self) -> int:
        return sum(placement.numel for bucket in self.buckets for placement in bucket.placements)

    @property
    def padding(self) -> int:
        """Elements that belong to no param."""
        return self.numel - self.param_numel


class BufferGroup(NamedTuple):
    """The params that will share a buffer, before it has a layout."""

    domain: str
    chunk: int
    family: Family
    dtype: DType

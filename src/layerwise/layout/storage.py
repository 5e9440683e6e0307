"""The storage plan: buffers cut into buckets, buckets into equal shards, shards into spans of params.

Params lie in backward order (reverse registration), each on a 64-element border, so that a bucket fills while backward
runs and its reduction can start early. In `flat` a shard border may fall anywhere inside a param: nothing is padded but
the end of each bucket.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from layerwise.dtypes import DType
from layerwise.routing.defaults import Family
from layerwise.routing.geometry import ceil_to
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamSpec, ParamTable

PARAM_ALIGNMENT = 64
"""Elements. 64 bf16 elements are 128 bytes: one GPU cache line, and what vectorised and quantising kernels ask of a
start."""

BUCKET_ALIGNMENT = 128
"""A bucket's length is a multiple of lcm(shards, 128), so that shards are equal and start on whole cache lines for the
usual counts."""

Layout = Literal["flat", "replicated"]
LAYOUTS: tuple[Layout, ...] = ("flat", "replicated")
"""The storage plans the engine executes."""


@dataclass(frozen=True, slots=True, order=True)
class BufferKey:
    """What params of one buffer have in common."""

    domain: str
    family: Family
    dtype: DType
    layout: Layout

    @property
    def label(self) -> str:
        return f"{self.domain}/{self.family}/{self.dtype}/{self.layout}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A param's place in its bucket, in elements."""

    fqn: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Span:
    """A param's interval inside one shard: elements [start, stop) of the flattened param, at `shard_offset` of the
    shard."""

    fqn: str
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


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """A slice of a buffer that is communicated together. Its collectives come from its own fields, never from a global
    flag."""

    index: int
    """Position in the order in which all buckets of the model are reduced."""
    buffer: int
    offset: int
    """Start in its buffer, in elements."""
    numel: int
    num_shards: int
    reducer: Literal["reduce_scatter", "all_reduce"]
    publisher: Literal["all_gather", "none"]
    placements: tuple[Placement, ...]

    @property
    def shard_numel(self) -> int:
        return self.numel // self.num_shards

    @property
    def label(self) -> str:
        return f"bucket {self.index}"

    def shard_of(self, rank: int) -> int:
        """Which shard a rank holds; where nothing is sharded every rank holds shard 0."""
        return rank if self.num_shards > 1 else 0

    def spans(self, shard: int) -> tuple[Span, ...]:
        """The params' intervals inside one shard, in bucket order."""
        low, high = shard * self.shard_numel, (shard + 1) * self.shard_numel
        offsets = [placement.offset for placement in self.placements]
        found = []
        for placement in self.placements[max(0, bisect_right(offsets, low) - 1) :]:
            if placement.offset >= high:
                break
            start, stop = max(low, placement.offset), min(high, placement.offset + placement.numel)
            if start < stop:
                found.append(Span(placement.fqn, start - placement.offset, stop - placement.offset, start - low))
        return tuple(found)

    def held(self, placement: Placement, shard: int) -> tuple[int, int]:
        """The interval [start, stop) of a param's elements that lies in a shard; empty where start >= stop."""
        start = shard * self.shard_numel - placement.offset
        return max(start, 0), min(start + self.shard_numel, placement.numel)

    def shards_holding(self, placement: Placement, start: int, stop: int) -> range:
        """The shards that hold any of elements [start, stop) of a param."""
        if start >= stop:
            return range(0)
        return range(
            (placement.offset + start) // self.shard_numel, (placement.offset + stop - 1) // self.shard_numel + 1
        )


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One contiguous allocation."""

    index: int
    key: BufferKey
    buckets: tuple[BucketPlan, ...]
    numel: int

    @property
    def param_numel(self) -> int:
        return sum(placement.numel for bucket in self.buckets for placement in bucket.placements)

    @property
    def padding(self) -> int:
        """Elements that belong to no param."""
        return self.numel - self.param_numel


def default_bucket_numel(world: int) -> int:
    """Megatron's rule: 40 M elements, or 1 M for every rank where there are more than 40, so that messages stay
    large."""
    return max(40_000_000, 1_000_000 * world)


def _cut(params: Iterable[ParamSpec], bucket_numel: int, num_shards: int) -> list[tuple[tuple[Placement, ...], int]]:
    """Placements and padded length of each bucket, for params already in backward order."""
    divisor = math.lcm(num_shards, BUCKET_ALIGNMENT)
    buckets: list[tuple[tuple[Placement, ...], int]] = []
    current: list[Placement] = []
    cursor = 0

    def close() -> None:
        nonlocal current, cursor
        if current:
            buckets.append((tuple(current), ceil_to(max(cursor, 1), divisor)))
            current, cursor = [], 0

    for param in params:
        # A weight tied across pipeline stages sits alone, so that its shard borders are the same on both stages
        # whatever lies around it.
        if param.tied_across_stages:
            close()
        offset = ceil_to(cursor, PARAM_ALIGNMENT)
        current.append(Placement(param.fqn, offset, param.numel))
        cursor = offset + param.numel
        if cursor >= bucket_numel or param.tied_across_stages:
            close()
    close()
    return buckets


def plan_storage(
    table: ParamTable,
    routes: Mapping[str, Route],
    *,
    world_by_domain: Mapping[str, int],
    layout: Layout,
    bucket_numel: int | None,
) -> tuple[BufferPlan, ...]:
    """Buffers and buckets of all trainable params."""
    members: dict[BufferKey, list[ParamSpec]] = {}
    backward_position: dict[str, int] = {}
    for position, param in enumerate(reversed(table.params)):
        family = routes[param.fqn].family
        if family != "frozen":
            members.setdefault(BufferKey(param.domain, family, param.dtype, layout), []).append(param)
            backward_position[param.fqn] = position
    cut_by_key = {}
    for key, params in members.items():
        world = world_by_domain[key.domain]
        num_shards = world if key.layout == "flat" else 1
        cut_by_key[key] = (num_shards, _cut(params, bucket_numel or default_bucket_numel(world), num_shards))
    return _number_buckets(cut_by_key, backward_position)


def _number_buckets(
    cut_by_key: Mapping[BufferKey, tuple[int, Sequence[tuple[tuple[Placement, ...], int]]]],
    backward_position: Mapping[str, int],
) -> tuple[BufferPlan, ...]:
    """Number all buckets by when their last gradient is due: the one order in which every rank reduces them."""
    due = [
        (max(backward_position[placement.fqn] for placement in placements), key, slot)
        for key, (_, buckets) in cut_by_key.items()
        for slot, (placements, _) in enumerate(buckets)
    ]
    index_by_slot = {(key, slot): index for index, (_, key, slot) in enumerate(sorted(due))}
    plans = []
    for buffer, key in enumerate(sorted(cut_by_key)):
        num_shards, cut = cut_by_key[key]
        buckets, offset = [], 0
        for slot, (placements, numel) in enumerate(cut):
            buckets.append(
                BucketPlan(
                    index=index_by_slot[key, slot],
                    buffer=buffer,
                    offset=offset,
                    numel=numel,
                    num_shards=num_shards,
                    reducer="reduce_scatter" if key.layout == "flat" else "all_reduce",
                    publisher="all_gather" if key.layout == "flat" else "none",
                    placements=placements,
                )
            )
            offset += numel
        plans.append(BufferPlan(index=buffer, key=key, buckets=tuple(buckets), numel=offset))
    return tuple(plans)

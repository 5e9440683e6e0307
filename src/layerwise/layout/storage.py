"""The storage plan: buffers cut into buckets, buckets into shards, shards into spans of params.

Params of a buffer are cut into buckets in backward order (reverse registration), so that a bucket fills while backward
runs and its reduction can start early. What a layout decides is how a bucket is cut into shards:

* `flat`: equal shards, borders anywhere. Nothing is padded but the end of each bucket.
* `padded`: equal shards, every param whole in one of them; `layout/packing.py` says which.
* `compact`: nothing padded. Every param has an owner, a bucket holds its owners' params one owner after the other, and
  shards are as uneven as that makes them.
* `replicated`: one shard, which every rank holds.

All of them are intervals of a bucket, one for each rank. The rest of the engine knows nothing else about them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from layerwise.config.layouts import FACTS_BY_LAYOUT, Layout, LayoutFacts, Packing, WorkPolicy
from layerwise.dtypes import DType
from layerwise.layout.alignment import BUCKET_ALIGNMENT, PARAM_ALIGNMENT
from layerwise.layout.cost import DEFAULT_COST, NewtonSchulz
from layerwise.layout.intervals import Copied, Equal, Intervals, Uneven
from layerwise.layout.ownership import owners_of
from layerwise.layout.packing import PackItem, megatron_cost, pack
from layerwise.layout.shards import Held, Ranks
from layerwise.layout.spans import Span
from layerwise.routing.defaults import Family
from layerwise.routing.geometry import ceil_to
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamSpec, ParamTable

Reducer = Literal["collective", "ordered", "ordered_bf16"]
REDUCERS: tuple[Reducer, ...] = ("collective", "ordered", "ordered_bf16")
"""How gradients are summed over ranks. collective: by reduce-scatter or all-reduce, whichever the layout needs.
ordered: all-to-all, then a sum in fp32 in the order of ranks, whose bits depend on neither layout nor algorithm.
ordered_bf16: the same with bf16 on the wire, rounded stochastically."""

ParamSync = Literal["gather", "broadcast"]
PARAM_SYNCS: tuple[ParamSync, ...] = ("gather", "broadcast")
"""How new weights reach all ranks. broadcast sends every span on its own: slow, obvious, for comparison."""

GRAD_SLOTS = 2
"""Full-size gradients that are kept per buffer where gradients are released once reduced: one fills while the one
before is on its way."""

STAGING_SLOTS = 2
"""Buckets whose gathers have staging memory of their own at once, where params are kept as codes and full gradients are
released: one is on its way while codes are made of the one before."""

ParamGather = Literal["quantized", "bf16"]
PARAM_GATHERS: tuple[ParamGather, ...] = ("quantized", "bf16")
"""What is kept of quantised params. quantized: codes, made of what every gather brings. bf16: what it brings, of which codes
are made whenever they are used."""


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


ReduceKind = Literal["reduce_scatter", "all_reduce", "ordered", "ordered_bf16", "none"]
"""What becomes of a bucket's gradient. none: there is none, since somebody else reduces the params' own."""
PublishKind = Literal["all_gather", "uneven_all_gather", "broadcast", "none"]


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


def default_bucket_numel(world: int) -> int:
    """Megatron's rule: 40 M elements, or 1 M for every rank where there are more than 40, so that messages stay
    large."""
    return max(40_000_000, 1_000_000 * world)


class _Cut(NamedTuple):
    """A bucket before it has a number."""

    placements: tuple[Placement, ...]
    shards: Intervals


def _members(params: Iterable[ParamSpec], bucket_numel: int, alignment: int) -> list[list[ParamSpec]]:
    """Params in backward order, bucket by bucket: one is closed when it is full.

    A weight tied across pipeline stages sits alone, so that its shard borders are the same on all of them whatever lies
    around it.
    """
    buckets: list[list[ParamSpec]] = [[]]
    filled = 0
    for param in params:
        if buckets[-1] and (filled >= bucket_numel or param.tie or buckets[-1][-1].tie):
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled = ceil_to(filled, alignment) + param.numel
    return [bucket for bucket in buckets if bucket]


def _place(params: Iterable[ParamSpec], alignment: int) -> tuple[tuple[Placement, ...], int]:
    """The params one after the other, and where the last one ends."""
    placements, cursor = [], 0
    for param in params:
        offset = ceil_to(cursor, alignment)
        placements.append(Placement(param.fqn, offset, param.numel))
        cursor = offset + param.numel
    return tuple(placements), cursor


def _cut_evenly(params: Sequence[ParamSpec], bucket_numel: int, world: int) -> list[_Cut]:
    divisor = math.lcm(world, BUCKET_ALIGNMENT)
    cuts = []
    for members in _members(params, bucket_numel, PARAM_ALIGNMENT):
        placements, end = _place(members, PARAM_ALIGNMENT)
        cuts.append(_Cut(placements, Equal(ceil_to(max(end, 1), divisor), world)))
    return cuts


def _copy_all(params: Sequence[ParamSpec], bucket_numel: int, world: int) -> list[_Cut]:
    return [_Cut(cut.placements, Copied(cut.shards.numel, world)) for cut in _cut_evenly(params, bucket_numel, world=1)]


def _cut_packed(
    params: Sequence[ParamSpec],
    bucket_numel: int,
    world: int,
    routes: Mapping[str, Route],
    packing: Packing,
    cost: NewtonSchulz,
) -> list[_Cut]:
    items = [
        PackItem(
            fqn=param.fqn,
            numel=param.numel,
            cost=sum(cost.flops(matrix.rows, matrix.cols) for matrix in routes[param.fqn].matrices),
            megatron_cost=sum(megatron_cost(matrix.rows, matrix.cols) for matrix in routes[param.fqn].matrices),
            alone=bool(param.tie),
        )
        for param in params
    ]
    return [
        _Cut(
            tuple(
                Placement(place.fqn, place.shard * bucket.shard_numel + place.offset, place.numel)
                for place in bucket.places
            ),
            Equal(bucket.shard_numel * world, world),
        )
        for bucket in pack(items, num_shards=world, bucket_numel=bucket_numel, packing=packing)
    ]


def _cut_by_owner(
    params: Sequence[ParamSpec], bucket_numel: int, world: int, owner_of: Mapping[str, int]
) -> list[_Cut]:
    cuts = []
    for members in _members(params, bucket_numel, alignment=1):
        # One owner's params lie side by side: what an owner publishes is one stretch, sent from where it lies.
        by_owner = sorted(members, key=lambda param: owner_of[param.fqn])
        placements, _ = _place(by_owner, alignment=1)
        loads = [0] * world
        for param in members:
            loads[owner_of[param.fqn]] += param.numel
        cuts.append(_Cut(placements, Uneven(tuple(accumulate(loads, initial=0)))))
    return cuts


class BufferGroup(NamedTuple):
    """The params that will share a buffer, before it has a layout."""

    domain: str
    chunk: int
    family: Family
    dtype: DType

    @classmethod
    def of(cls, key: BufferKey) -> BufferGroup:
        """What a buffer's key is without its layout."""
        return cls(key.domain, key.chunk, key.family, key.dtype)


def members_of(table: ParamTable, routes: Mapping[str, Route]) -> dict[BufferGroup, list[ParamSpec]]:
    """The trainable params of every buffer, in backward order."""
    members: dict[BufferGroup, list[ParamSpec]] = {}
    for param in reversed(table.params):
        family = routes[param.fqn].family
        if family != "frozen":
            members.setdefault(BufferGroup(param.domain, param.chunk, family, param.dtype), []).append(param)
    return members


def plan_storage(
    table: ParamTable,
    routes: Mapping[str, Route],
    *,
    world_by_domain: Mapping[str, int],
    layout: Layout | Mapping[BufferGroup, Layout],
    bucket_numel: int | None,
    reducer: Reducer | Literal["none"] = "collective",
    param_sync: ParamSync = "gather",
    param_gather: ParamGather = "quantized",
    cost: NewtonSchulz = DEFAULT_COST,
) -> tuple[BufferPlan, ...]:
    """Buffers and buckets of all trainable params. `layout` is for all buffers of matrices, or one for each buffer."""
    members = members_of(table, routes)
    layouts = _for_all(members, layout) if isinstance(layout, str) else layout
    keyed = {BufferKey(*group, layout=layouts[group]): params for group, params in members.items()}
    owner_of: dict[str, int] = {}
    for domain, world in world_by_domain.items():
        owned = [
            param
            for key, params in keyed.items()
            if key.domain == domain and key.facts.cut == "by owner"
            for param in params
        ]
        owner_of.update(owners_of(owned, world))
    cuts = {}
    for key, params in keyed.items():
        world = world_by_domain[key.domain]
        size = bucket_numel or default_bucket_numel(world)
        match key.facts.cut:
            case "evenly":
                cuts[key] = _cut_evenly(params, size, world)
            case "copied":
                cuts[key] = _copy_all(params, size, world)
            case "by owner":
                cuts[key] = _cut_by_owner(params, size, world, owner_of)
            case "packed":
                cuts[key] = _cut_packed(params, size, world, routes, key.facts.packing, cost)
    recipes = {param.fqn: param.recipe for param in table if param.recipe and param_gather == "quantized"}
    return _number_buckets(cuts, table, reducer, param_sync, recipes)


def _for_all(groups: Iterable[BufferGroup], layout: Layout) -> dict[BufferGroup, Layout]:
    """One layout for all matrices. What no matrix rule manages is stored in byte-level shards beside any of them."""
    beside = FACTS_BY_LAYOUT[layout].beside
    return {group: layout if group.family == "matrix" else beside for group in groups}


def _publisher_of(facts: LayoutFacts, param_sync: ParamSync) -> PublishKind:
    return "broadcast" if param_sync == "broadcast" and facts.publishes != "none" else facts.publishes


def _number_buckets(
    cuts: Mapping[BufferKey, Sequence[_Cut]],
    table: ParamTable,
    reducer: Reducer | Literal["none"],
    param_sync: ParamSync,
    recipes: Mapping[str, str],
) -> tuple[BufferPlan, ...]:
    """Number all buckets by when their last gradient is due: the one order in which every rank reduces them."""
    position = {param.fqn: position for position, param in enumerate(reversed(table.params))}
    tie_of = {param.fqn: param.tie for param in table if param.tie}
    due = [
        (max(position[placement.fqn] for placement in cut.placements), key, slot)
        for key, members in cuts.items()
        for slot, cut in enumerate(members)
    ]
    index_by_slot = {(key, slot): index for index, (_, key, slot) in enumerate(sorted(due))}
    plans = []
    for buffer, key in enumerate(sorted(cuts)):
        buckets, offset = [], 0
        for slot, cut in enumerate(cuts[key]):
            buckets.append(
                BucketPlan(
                    index=index_by_slot[key, slot],
                    buffer=buffer,
                    domain=key.domain,
                    offset=offset,
                    shards=cut.shards,
                    work=key.facts.work,
                    reducer=key.facts.reduces if reducer == "collective" else reducer,
                    publisher=_publisher_of(key.facts, param_sync),
                    placements=_with_recipes(cut.placements, recipes),
                    tie=tie_of.get(cut.placements[0].fqn, ""),
                )
            )
            offset += cut.shards.numel
        plans.append(BufferPlan(index=buffer, key=key, buckets=tuple(buckets), numel=offset))
    return tuple(plans)


def _with_recipes(placements: tuple[Placement, ...], recipes: Mapping[str, str]) -> tuple[Placement, ...]:
    if not recipes:
        return placements
    return tuple(replace(placement, recipe=recipes.get(placement.fqn, "")) for placement in placements)

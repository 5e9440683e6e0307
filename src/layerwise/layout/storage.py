"""The storage plan: buffers cut into buckets, buckets into shards, shards into spans of params.

Params of a buffer are cut into buckets in backward order (reverse registration), so that a bucket fills while backward
runs and its reduction can start early. What a layout decides is how a bucket is cut into shards:

* `flat`: equal shards, borders anywhere. Nothing is padded but the end of each bucket.
* `padded`: equal shards, every param whole in one of them, as Megatron-LM packs them; `layout/packing.py` says which.
* `compact`: nothing padded. Every param has an owner, a bucket holds its owners' params one owner after the other, and
  shards are as uneven as that makes them.
* `replicated`: one shard, which every rank holds.

All of them are intervals of a bucket, one for each rank. The rest of the engine knows nothing else about them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, NamedTuple

from layerwise.config.gone import gone_value
from layerwise.config.layouts import FACTS_BY_LAYOUT, LAYOUTS, Layout
from layerwise.errors import did_you_mean
from layerwise.layout.alignment import BUCKET_ALIGNMENT, PARAM_ALIGNMENT
from layerwise.layout.buckets import BucketPlan, BufferGroup, BufferKey, BufferPlan, Placement
from layerwise.layout.intervals import Copied, Equal, Intervals, Uneven
from layerwise.layout.ownership import owners_of
from layerwise.layout.packing import PackItem, megatron_cost, pack
from layerwise.routing.geometry import ceil_to
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamSpec, ParamTable

Reducer = Literal["collective", "ordered"]
REDUCERS: tuple[Reducer, ...] = ("collective", "ordered")
"""How gradients are summed over ranks. collective: by reduce-scatter or all-reduce, whichever the layout needs.
ordered: all-to-all, then a sum in fp32 in the order of ranks, whose bits depend on neither layout nor algorithm."""

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
) -> list[_Cut]:
    items = [
        PackItem(
            fqn=param.fqn,
            numel=param.numel,
            cost=sum(megatron_cost(matrix.rows, matrix.cols) for matrix in routes[param.fqn].matrices) or param.numel,
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
        for bucket in pack(items, num_shards=world, bucket_numel=bucket_numel)
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
    param_gather: ParamGather = "quantized",
) -> tuple[BufferPlan, ...]:
    """Buffers and buckets of all trainable params. `layout` is for all buffers of matrices, or one for each buffer."""
    members = members_of(table, routes)
    layouts = layouts_by_group(layout, members, ()) if isinstance(layout, str) else layout
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
                cuts[key] = _cut_packed(params, size, world, routes)
    recipes = {param.fqn: param.recipe for param in table if param.recipe and param_gather == "quantized"}
    return _number_buckets(cuts, table, reducer, recipes)


def resolve_layout(layout: object) -> Layout:
    """The name of a layout, or an error that says which there are."""
    if not isinstance(layout, str):
        raise TypeError(
            f"layout must be one of {', '.join(LAYOUTS)}, or a mapping from buffers to these, got {layout!r}."
        )
    for known in LAYOUTS:
        if layout == known:
            return known
    raise ValueError(f"layout {layout!r} is unknown." + (gone_value("layout", layout) or did_you_mean(layout, LAYOUTS)))


def layouts_by_group(
    layout: str | Mapping[str, str], groups: Iterable[BufferGroup], domains: Iterable[str]
) -> dict[BufferGroup, Layout]:
    """The layout of every buffer. A name is that of all matrices, and other params get the layout that belongs beside it. In a
    mapping "<domain>/matrix" comes before "matrix"; a buffer that it does not name is flat."""
    if isinstance(layout, str):
        name = resolve_layout(layout)
        return {group: name if group.family == "matrix" else FACTS_BY_LAYOUT[name].beside for group in groups}
    buffers = ("matrix", "other", *(f"{domain}/matrix" for domain in sorted(domains)))
    found: dict[str, Layout] = {}
    problems = []
    for key, value in layout.items():
        if key not in buffers:
            problems.append(f"{key!r} is no buffer, expected one of {', '.join(buffers)}.")
        try:
            found[key] = resolve_layout(value)
        except (TypeError, ValueError) as error:
            problems.append(f"{key!r}: {error}")
    if problems:
        raise ValueError(f"layout={dict(layout)}: {' '.join(problems)}")
    usual: Layout = "flat"
    return {group: found.get(f"{group.domain}/{group.family}", found.get(group.family, usual)) for group in groups}


def _number_buckets(
    cuts: Mapping[BufferKey, Sequence[_Cut]],
    table: ParamTable,
    reducer: Reducer | Literal["none"],
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
                    publisher=key.facts.publishes,
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

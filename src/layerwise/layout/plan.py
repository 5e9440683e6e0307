"""The plan: storage and work together, hashed, printed, compared across ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

from layerwise.dtypes import DType
from layerwise.layout.blocks import count_blocks, in_blocks
from layerwise.layout.boxes import shards_of_params
from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.combinations import refuse_combinations
from layerwise.layout.meshes import Placed
from layerwise.layout.options import DEFAULT_OPTIONS, Options
from layerwise.layout.reduce_groups import ReduceGroup, reduce_groups
from layerwise.layout.schedule import CommSchedule, build_schedule
from layerwise.layout.shards import OwnShards, ShardPlan
from layerwise.layout.storage import layouts_by_group, members_of, plan_storage
from layerwise.layout.work import WorkPlan, imbalance_of, plan_work, spread
from layerwise.routing.evidence import route_by
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamTable
from layerwise.units import format_count, format_nbytes


@dataclass(frozen=True)
class Plan:
    """Everything that was decided about a model before the first tensor was allocated."""

    table: ParamTable
    routes: Mapping[str, Route]
    world: int
    """Ranks that hold copies of the dense params: gradients are averaged over so many."""
    world_by_domain: Mapping[str, int]
    ranks: int
    """All ranks, those of other pipeline stages included."""
    options: Options
    """What was asked for; every buffer's key has the layout that it got."""
    stages_by_tie: Mapping[str, int]
    """How many pipeline stages hold a copy of each tied weight."""
    buffers: tuple[BufferPlan, ...]
    works: tuple[WorkPlan, ...]
    """One work plan per domain that has matrices."""
    own: tuple[OwnShards, ...] = ()
    """Shards in the params' own memory; there is no buffer then."""

    @property
    def grad_dtype(self) -> DType:
        """What gradients are accumulated and reduced in."""
        return self.options.grad_dtype

    @cached_property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """All buckets in the order in which they are reduced."""
        return tuple(
            sorted((bucket for buffer in self.buffers for bucket in buffer.buckets), key=lambda bucket: bucket.index)
        )

    @cached_property
    def shards(self) -> tuple[ShardPlan, ...]:
        """Everything that is updated, by index."""
        return (*self.buckets, *self.own)

    @cached_property
    def copied_in_parts(self) -> tuple[OwnShards, ...]:
        """Of the shards in the params' own memory, those of which ranks hold several parts, and several ranks each: neither
        everybody has the same nor everybody something of his own. Experts on several meshes are parts too."""
        return tuple(shard for shard in self.own if shard.has_copies and (shard.is_parted or shard.world < self.world))

    @property
    def is_split(self) -> bool:
        """Whether ranks hold different parts of anything."""
        return any(bucket.shards.is_split for bucket in self.buckets)

    @cached_property
    def reduce_groups(self) -> tuple[ReduceGroup, ...]:
        """Which buckets are reduced together, in order."""
        return reduce_groups(self.buffers)

    @cached_property
    def bucket_of(self) -> Mapping[str, int]:
        """The bucket of every trainable param."""
        return {placement.fqn: bucket.index for bucket in self.buckets for placement in bucket.placements}

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """FLOPs of Newton-Schulz of every rank of the dense domain, over all domains."""
        loads = [0] * self.world
        for work in self.works:
            loads = list(map(add, loads, spread(work.loads, self.world)))
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank over the mean; 1.0 is perfect."""
        return imbalance_of(self.loads)

    def domain_of(self, fqn: str) -> str:
        """The domain of a trainable param."""
        return self.table.find(fqn).domain

    @property
    def layout_label(self) -> str:
        """The layout in a word or two; of a mapping the layouts of matrices."""
        if self.options.memory == "params":
            return "as params are"
        if isinstance(self.options.layout, str):
            return self.options.layout
        return " + ".join(
            sorted({buffer.key.layout for buffer in self.buffers if buffer.key.family == "matrix"} or {"flat"})
        )

    def leases_grads(self, buffer: BufferPlan) -> bool:
        """Whether full gradients of a buffer live only until they are reduced."""
        return self.options.shard_grads and buffer.buckets[0].shards.is_split

    def route(self, name: str) -> Route:
        """Where the param of that name (or alias) goes, and why."""
        return self.routes[self.table.find(name).fqn]

    def schedule(
        self,
        *,
        stats_numel: int,
        wire_dtypes: Mapping[tuple[str, int], DType] | None = None,
        exchange: bool = True,
        logits_numel: int = 0,
    ) -> CommSchedule:
        """The collectives of one step. Every cohort travels in bf16 unless `wire_dtypes` says otherwise; without
        `exchange` (matrices under an element-wise rule) none does. `logits_numel` attention heads are clipped."""
        works = self.works if exchange else ()
        chosen = {(work.domain, cohort): DType.BF16 for work in works for cohort in range(work.num_cohorts)}
        return build_schedule(
            self.buffers,
            self.shards,
            works,
            ranks=self.ranks,
            stages_by_tie=self.stages_by_tie,
            grad_dtype=self.grad_dtype,
            stats_numel=stats_numel,
            wire_dtypes={**chosen, **(wire_dtypes or {})},
            logits_numel=logits_numel,
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, the same on every rank and whatever order params were found in."""
        return {
            "world": self.world,
            "worlds": dict(self.world_by_domain),
            "ranks": self.ranks,
            "grad_dtype": str(self.grad_dtype),
            "shard_grads": self.options.shard_grads,
            "memory": self.options.memory,
            "ties": dict(self.stages_by_tie),
            "routes": {
                param.fqn: {
                    "shape": list(param.shape),
                    "family": self.routes[param.fqn].family,
                    "options": {name: repr(value) for name, value in self.routes[param.fqn].options},
                    "matrices": [[matrix.rows, matrix.cols] for matrix in self.routes[param.fqn].matrices],
                }
                for param in sorted(self.table, key=lambda param: param.fqn)
            },
            "buckets": [
                {
                    "layout": self.buffers[bucket.buffer].key.layout,
                    "buffer": self.buffers[bucket.buffer].key.label,
                    **bucket.to_json(),
                }
                for bucket in self.buckets
            ],
            "own": [shard.to_json() for shard in self.own],
            "work": [
                {
                    "label": f"work of domain {work.domain}",
                    "items": [
                        [item.matrix.fqn, item.matrix.index, repr(item.homes), item.cohort] for item in work.items
                    ],
                }
                for work in self.works
            ],
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan: equal on all ranks, or they may not communicate."""
        return hashlib.sha256(json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True).encode()).hexdigest()

    @property
    def padding_ratio(self) -> float:
        """Padding elements over param elements."""
        numel = sum(buffer.param_numel for buffer in self.buffers)
        return sum(buffer.padding for buffer in self.buffers) / numel if numel else 0.0

    @property
    def headline(self) -> str:
        """The plan in a few words, on one line."""
        count = [route.family for route in self.routes.values()].count
        matrices = sum(len(route.matrices) for route in self.routes.values())
        frozen = f", {count('frozen')} frozen" if count("frozen") else ""
        counts = f"{matrices} matrices, {count('other')} other params{frozen}"
        return f"{self.layout_label}, {self.ranks} rank{'s' if self.ranks != 1 else ''}, {counts}, digest {self.digest[:12]}"

    def __repr__(self) -> str:
        return f"Plan({self.headline})"

    def describe(self) -> str:
        """The plan for people: buffers, buckets, homes and balance."""
        lines = [
            f"plan {self.digest[:12]}: {len(self.table)} params over {self.world} rank{'s' if self.world != 1 else ''}, layout {self.layout_label}, "
            f"padding {100 * self.padding_ratio:.3f} %"
        ]
        for buffer in self.buffers:
            sizes = sorted(bucket.numel for bucket in buffer.buckets)
            lines.append(
                f"  buffer {buffer.key.label}: {format_count(buffer.param_numel)} elements, "
                f"{format_nbytes(buffer.numel * buffer.key.dtype.itemsize)}, "
                f"{len(sizes)} bucket{'s' if len(sizes) != 1 else ''} of {format_count(sizes[0])} to {format_count(sizes[-1])}"
            )
        for work in self.works:
            idle = sum(1 for load in work.loads if load == 0)
            lines.append(
                f"  work of domain {work.domain}: {len(work.items)} matrices in {work.num_cohorts} "
                f"cohort{'s' if work.num_cohorts != 1 else ''}, imbalance {work.imbalance:.2f}"
                + (f", {idle} of {work.world} ranks have no matrix" if idle else "")
            )
        blocks = count_blocks(self.routes.values())
        if blocks:
            lines.append(
                f"  {blocks} of these matrices are blocks of larger ones that tensor parallelism has cut (tp_mode='blockwise'): their "
                "update is another one than that of whole matrices"
            )
        if len(self.works) > 1:
            lines.append(f"  work of all domains: imbalance {self.imbalance:.2f}")
        return "\n".join(lines)


def make_plan(
    table: ParamTable,
    options: Options = DEFAULT_OPTIONS,
    *,
    world: int,
    worlds: Mapping[str, int] | None = None,
    ranks: int | None = None,
    stages_by_tie: Mapping[str, int] | None = None,
    placed: Mapping[str, Placed] | None = None,
) -> Plan:
    """Route, lay out and assign: the whole plan from a table of params.

    `world` ranks hold the dense params; `worlds` says how many hold those of other domains, if not as many; `ranks` is
    all of them, other pipeline stages included. A tied weight is on two stages unless `stages_by_tie` says otherwise.
    `placed` says how params that stay in memory of their own are cut; those that it does not name are whole everywhere.

    >>> from layerwise.routing.spec import table_of
    >>> make_plan(table_of([("a.weight", (64, 64)), ("b.weight", (64, 64))]), world=2).works[0].imbalance
    1.0
    """
    (plan,) = _plans(table, [options], world, worlds, ranks, stages_by_tie, placed)
    return plan


def compare_plans(
    table: ParamTable,
    layouts: Sequence[str],
    options: Options = DEFAULT_OPTIONS,
    *,
    world: int,
    worlds: Mapping[str, int] | None = None,
    ranks: int | None = None,
    stages_by_tie: Mapping[str, int] | None = None,
    placed: Mapping[str, Placed] | None = None,
) -> dict[str, Plan]:
    """The plans of several layouts in place of the one in `options`. Params are routed once."""
    asked = [replace(options, layout=layout) for layout in layouts]
    return dict(zip(layouts, _plans(table, asked, world, worlds, ranks, stages_by_tie, placed), strict=True))


def _plans(
    table: ParamTable,
    asked: Sequence[Options],
    world: int,
    worlds: Mapping[str, int] | None,
    ranks: int | None,
    stages_by_tie: Mapping[str, int] | None,
    placed: Mapping[str, Placed] | None,
) -> list[Plan]:
    """Plans of one table under options that differ in the layout alone."""
    options = asked[0]
    world_by_domain = _worlds(table, world, worlds or {})
    routes = route_by(
        table, options.rules, strict=options.strict, evidence=options.evidence, elsewhere=options.rules_elsewhere
    )
    routes = in_blocks(table, routes, placed or {}, options.tp_mode)
    # Other pipeline stages may have domains without params here.
    domains = {*world_by_domain, *((worlds or {}) if ranks not in (None, world) else {})}
    plans = []
    for options in asked:
        buffers: tuple[BufferPlan, ...] = ()
        own: tuple[OwnShards, ...] = ()
        if options.memory == "params":  # params lie as they lie, whatever layout is asked for
            own = shards_of_params(
                table, routes, world_by_domain, placed or {}, cost=options.cost, hardware=options.hardware
            )
        else:
            buffers = plan_storage(
                table,
                routes,
                world_by_domain=world_by_domain,
                layout=layouts_by_group(options.layout, members_of(table, routes), domains),
                bucket_numel=options.bucket_numel,
                reducer=options.reducer if options.gradients == "buckets" else "none",
                param_gather=options.param_gather,
            )
        shards: list[ShardPlan] = [*own, *(bucket for buffer in buffers for bucket in buffer.buckets)]
        works = tuple(
            work
            for domain, size in sorted(world_by_domain.items())
            if (
                work := plan_work(
                    shards,
                    routes,
                    domain=domain,
                    world=size,
                    cohort_numel=options.cohort_numel,
                    cost=options.cost,
                )
            ).items
        )
        plan = Plan(
            table=table,
            routes=routes,
            world=world,
            world_by_domain=world_by_domain,
            ranks=world if ranks is None else ranks,
            options=options,
            stages_by_tie={**dict.fromkeys((param.tie for param in table if param.tie), 2), **(stages_by_tie or {})},
            buffers=buffers,
            works=works,
            own=own,
        )
        refuse_combinations(plan.options, plan.buffers, world_by_domain, plan.stages_by_tie)
        plans.append(plan)
    return plans


def _worlds(table: ParamTable, world: int, worlds: Mapping[str, int]) -> dict[str, int]:
    """The number of ranks of every domain that has params."""
    for name, size in {"world": world, **{f"world of domain {name!r}": size for name, size in worlds.items()}}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be at least 1, got {size!r}.")
    found = {domain: worlds.get(domain, world) for domain in sorted({param.domain for param in table})}
    for domain, size in found.items():
        if world % size:
            raise ValueError(
                f"domain {domain!r} has {size} ranks, the dense params have {world}: expected a number that divides theirs, "
                "so that every rank holds an equal part of it."
            )
    return found

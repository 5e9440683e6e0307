"""The plan: storage and work together, hashed, printed, compared across ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from layerwise.dtypes import DType
from layerwise.errors import did_you_mean
from layerwise.layout.schedule import CommSchedule, build_schedule
from layerwise.layout.storage import LAYOUTS, BucketPlan, BufferPlan, Layout, plan_storage
from layerwise.layout.work import DEFAULT_COHORT_NUMEL, WorkPlan, plan_work
from layerwise.routing.rules import Route, RouteRule, route_params
from layerwise.routing.spec import ParamTable
from layerwise.units import format_count, format_nbytes


@dataclass(frozen=True)
class Plan:
    """Everything that was decided about a model before the first tensor was allocated."""

    table: ParamTable
    routes: Mapping[str, Route]
    world: int
    layout: Layout
    grad_dtype: DType
    buffers: tuple[BufferPlan, ...]
    works: tuple[WorkPlan, ...]
    """One work plan per domain that has matrices."""

    @cached_property
    def buckets(self) -> tuple[BucketPlan, ...]:
        """All buckets in the order in which they are reduced."""
        return tuple(
            sorted((bucket for buffer in self.buffers for bucket in buffer.buckets), key=lambda bucket: bucket.index)
        )

    @cached_property
    def bucket_of(self) -> Mapping[str, int]:
        """The bucket of every trainable param."""
        return {placement.fqn: bucket.index for bucket in self.buckets for placement in bucket.placements}

    def route(self, name: str) -> Route:
        """Where the param of that name (or alias) goes, and why."""
        return self.routes[self.table.find(name).fqn]

    def schedule(
        self,
        *,
        stats_numel: int,
        wire_dtypes: Mapping[tuple[str, int], DType] | None = None,
        exchange: bool = True,
    ) -> CommSchedule:
        """The collectives of one step. Every cohort travels in bf16 unless `wire_dtypes` says otherwise; without
        `exchange` (matrices under an element-wise rule) none does."""
        works = self.works if exchange else ()
        chosen = {(work.domain, cohort): DType.BF16 for work in works for cohort in range(work.num_cohorts)}
        return build_schedule(
            self.buffers,
            works,
            world=self.world,
            grad_dtype=self.grad_dtype,
            stats_numel=stats_numel,
            wire_dtypes={**chosen, **(wire_dtypes or {})},
        )

    def to_json(self) -> dict[str, object]:
        """The plan as plain data, the same on every rank and whatever order params were found in."""
        return {
            "world": self.world,
            "layout": self.layout,
            "grad_dtype": str(self.grad_dtype),
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
                    "label": f"bucket {bucket.index}",
                    "buffer": self.buffers[bucket.buffer].key.label,
                    "offset": bucket.offset,
                    "numel": bucket.numel,
                    "num_shards": bucket.num_shards,
                    "reducer": bucket.reducer,
                    "publisher": bucket.publisher,
                    "params": [[placement.fqn, placement.offset, placement.numel] for placement in bucket.placements],
                }
                for bucket in self.buckets
            ],
            "work": [
                {
                    "label": f"work of domain {work.domain}",
                    "items": [[item.matrix.fqn, item.matrix.index, item.home, item.cohort] for item in work.items],
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

    def describe(self) -> str:
        """The plan for people: buffers, buckets, homes and balance."""
        lines = [
            f"plan {self.digest[:12]}: {len(self.table)} params over {self.world} rank{'s' if self.world != 1 else ''}, layout {self.layout}, "
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
        return "\n".join(lines)


def resolve_layout(layout: object) -> Layout:
    """`auto` to a layout, and an unknown name to an error."""
    if not isinstance(layout, str):
        raise TypeError(f"layout must be one of auto, {', '.join(LAYOUTS)}, got {layout!r}.")
    if layout == "auto":
        return "flat"
    for known in LAYOUTS:
        if layout == known:
            return known
    if layout in ("padded", "compact"):
        raise NotImplementedError(
            f"layout {layout!r} is not built yet. Use 'flat', which needs no padding and reduces by scatter."
        )
    raise ValueError(f"layout {layout!r} is unknown." + did_you_mean(layout, ("auto", *LAYOUTS)))


def make_plan(
    table: ParamTable,
    *,
    world: int,
    layout: str = "auto",
    rules: Sequence[RouteRule] | None = None,
    strict: bool = False,
    grad_dtype: DType = DType.FP32,
    bucket_numel: int | None = None,
    cohort_numel: int = DEFAULT_COHORT_NUMEL,
) -> Plan:
    """Route, lay out and assign: the whole plan from a table of params.

    >>> from layerwise.routing.spec import table_of
    >>> make_plan(table_of([("a.weight", (64, 64)), ("b.weight", (64, 64))]), world=2).works[0].imbalance
    1.0
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}.")
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(f"the bucket size must be at least one element, got {bucket_numel}.")
    if cohort_numel < 1:
        raise ValueError(f"the cohort size must be at least one element, got {cohort_numel}.")
    resolved = resolve_layout(layout)
    routes = route_params(table, rules, strict=strict)
    domains = sorted({param.domain for param in table})
    world_by_domain = dict.fromkeys(domains, world)
    buffers = plan_storage(table, routes, world_by_domain=world_by_domain, layout=resolved, bucket_numel=bucket_numel)
    works = tuple(
        work
        for domain in domains
        if (
            work := plan_work(buffers, routes, domain=domain, world=world_by_domain[domain], cohort_numel=cohort_numel)
        ).items
    )
    return Plan(
        table=table, routes=routes, world=world, layout=resolved, grad_dtype=grad_dtype, buffers=buffers, works=works
    )


def first_difference(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """Where two plans differ first, in words: the bucket (or param) and the field."""
    return _difference(mine, theirs, "plan") or "the plans are equal"


def _difference(mine: object, theirs: object, where: str) -> str | None:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        label = mine.get("label")
        here = label if isinstance(label, str) else where
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if key not in mine or key not in theirs:
                return f"{here}: {key!r} is only on one of them"
            found = _difference(mine[key], theirs[key], f"{here}, {key}")
            if found:
                return found
        return None
    if isinstance(mine, list) and isinstance(theirs, list):
        for position, (left, right) in enumerate(zip(mine, theirs, strict=False)):
            found = _difference(left, right, f"{where}[{position}]")
            if found:
                return found
        return None if len(mine) == len(theirs) else f"{where}: {len(mine)} entries against {len(theirs)}"
    return None if mine == theirs else f"{where}: {mine!r} against {theirs!r}"

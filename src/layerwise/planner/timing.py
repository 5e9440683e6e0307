"""What a step will take beside forward and backward: Newton-Schulz on the busiest rank, and bytes on the wire.

Times are FLOPs and bytes over what the hardware can do at best. They are for comparing layouts: `planner/choice.py` compares
by the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from layerwise.config.rules import Muon
from layerwise.dtypes import DType
from layerwise.layout.buckets import BucketPlan
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommOp, CommSchedule, Kind, Phase, wire_nbytes
from layerwise.layout.work import spread
from layerwise.planner.rules import Rules

PHASES: tuple[Phase, ...] = ("reduce", "tie", "stats", "exchange", "return", "publish")
"""The phases that communicate, in order."""

KINDS: tuple[Kind, ...] = ("reduce_scatter", "all_reduce", "all_to_all", "all_gather", "uneven_all_gather")
"""Kinds of collectives, about in the order in which a step has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Newton-Schulz of one step."""

    ms: float
    """On the busiest rank."""
    imbalance: float
    """FLOPs of the busiest rank over the mean; 1.0 is perfect."""
    idle_ranks: int
    """Ranks that are home to no matrix."""

    def to_json(self) -> dict[str, float]:
        return {"ms": self.ms, "imbalance": self.imbalance, "idle_ranks": self.idle_ranks}


def work_of(plan: Plan, rules: Rules) -> Work:
    """Estimate the time of Newton-Schulz on the busiest rank, by the cost model that balances compute ranks. `steps` of single
    route rules is left aside."""
    if not isinstance(rules.matrix, Muon) or not any(plan.loads):
        return Work(ms=0.0, imbalance=1.0, idle_ranks=0)
    return Work(
        ms=plan.options.hardware.ns_ms(max(plan.loads)),
        imbalance=plan.imbalance,
        idle_ranks=plan.loads.count(0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the rank that sends most sends in one step, and how long its link is busy with it."""

    rank: int
    nbytes_by_kind: Mapping[str, int]
    """Per kind of collective."""
    nbytes: int
    ms_by_phase: Mapping[Phase, float]
    ms: float
    waited_ms: float
    """What a step waits for: the exchange, the gather, and of the reduction what is left when backward ends."""

    def to_json(self) -> dict[str, object]:
        nbytes: dict[str, int] = {**self.nbytes_by_kind}
        ms = {str(phase): taken for phase, taken in self.ms_by_phase.items()}
        return {
            "rank": self.rank,
            "bytes": {**nbytes, "total": self.nbytes},
            "ms": {**ms, "total": self.ms, "waited": self.waited_ms},
        }


def traffic_of(plan: Plan, schedule: CommSchedule) -> Traffic:
    """The bytes of a plan's schedule, and times."""
    reductions = [op for op in schedule.ops if op.phase == "reduce"]
    after = sent_by_rank((op for op in schedule.ops if op.phase != "reduce"), plan.world)
    totals = list(map(add, after, sent_by_rank(reductions, plan.world)))
    nbytes = max(totals)
    rank = totals.index(nbytes)
    numbers = numbers_of(plan, rank)
    by_phase: dict[Phase, int] = {}
    for op in schedule.ops:
        by_phase[op.phase] = by_phase.get(op.phase, 0) + op.nbytes(numbers.get(op.domain, 0))
    waited = max(after) + exposed_nbytes(plan.buckets, reductions, plan.grad_dtype)
    per_byte = 1 / plan.options.hardware.link_gb_s / 1e6
    return Traffic(
        rank=rank,
        nbytes_by_kind=schedule.bytes_by_collective(numbers),
        nbytes=nbytes,
        ms_by_phase={phase: by_phase[phase] * per_byte for phase in PHASES if phase in by_phase},
        ms=nbytes * per_byte,
        waited_ms=waited * per_byte,
    )


def numbers_of(plan: Plan, rank: int) -> dict[str, int]:
    """The number that a rank of the dense domain has in each domain, with ranks arranged as `sent_by_rank` says."""
    return {domain: rank // (plan.world // size) for domain, size in plan.world_by_domain.items()}


def sent_by_rank(ops: Iterable[CommOp], world: int) -> list[int]:
    """Bytes that each rank sends in these collectives. Ranks of a smaller domain are neighbours: of E groups of experts
    over N ranks, rank r holds number r % E and is rank r // E of those that hold it."""
    everywhere = 0
    numels: dict[tuple[int, int], list[int]] = {}  # by the domain's size and bytes per element
    nbytes: dict[int, list[int]] = {}
    for op in ops:
        size = len(op.sent)
        if not size:
            everywhere += op.nbytes(0)
        elif op.kind in ("all_to_all", "uneven_all_gather"):
            # Thousands of ranks in hundreds of collectives: added up as elements, all ranks at once.
            so_far = numels.get((size, op.dtype.itemsize))
            numels[size, op.dtype.itemsize] = list(op.sent) if so_far is None else list(map(add, so_far, op.sent))
        else:
            nbytes[size] = list(map(add, nbytes.get(size, [0] * size), map(op.nbytes, range(size))))
    for (size, itemsize), found in numels.items():
        nbytes[size] = list(map(add, nbytes.get(size, [0] * size), (numel * itemsize for numel in found)))
    totals = [everywhere] * world
    for found in nbytes.values():
        totals = list(map(add, totals, spread(found, world)))
    return totals


def exposed_nbytes(buckets: Sequence[BucketPlan], reductions: Sequence[CommOp], grad_dtype: DType) -> int:
    """Bytes that are still to be reduced when backward ends, if backward makes gradients as fast as the wire reduces
    them."""
    ready = wire_free = 0
    reduced = [bucket for bucket in buckets if bucket.reducer != "none"]
    for bucket, op in zip(reduced, reductions, strict=True):
        full = sum(placement.numel for placement in bucket.placements) * grad_dtype.itemsize
        ready += wire_nbytes("reduce_scatter", full, bucket.world)
        wire_free = max(ready, wire_free) + max(map(op.nbytes, range(bucket.world if op.sent else 1)))
    return wire_free - ready

"""What a step will take beside forward and backward: Newton-Schulz on the busiest rank, and bytes on the wire.

Times are FLOPs and bytes over what the hardware can do at best. Latency, overlap and kernels are not in them: they are
for comparing layouts, and `layout/choice.py` compares by the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add

from layerwise.config.rules import Muon
from layerwise.layout.choice import Hardware, newton_schulz_loads, sent_by_rank, spread
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommOp, CommSchedule, Kind, Phase
from layerwise.planner.rules import Rules

PHASES: tuple[Phase, ...] = ("reduce", "tie", "stats", "exchange", "return", "publish")
"""The phases that communicate, in order."""

KINDS: tuple[Kind, ...] = (
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_gather",
    "uneven_all_gather",
    "broadcast",
)
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


def work_of(plan: Plan, rules: Rules, hardware: Hardware) -> Work:
    """What orthogonalising takes. Options of single route rules (`steps`, `method`) are not looked at."""
    loads = [0] * plan.world
    if isinstance(rules.matrix, Muon):
        for work in plan.works:
            found = newton_schulz_loads(work, rules.matrix.steps, rules.matrix.method)
            loads = list(map(add, loads, spread(found, plan.world)))
    return Work(
        ms=max(loads) / hardware.ns_tflops / 1e9,
        imbalance=max(loads) * plan.world / sum(loads) if any(loads) else 1.0,
        idle_ranks=loads.count(0) if any(loads) else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What the rank that sends most sends in one step."""

    rank: int
    nbytes_by_kind: Mapping[str, int]
    """Per kind of collective."""
    nbytes: int
    ms_by_phase: Mapping[Phase, float]
    ms: float

    def to_json(self) -> dict[str, object]:
        nbytes: dict[str, int] = {**self.nbytes_by_kind}
        ms = {str(phase): taken for phase, taken in self.ms_by_phase.items()}
        return {"rank": self.rank, "bytes": {**nbytes, "total": self.nbytes}, "ms": {**ms, "total": self.ms}}


def traffic_of(schedule: CommSchedule, world: int, hardware: Hardware) -> Traffic:
    """The bytes of a schedule and how long a link is busy with them."""
    totals = sent_by_rank(schedule.ops, world)
    nbytes = max(totals)
    rank = totals.index(nbytes)
    by_kind: dict[str, int] = {}
    by_phase: dict[Phase, int] = {}
    for op in schedule.ops:
        sent = nbytes_of(op, rank, world)
        by_kind[op.kind] = by_kind.get(op.kind, 0) + sent
        by_phase[op.phase] = by_phase.get(op.phase, 0) + sent
    return Traffic(
        rank=rank,
        nbytes_by_kind=by_kind,
        nbytes=nbytes,
        ms_by_phase={phase: by_phase[phase] / hardware.link_gb_s / 1e6 for phase in PHASES if phase in by_phase},
        ms=nbytes / hardware.link_gb_s / 1e6,
    )


def nbytes_of(op: CommOp, rank: int, world: int) -> int:
    """What a rank of the dense domain sends in a collective, be it of a smaller domain."""
    return op.nbytes(rank // (world // len(op.sent)) if op.sent else rank)

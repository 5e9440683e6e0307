"""Which layout is best for the matrices of a domain, and why, by a cost model that can be printed.

A layout costs a step the time for which it waits for the wire, the Newton-Schulz of its busiest rank, and memory. The
wire is waited for in the exchange, in the gather, and for what is left to reduce when backward ends: reductions of
buckets that were full before hide behind backward, which is taken to make gradients as fast as the wire reduces them.
The quickest layout is best; what is nearly as quick counts as equal, and then memory decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import add

from layerwise.config.layouts import Layout
from layerwise.dtypes import DType
from layerwise.layout.buckets import BufferPlan
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import build_schedule
from layerwise.planner.timing import exposed_nbytes, sent_by_rank
from layerwise.units import format_nbytes

CANDIDATES: tuple[Layout, ...] = ("flat", "padded", "compact")
"""Layouts of which one can be best, the simplest first. `replicated` keeps N times the optimizer state."""

_AS_QUICK = 1.02
"""Times within 2 % are equal: the model is not more exact than that."""
_AS_LEAN = 1.1
"""A layout that needs over 10 % more memory than the leanest is never best, however quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Cost of one layout for the matrices of one domain, on the rank for which it is worst."""

    layout: Layout
    wire_nbytes: int
    """Bytes sent per step: reduce, exchange, return, publish."""
    exposed_nbytes: int
    """Of the reduction, what is left when backward ends."""
    memory_nbytes: int
    """Params, gradients, masters and momentum."""
    imbalance: float
    """FLOPs of the busiest rank over the mean."""
    wire_ms: float
    """Time for which a step waits for the wire."""
    ns_ms: float
    """Newton-Schulz of the busiest rank."""

    @property
    def total_ms(self) -> float:
        return self.wire_ms + self.ns_ms

    def describe(self) -> str:
        return (
            f"{self.layout} {self.total_ms:.1f} ms (wire {self.wire_ms:.1f}, Newton-Schulz {self.ns_ms:.1f}), "
            f"{format_nbytes(self.memory_nbytes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best layout for the matrices of one domain, and why."""

    buffer: str
    """Name of these buffers in a `layout` mapping, as "dense/matrix"."""
    layout: Layout
    reason: str
    scores: tuple[Score, ...]


def best_layouts(plans: Mapping[str, Plan]) -> tuple[Choice, ...]:
    """The best layout for every domain that has matrices on two or more ranks, out of plans of one model by layout. Empty
    where fewer than two candidates are among them."""
    candidates = {layout: plans[layout] for layout in CANDIDATES if layout in plans}
    if len(candidates) < 2:
        return ()
    choices = []
    for work in next(iter(candidates.values())).works:
        if work.world > 1:
            scores = tuple(score(layout, plan, work.domain) for layout, plan in candidates.items())
            chosen, reason = pick(scores)
            choices.append(Choice(buffer=f"{work.domain}/matrix", layout=chosen.layout, reason=reason, scores=scores))
    return tuple(choices)


def pick(scores: Sequence[Score]) -> tuple[Score, str]:
    """The best score, and why."""
    leanest = min(score.memory_nbytes for score in scores)
    lean = [score for score in scores if score.memory_nbytes <= _AS_LEAN * leanest]
    quickest = min(score.total_ms for score in lean)
    equals = [score for score in lean if score.total_ms <= _AS_QUICK * quickest]
    chosen = min(equals, key=lambda score: score.memory_nbytes)
    others = ", ".join(score.describe() for score in scores if score is not chosen)
    if len(equals) > 1:
        why = "as quick as any and leanest"
    elif len(lean) < len(scores) and any(score.total_ms < chosen.total_ms for score in scores):
        why = "the quickest that does not waste memory"
    else:
        why = "the quickest"
    return chosen, f"{why}: {chosen.describe()}; against {others}" if others else why


def score(layout: Layout, plan: Plan, domain: str) -> Score:
    """The cost of one layout for the matrices of a domain."""
    buffers = [buffer for buffer in plan.buffers if (buffer.key.domain, buffer.key.family) == (domain, "matrix")]
    indices = {buffer.index for buffer in buffers}
    buckets = [bucket for bucket in plan.buckets if bucket.buffer in indices]
    work = next(work for work in plan.works if work.domain == domain)
    hardware = plan.options.hardware
    schedule = build_schedule(
        buffers,
        buckets,
        (work,),
        ranks=1,
        stages_by_tie=plan.stages_by_tie,
        grad_dtype=plan.grad_dtype,
        stats_numel=0,
        wire_dtypes={(domain, cohort): DType.BF16 for cohort in range(work.num_cohorts)},
    )
    reductions = [op for op in schedule.ops if op.phase == "reduce"]
    after = max(sent_by_rank([op for op in schedule.ops if op.phase != "reduce"], work.world))
    exposed = exposed_nbytes(buckets, reductions, plan.grad_dtype)
    return Score(
        layout=layout,
        wire_nbytes=after + max(sent_by_rank(reductions, work.world)),
        exposed_nbytes=exposed,
        memory_nbytes=max(_memory(buffers, plan.grad_dtype, work.world)),
        imbalance=work.imbalance,
        wire_ms=hardware.wire_ms(after + exposed),
        ns_ms=hardware.ns_ms(max(work.loads)),
    )


def _memory(buffers: Sequence[BufferPlan], grad_dtype: DType, world: int) -> list[int]:
    """Bytes of params, gradients, masters and momentum of these buffers on every rank."""
    held = [0] * world
    everywhere = 0
    for buffer in buffers:
        master = 0 if buffer.key.dtype is DType.FP32 else DType.FP32.itemsize
        if buffer.has_grads:
            widened = 0 if grad_dtype is DType.FP32 else DType.FP32.itemsize
            everywhere += buffer.numel * (buffer.key.dtype.itemsize + grad_dtype.itemsize)
        else:  # a shard of the params' own gradients is copied
            widened = DType.FP32.itemsize
            everywhere += (buffer.numel + buffer.param_numel) * buffer.key.dtype.itemsize
        each = master + widened + DType.FP32.itemsize
        uneven = [0] * world
        for bucket in buffer.buckets:
            numels = bucket.shard_numels()
            if numels.count(numels[0]) == len(numels):
                everywhere += numels[0] * each
            else:
                uneven = list(map(add, uneven, numels))
        held = list(map(add, held, (numel * each for numel in uneven)))
    return [so_far + everywhere for so_far in held]

"""`auto`: which layout each buffer of matrices gets, by a cost model that can be printed.

A layout costs a step the time for which it waits for the wire, the Newton-Schulz of its busiest rank, and memory. The
wire is waited for in the exchange, in the gather, and for what is left to reduce when backward ends: reductions of
buckets that were full before hide behind backward, which is taken to make gradients as fast as the wire reduces them.
The quickest layout is taken; what is nearly as quick counts as equal, and then memory decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple

from layerwise.config.layouts import Layout
from layerwise.dtypes import DType
from layerwise.layout.buckets import BucketPlan, BufferGroup, BufferPlan
from layerwise.layout.cost import Hardware
from layerwise.layout.schedule import CommOp, build_schedule, wire_nbytes
from layerwise.layout.shards import OwnShards
from layerwise.layout.work import WorkPlan, loads_of
from layerwise.units import format_nbytes

CANDIDATES: tuple[Layout, ...] = ("flat", "padded", "compact")
"""What `auto` chooses from, the simplest first."""

_AS_QUICK = 1.02
"""Times within 2 % are equal: the model is not more exact than that."""
_AS_LEAN = 1.1
"""A layout that needs over 10 % more memory than the leanest is not chosen, however quick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one layout costs one buffer, on the rank for which it is worst."""

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
    """The layout of one buffer, what it was compared with, and why it was taken."""

    buffer: BufferGroup
    layout: Layout
    reason: str
    scores: tuple[Score, ...] = ()


class Draft(NamedTuple):
    """All buffers of a model in one layout, and the work that comes with it."""

    buffers: tuple[BufferPlan, ...]
    works: tuple[WorkPlan, ...]
    own: tuple[OwnShards, ...] = ()


def choose_layouts(
    drafts: Mapping[Layout, Draft], world_by_domain: Mapping[str, int], grad_dtype: DType, hardware: Hardware
) -> tuple[Choice, ...]:
    """A layout for every buffer, out of drafts of the whole model. Params that no matrix rule manages are always
    `flat`."""
    choices = []
    for group in (BufferGroup.of(buffer.key) for buffer in drafts["flat"].buffers):
        world = world_by_domain[group.domain]
        if group.family != "matrix" or world == 1:
            reason = "no matrix rule manages it" if group.family != "matrix" else "its domain is one rank"
            choices.append(Choice(buffer=group, layout="flat", reason=reason))
            continue
        scores = tuple(score(layout, draft, group, grad_dtype, hardware) for layout, draft in drafts.items())
        chosen, reason = pick(scores)
        choices.append(Choice(buffer=group, layout=chosen.layout, reason=reason, scores=scores))
    return tuple(choices)


def pick(scores: Sequence[Score]) -> tuple[Score, str]:
    """The score to take, and why."""
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


def score(layout: Layout, draft: Draft, group: BufferGroup, grad_dtype: DType, hardware: Hardware) -> Score:
    """What a layout costs one buffer of matrices."""
    buffers = tuple(buffer for buffer in draft.buffers if BufferGroup.of(buffer.key) == group)
    work = next(work for work in draft.works if work.domain == group.domain)
    buckets = {bucket.index for buffer in buffers for bucket in buffer.buckets}
    mine = work if len(buckets) == len({item.shard for item in work.items}) else restricted(work, buckets)
    schedule = build_schedule(
        buffers,
        [bucket for buffer in buffers for bucket in buffer.buckets],
        (mine,),
        ranks=1,
        stages_by_tie=dict.fromkeys((bucket.tie for buffer in buffers for bucket in buffer.buckets if bucket.tie), 2),
        grad_dtype=grad_dtype,
        stats_numel=0,
        wire_dtypes={(work.domain, cohort): DType.BF16 for cohort in range(work.num_cohorts)},
    )
    reductions = [op for op in schedule.ops if op.phase == "reduce"]
    after = max(sent_by_rank([op for op in schedule.ops if op.phase != "reduce"], work.world))
    exposed = exposed_nbytes([bucket for buffer in buffers for bucket in buffer.buckets], reductions, grad_dtype)
    return Score(
        layout=layout,
        wire_nbytes=after + max(sent_by_rank(reductions, work.world)),
        exposed_nbytes=exposed,
        memory_nbytes=max(_memory(buffers, grad_dtype, work.world)),
        imbalance=mine.imbalance,
        wire_ms=hardware.wire_ms(after + exposed),
        ns_ms=hardware.ns_ms(max(mine.loads)),
    )


def restricted(work: WorkPlan, shards: Collection[int]) -> WorkPlan:
    """The work on some shard plans only."""
    items = tuple(item for item in work.items if item.shard in shards)
    loads = loads_of(((item.matrix, item.homes) for item in items), work.world, work.cost)
    return replace(work, items=items, loads=tuple(loads))


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


def spread(by_rank: Sequence[int], world: int) -> list[int]:
    """What ranks of a domain have, for every rank of the dense one: neighbours hold different parts of the model."""
    times = world // len(by_rank)
    return list(by_rank) if times == 1 else [value for value in by_rank for _ in range(times)]


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


def _memory(buffers: Sequence[BufferPlan], grad_dtype: DType, world: int) -> list[int]:
    """Bytes of params, gradients, masters and momentum on every rank."""
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

"""The communication schedule: every collective of one optimizer step, in the order in which every rank issues them
(gathers: until forward has been seen to want another).

The planner adds up its bytes, the communicator checks each call against it: a prediction cannot drift from the code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import sub
from typing import Literal

from layerwise.dtypes import DType
from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.exchange import moved_numel
from layerwise.layout.shards import ShardPlan
from layerwise.layout.work import WorkPlan

Phase = Literal["reduce", "tie", "stats", "exchange", "return", "logits", "publish"]
Kind = Literal["reduce_scatter", "all_reduce", "all_to_all", "all_gather", "uneven_all_gather"]


def wire_nbytes(kind: Kind, nbytes: int, world: int) -> int:
    """Bytes one rank sends for a collective over `nbytes` in total, by the bandwidth-optimal algorithm. Collectives
    whose ranks send different amounts list them instead."""
    share = nbytes * (world - 1) // world
    match kind:
        case "reduce_scatter" | "all_gather":
            return share
        case "all_reduce":
            return 2 * share
        case "all_to_all" | "uneven_all_gather":
            raise ValueError(f"ranks send different amounts in {kind}: each op lists them.")


@dataclass(frozen=True, slots=True)
class CommOp:
    """One collective."""

    phase: Phase
    kind: Kind
    label: str
    dtype: DType
    numel: int
    """Elements of the whole tensor; for an all-to-all, what all ranks send together."""
    world: int
    sent: tuple[int, ...] = ()
    """Where ranks differ, each one's elements: those it sends, or for an all-reduce those of its tensor."""

    domain: str = ""
    """Whose ranks take part, where not all of them do."""

    reduce: Literal["sum", "max"] = "sum"
    """What becomes of elements that are reduced."""

    def nbytes(self, rank: int) -> int:
        """Bytes that this rank (of the domain) puts on the wire."""
        numel = self.sent[rank] if self.sent else self.numel
        if self.kind in ("all_to_all", "uneven_all_gather"):
            return numel * self.dtype.itemsize
        return wire_nbytes(self.kind, numel * self.dtype.itemsize, self.world)


@dataclass(frozen=True)
class CommSchedule:
    """The collectives of one step, in order."""

    ops: tuple[CommOp, ...]

    @cached_property
    def _by_name(self) -> dict[tuple[Phase, str], CommOp]:
        return {(op.phase, op.label): op for op in self.ops}

    def find(self, phase: Phase, label: str) -> CommOp | None:
        """The op of that phase and label; None where nothing has to move."""
        return self._by_name.get((phase, label))

    def bytes_by_collective(self, rank: int | Mapping[str, int], rounds: int = 1) -> dict[str, int]:
        """Bytes this rank sends in one step, per kind of collective. A rank that has another number in each domain says
        which. Where every microbatch is reduced on its own there are as many `rounds`."""
        totals: dict[str, int] = defaultdict(int)
        for op in self.ops:
            sent = op.nbytes(rank if isinstance(rank, int) else rank.get(op.domain, 0))
            totals[op.kind] += sent * (rounds if op.phase == "reduce" else 1)
        return dict(totals)


def reduce_op(bucket: BucketPlan, grad_dtype: DType) -> CommOp:
    """The collective that reduces a bucket's gradient."""
    match bucket.reducer:
        case "reduce_scatter" | "all_reduce":
            return CommOp(
                "reduce", bucket.reducer, bucket.label, grad_dtype, bucket.numel, bucket.world, domain=bucket.domain
            )
        case "ordered":
            sent = tuple(map(sub, repeat(bucket.numel), bucket.shard_numels()))
            return CommOp(
                "reduce", "all_to_all", bucket.label, grad_dtype, sum(sent), bucket.world, sent, bucket.domain
            )
        case "none":
            raise ValueError(f"{bucket.label} is not reduced: its params' own gradients are.")


def tie_op(bucket: BucketPlan, stages: int) -> CommOp:
    """The sum of a tied weight's reduced gradient over the pipeline stages that hold a copy of it, shard by shard."""
    numels = bucket.shard_numels()
    return CommOp("tie", "all_reduce", f"tie {bucket.tie!r}", DType.FP32, max(numels), stages, numels, bucket.domain)


def publish_op(bucket: BucketPlan, dtype: DType) -> CommOp | None:
    """The collective that brings a bucket's replicas up to date; None where every rank updates its own."""
    match bucket.publisher:
        case "none":
            return None
        case "uneven_all_gather":
            # In a ring every rank passes on all shards but the one its successor owns.
            numels = bucket.shard_numels()
            sent = tuple(map(sub, repeat(bucket.numel), (*numels[1:], numels[0])))
            return CommOp(
                "publish", "uneven_all_gather", bucket.label, dtype, bucket.numel, bucket.world, sent, bucket.domain
            )
        case "all_gather":
            return CommOp(
                "publish", "all_gather", bucket.label, dtype, bucket.numel, bucket.world, domain=bucket.domain
            )


def gather_order(num_buckets: int) -> list[int]:
    """The order of gathers, until forward has been seen to want another. Backward reduces the end of the model first,
    forward reads its beginning first."""
    return list(reversed(range(num_buckets)))


def stats_op(numel: int, world: int) -> CommOp:
    """The one all-reduce of all gradient statistics."""
    return CommOp("stats", "all_reduce", "stats", DType.FP64, numel, world)


def logits_op(numel: int, world: int) -> CommOp:
    """The one all-reduce of the largest attention logit of every head."""
    return CommOp("logits", "all_reduce", "logits", DType.FP32, numel, world, reduce="max")


def staggered(num_cohorts: int) -> Iterator[tuple[Literal["exchange", "return"], int]]:
    """The order of a domain's all-to-alls: cohort k + 1 is on its way to its homes while cohort k is orthogonalised."""
    for cohort in range(num_cohorts + 1):
        if cohort < num_cohorts:
            yield "exchange", cohort
        if cohort > 0:
            yield "return", cohort - 1


def build_schedule(
    buffers: Sequence[BufferPlan],
    shards: Sequence[ShardPlan],
    works: Sequence[WorkPlan],
    *,
    ranks: int,
    stages_by_tie: Mapping[str, int],
    grad_dtype: DType,
    stats_numel: int,
    wire_dtypes: Mapping[tuple[str, int], DType],
    logits_numel: int = 0,
) -> CommSchedule:
    """The schedule of a step: buffers are reduced and gathered, matrices travel between shards. `wire_dtypes` says how each (domain, cohort) travels; `ranks` take part in the stats, and in
    the maxima of `logits_numel` attention heads, where those are clipped."""
    pairs = sorted(
        ((bucket, buffer.key) for buffer in buffers for bucket in buffer.buckets), key=lambda pair: pair[0].index
    )
    plan_by_index = {plan.index: plan for plan in shards}
    ops = [reduce_op(bucket, grad_dtype) for bucket, _ in pairs if bucket.reducer != "none"]
    tied = sorted((bucket for bucket, _ in pairs if bucket.tie), key=lambda bucket: bucket.tie)
    ops.extend(tie_op(bucket, stages_by_tie[bucket.tie]) for bucket in tied)
    ops.append(stats_op(stats_numel, ranks))
    for work in works:
        totals = moved_numel(work, plan_by_index)
        for phase, cohort in staggered(work.num_cohorts):
            if cohort not in totals:
                continue  # home == owner everywhere: there is no such collective
            sent = totals[cohort][0 if phase == "exchange" else 1]
            if not any(sent):
                continue
            dtype = wire_dtypes[work.domain, cohort]
            ops.append(
                CommOp(
                    phase,
                    "all_to_all",
                    f"{work.domain} cohort {cohort}",
                    dtype,
                    sum(sent),
                    work.world,
                    tuple(sent),
                    work.domain,
                )
            )
    ops.extend([logits_op(logits_numel, ranks)] if logits_numel else [])
    gathered = [pairs[number] for number in gather_order(len(pairs))]
    published = (publish_op(bucket, key.dtype) for bucket, key in gathered)
    ops.extend(op for op in published if op is not None)
    return CommSchedule(tuple(ops))

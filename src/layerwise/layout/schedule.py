"""The communication schedule: every collective of one optimizer step, in the order in which every rank issues them.

The planner adds up its bytes, the communicator checks each call against it: a prediction cannot drift from the code.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from layerwise.dtypes import DType
from layerwise.layout.exchange import sent_numel
from layerwise.layout.storage import BucketPlan, BufferPlan
from layerwise.layout.work import WorkPlan

Phase = Literal["reduce", "stats", "exchange", "return", "publish"]
Kind = Literal["reduce_scatter", "all_reduce", "all_to_all", "all_gather", "broadcast"]


def wire_nbytes(kind: Kind, nbytes: int, world: int) -> int:
    """Bytes one rank sends for a collective over `nbytes` in total, by the bandwidth-optimal algorithm; all-to-all
    counts its own splits instead."""
    share = nbytes * (world - 1) // world
    match kind:
        case "reduce_scatter" | "all_gather":
            return share
        case "all_reduce":
            return 2 * share
        case "broadcast":
            return nbytes if world > 1 else 0
        case "all_to_all":
            raise ValueError("an all-to-all has no total size: add up its splits.")


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
    """All-to-all only: elements each rank sends to others."""

    def nbytes(self, rank: int) -> int:
        """Bytes this rank puts on the wire."""
        if self.kind == "all_to_all":
            return self.sent[rank] * self.dtype.itemsize
        return wire_nbytes(self.kind, self.numel * self.dtype.itemsize, self.world)


@dataclass(frozen=True)
class CommSchedule:
    """The collectives of one step, in order."""

    ops: tuple[CommOp, ...]

    def find(self, phase: Phase, label: str) -> CommOp:
        """The op of that phase and label."""
        return next(op for op in self.ops if op.phase == phase and op.label == label)

    def bytes_by_collective(self, rank: int) -> dict[str, int]:
        """Bytes this rank sends in one step, per kind of collective."""
        totals: dict[str, int] = defaultdict(int)
        for op in self.ops:
            totals[op.kind] += op.nbytes(rank)
        return dict(totals)


def reduce_op(bucket: BucketPlan, grad_dtype: DType, world: int) -> CommOp:
    """The collective that reduces a bucket's gradient."""
    return CommOp("reduce", bucket.reducer, bucket.label, grad_dtype, bucket.numel, world)


def publish_op(bucket: BucketPlan, dtype: DType, world: int) -> CommOp | None:
    """The collective that brings a bucket's replicas up to date; None where every rank updates its own."""
    return (
        CommOp("publish", "all_gather", bucket.label, dtype, bucket.numel, world)
        if bucket.publisher == "all_gather"
        else None
    )


def stats_op(numel: int, world: int) -> CommOp:
    """The one all-reduce of all gradient statistics."""
    return CommOp("stats", "all_reduce", "stats", DType.FP64, numel, world)


def pipelined(num_cohorts: int) -> Iterator[tuple[Literal["exchange", "return"], int]]:
    """The order of a domain's all-to-alls: cohort k + 1 is on its way to its homes while cohort k is orthogonalised."""
    for cohort in range(num_cohorts + 1):
        if cohort < num_cohorts:
            yield "exchange", cohort
        if cohort > 0:
            yield "return", cohort - 1


def build_schedule(
    buffers: Sequence[BufferPlan],
    works: Sequence[WorkPlan],
    *,
    world: int,
    grad_dtype: DType,
    stats_numel: int,
    wire_dtypes: Mapping[tuple[str, int], DType],
) -> CommSchedule:
    """The schedule of a step. `wire_dtypes` says how each (domain, cohort) travels."""
    pairs = sorted(
        ((bucket, buffer.key) for buffer in buffers for bucket in buffer.buckets), key=lambda pair: pair[0].index
    )
    bucket_by_index = {bucket.index: bucket for bucket, _ in pairs}
    ops = [reduce_op(bucket, grad_dtype, world) for bucket, _ in pairs]
    ops.append(stats_op(stats_numel, world))
    for work in works:
        totals = sent_numel(work, bucket_by_index)
        for phase, cohort in pipelined(work.num_cohorts):
            sent = totals[cohort][0 if phase == "exchange" else 1]
            dtype = wire_dtypes[work.domain, cohort]
            ops.append(
                CommOp(phase, "all_to_all", f"{work.domain} cohort {cohort}", dtype, sum(sent), work.world, tuple(sent))
            )
    published = (publish_op(bucket, key.dtype, world) for bucket, key in pairs)
    ops.extend(op for op in published if op is not None)
    return CommSchedule(tuple(ops))

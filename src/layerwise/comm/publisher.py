"""Phase 7, publish: a bucket knows the step its master is at and the step its replica is at; `ensure` makes them equal.

Whoever reads weights calls `ensure`. There is nothing to stage beforehand and so nothing to forget.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from layerwise.buffers.storage import Bucket, Storage
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.layout.schedule import CommOp, publish_op
from layerwise.layout.storage import BucketPlan


class Publisher:
    """Brings replicas up to date by pulling from masters."""

    def __init__(self, storage: Storage, communicators: Mapping[str, Communicator]) -> None:
        self._storage = storage
        self._communicators = communicators
        self._ops = [
            publish_op(bucket.plan, storage.plan.buffers[bucket.plan.buffer].key.dtype) for bucket in storage.buckets
        ]

    @torch.no_grad()
    def ensure(self, bucket: Bucket) -> None:
        """Make this rank's replica of a bucket as new as its master."""
        if bucket.replica_version == bucket.master_version:
            return
        bucket.refresh_replica_shard()
        op = self._ops[bucket.plan.index]
        if op is not None:
            self._start(bucket, op).wait()
        bucket.replica_version = bucket.master_version

    def _start(self, bucket: Bucket, op: CommOp) -> Handle:
        communicator = self._communicators[bucket.plan.domain]
        match bucket.plan.publisher:
            case "uneven_all_gather":
                return communicator.uneven_all_gather(op, bucket.replica, bucket.plan.shard_numels())
            case "broadcast":
                return communicator.broadcast_parts(op, bucket.replica, _all_spans(bucket.plan))
            case _:
                return communicator.all_gather(op, bucket.replica_shard, bucket.replica)

    def ensure_all(self) -> None:
        """Bring every bucket up to date, in plan order."""
        for bucket in self._storage.buckets:
            self.ensure(bucket)


def _all_spans(plan: BucketPlan) -> list[tuple[int, slice]]:
    """Every span of a bucket with the rank that owns it, as parts of the bucket."""
    found: list[tuple[int, slice]] = []
    for shard in range(plan.num_shards):
        start = plan.shard_start(shard)
        found.extend((shard, slice(start + span.part.start, start + span.part.stop)) for span in plan.spans(shard))
    return found

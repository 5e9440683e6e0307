"""Phase 7, publish: a bucket knows the step its master is at and the step its replica is at; `ensure` makes them equal.

Whoever reads weights calls `ensure`. There is nothing to stage beforehand and so nothing to forget.
"""

from __future__ import annotations

import torch

from layerwise.buffers.storage import Bucket, Storage
from layerwise.comm.collectives import Communicator
from layerwise.layout.schedule import publish_op


class Publisher:
    """Brings replicas up to date by pulling from masters."""

    def __init__(self, storage: Storage, communicator: Communicator) -> None:
        self._storage = storage
        self._communicator = communicator
        self._ops = [
            publish_op(bucket.plan, storage.plan.buffers[bucket.plan.buffer].key.dtype, communicator.world)
            for bucket in storage.buckets
        ]

    @torch.no_grad()
    def ensure(self, bucket: Bucket) -> None:
        """Make this rank's replica of a bucket as new as its master."""
        if bucket.replica_version == bucket.master_version:
            return
        bucket.refresh_replica_shard()
        op = self._ops[bucket.plan.index]
        if op is not None:
            self._communicator.all_gather(op, bucket.replica_shard, bucket.replica).wait()
        bucket.replica_version = bucket.master_version

    def ensure_all(self) -> None:
        """Bring every bucket up to date, in plan order."""
        for bucket in self._storage.buckets:
            self.ensure(bucket)

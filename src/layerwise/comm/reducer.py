"""Phase 1, reduce: gradients fill buckets, and full buckets are reduced while backward goes on.

Buckets are launched strictly in plan order. A bucket that is full early waits for its predecessors, so the sequence of
collectives is the same on every rank even when ranks produce gradients in different orders, or some of them not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch
from torch import Tensor

from layerwise.buffers.storage import Bucket, Storage
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.layout.schedule import CommOp, reduce_op


class BucketPhase(Enum):
    """Where a bucket's gradient is on its way."""

    FILLING = "filling"  # backward may still write here
    REDUCING = "reducing"  # the collective is in flight: memory is not ours
    REDUCED = "reduced"  # the shard holds the sum over ranks


class _Progress:
    """How far one bucket has come since the last step."""

    def __init__(self) -> None:
        self.phase = BucketPhase.FILLING
        self.handle: Handle | None = None
        self.pending = 0  # params whose last expected gradient of this backward has not come


class GradReducer:
    """Accumulates gradients into buckets and reduces the buckets."""

    def __init__(self, storage: Storage, communicator: Communicator, *, overlap: bool) -> None:
        self._storage = storage
        self._communicator = communicator
        self._overlap = overlap
        self._ops = [reduce_op(bucket.plan, storage.plan.grad_dtype, communicator.world) for bucket in storage.buckets]
        self._bucket_of = storage.plan.bucket_of
        self._written: set[str] = set()
        self._arrivals: dict[str, int] = {}
        # How often each param's gradient arrives in one synchronised backward: learned from the first, because
        # reentrant activation checkpointing delivers a shared param's gradient in several parts. Until then nothing is
        # launched early.
        self._expected: dict[str, int] | None = None
        self._progress = [_Progress() for _ in storage.buckets]
        self._late_grads: list[tuple[str, Tensor]] = []
        self._late: set[int] = set()
        self._next = 0
        self.reset()

    @torch.no_grad()
    def write(self, fqn: str, grad: Tensor, *, sync: bool) -> None:
        """Add a gradient. With `sync` it belongs to the last microbatch, so its bucket may be reduced once all of its
        gradients are in."""
        progress = self._progress[self._bucket_of[fqn]]
        if progress.phase is BucketPhase.FILLING:
            self._accumulate(fqn, grad)
        else:
            # Kept aside, not waited for: a peer may launch this bucket only in its step(), and in between the user may
            # have collectives of his own that need both of us.
            self._late_grads.append((fqn, grad))
        if sync:
            self._arrivals[fqn] = self._arrivals.get(fqn, 0) + 1
            if self._may_launch_early and self._arrivals[fqn] == self._expected_arrivals(fqn):
                progress.pending -= 1
                self._launch_ready()

    def _accumulate(self, fqn: str, grad: Tensor) -> None:
        view = self._storage.grad_views[fqn]
        if fqn in self._written:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._written.add(fqn)

    @property
    def _may_launch_early(self) -> bool:
        return self._overlap and self._expected is not None

    def _expected_arrivals(self, fqn: str) -> int:
        return self._expected.get(fqn, 1) if self._expected is not None else 1

    @property
    def late(self) -> frozenset[int]:
        """Buckets that got a gradient on this rank after their reduction was launched (a second backward without
        `no_sync`). Other ranks may have other ones, so what to reduce again is for all of them to decide together."""
        return frozenset(self._late)

    def reduce_again(self, indices: Iterable[int]) -> None:
        """Take the sum of these buckets anew: the same ones on every rank."""
        with torch.no_grad():
            for index in sorted(indices):
                self._progress[index].handle = self._start(self._storage.buckets[index], self._ops[index])
            for index in sorted(indices):
                self._wait(self._progress[index])
        self._late.clear()

    @staticmethod
    def _wait(progress: _Progress) -> None:
        if progress.handle is not None:
            progress.handle.wait()
            progress.handle = None
            progress.phase = BucketPhase.REDUCED

    def _launch_ready(self) -> None:
        while self._next < len(self._progress) and self._progress[self._next].pending <= 0:
            self._launch(self._next)

    def _launch(self, index: int) -> None:
        bucket, progress = self._storage.buckets[index], self._progress[index]
        if progress.phase is BucketPhase.FILLING:
            for placement in bucket.plan.placements:
                if placement.fqn not in self._written:
                    self._storage.grad_views[placement.fqn].zero_()
            progress.handle = self._start(bucket, self._ops[index])
            progress.phase = BucketPhase.REDUCING
        self._next = index + 1

    def _start(self, bucket: Bucket, op: CommOp) -> Handle:
        if bucket.plan.reducer == "all_reduce":
            # The local sum must survive for a second backward, so the reduced copy has memory of its own wherever there
            # are other ranks.
            if bucket.grad_shard.data_ptr() != bucket.grad.data_ptr():
                bucket.grad_shard.copy_(bucket.grad)
            return self._communicator.all_reduce(op, bucket.grad_shard)
        return self._communicator.reduce_scatter(op, bucket.grad, bucket.grad_shard)

    def finish(self) -> frozenset[str]:
        """Reduce what is left, wait for everything; returns the params that got no gradient on this rank."""
        self._finish_round()
        with torch.no_grad():
            for fqn, grad in self._late_grads:
                self._accumulate(fqn, grad)
                self._late.add(self._bucket_of[fqn])
        self._late_grads.clear()
        self._expected = dict(self._arrivals)
        return frozenset(self._bucket_of).difference(self._written)

    def _finish_round(self) -> None:
        with torch.no_grad():
            while self._next < len(self._progress):
                self._launch(self._next)
            for progress in self._progress:
                self._wait(progress)

    def reset(self) -> None:
        """Forget all gradients. Costs no pass over memory: the first write of a gradient replaces what was there.

        A round that was begun is finished first: other ranks may have launched buckets that this one has not, because
        its gradients were missing, and would wait for it for ever.
        """
        if self._may_launch_early and self._arrivals:
            self._finish_round()
        for progress, bucket in zip(self._progress, self._storage.buckets, strict=True):
            self._wait(progress)
            progress.phase = BucketPhase.FILLING
            progress.pending = len(bucket.plan.placements)
        self._written.clear()
        self._arrivals.clear()
        self._late_grads.clear()
        self._late.clear()
        self._next = 0

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient was written since the last reset."""
        return bool(self._written or self._late_grads)

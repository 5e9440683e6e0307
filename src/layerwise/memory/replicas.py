"""Replicas: what every rank has of a bucket, whoever owns it. The weights that forward reads and the gradient that
backward fills; of both, this rank's shard is a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from layerwise.errors import StateError
from layerwise.layout.buckets import BucketPlan
from layerwise.layout.storage import GRAD_SLOTS
from layerwise.memory.shards import Shard
from layerwise.memory.streams import Written


class ReplicaState(Enum):
    """How a bucket's replica stands to its master."""

    FRESH = "fresh"  # forward may read it
    STALE = "stale"  # the master has moved on
    IN_FLIGHT = "in flight"  # a gather is writing it


@dataclass(eq=False)
class Replica:
    """One bucket's replica on this rank."""

    plan: BucketPlan
    shard: Shard
    weights: Tensor  # 1D, param dtype: what forward reads
    grad: Tensor | None  # 1D, grad dtype: what backward accumulates into; None between leases, where it is leased
    grad_shard: (
        Tensor  # 1D: this rank's shard of the reduced gradient; lies in `grad` unless that is leased or narrower
    )
    ring: GradRing | None = None  # where `grad` is leased from
    # The step whose gather was launched last, and the one that forward reads.
    launched_version: int = 0
    version: int = 0
    written: Written | None = None  # on CUDA: what readers on other streams must wait for
    holds_gradient: bool = False  # whether `grad` is backward's now

    @property
    def landing(self) -> Tensor:
        """Where a gather leaves every rank's message, in order of rank."""
        return self.weights

    @property
    def held(self) -> Sequence[Tensor]:
        """What this rank has of what forward reads."""
        return (self.weights,)

    # Where a gather lands elsewhere than where forward reads, it needs staging memory.

    @property
    def staging(self) -> Sequence[Tensor]:
        """All slots of the ring that gathers may need."""
        return ()

    def free_staging(self) -> None:
        """Let go of slots that no gather has."""

    @property
    def is_lent(self) -> bool:
        """Whether a gather has the gradient's memory now."""
        return False

    @property
    def needs_slot(self) -> bool:
        """Whether a gather would need a slot of the staging ring."""
        return False

    @property
    def has_slot(self) -> bool:
        """Whether a gather has one."""
        return False

    @property
    def has_room(self) -> bool:
        """Whether a gather can be launched, or others have to land first."""
        return True

    @property
    def state(self) -> ReplicaState:
        """Where the three versions are; there is no flag that could say something else."""
        if self.version == self.shard.version:
            return ReplicaState.FRESH
        return ReplicaState.IN_FLIGHT if self.launched_version == self.shard.version else ReplicaState.STALE

    def expect_fresh(self) -> None:
        """Raise unless the master may move: fresh becomes stale by that."""
        self._expect(ReplicaState.FRESH, ReplicaState.STALE)

    def message(self) -> Tensor:
        """What this rank sends of a bucket that is to be gathered: its part of `landing`, written there."""
        self._expect(ReplicaState.STALE, ReplicaState.IN_FLIGHT)
        self.shard.round_master()
        return self.shard.rounded()

    def launch(self) -> None:
        """The gather was started: stale becomes in flight."""
        self._expect(ReplicaState.STALE, ReplicaState.IN_FLIGHT)
        self._note_written()
        self.launched_version = self.shard.version

    def land(self) -> None:
        """Every rank's message has arrived in `landing`: in flight becomes fresh."""
        self._expect(ReplicaState.IN_FLIGHT, ReplicaState.FRESH)
        self.wait_written()  # whoever launched it may have done so on another stream
        self.settle()
        self._note_written()  # before it counts as fresh: another thread may look at any time
        self.version = self.shard.version

    def settle(self) -> None:
        """Have forward read what lies in `landing`: it does."""

    def wait_written(self) -> None:
        """Have the current CUDA stream read behind the one on which this was launched or landed."""
        if self.written is not None:
            self.written.wait()

    def _note_written(self) -> None:
        if self.shard.master.is_cuda:
            self.written = Written(self.shard.master.device)

    def _expect(self, state: ReplicaState, becoming: ReplicaState) -> None:
        if self.state is not state:
            raise StateError(
                f"{self.plan.label} cannot become {becoming.value}: its replica is {self.state.value} (version "
                f"{self.version} of {self.shard.version}), expected {state.value}. Bring it up to date first, "
                "with model.ensure()."
            )

    def take_gradient(self) -> None:
        """The sum over ranks is in: it is worked on in fp32."""
        if self.shard.update is not self.grad_shard:
            self.shard.update.copy_(self.grad_shard)


class GradRing:
    """Memory for the full gradients of a buffer's buckets, leased to one bucket at a time.

    A few slots are kept. When all of them are out another one is made and dropped afterwards: waiting for a peer in the
    middle of backward could be waiting for ever, if that peer waits for us elsewhere.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._free: list[Tensor] = []
        self._leased: dict[int, Tensor] = {}
        self.peak = 0
        """Most slots that were ever out at once."""

    def lease(self, numel: int) -> Tensor:
        """Zeros, as many as a bucket needs."""
        slot = self._free.pop() if self._free else torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._leased[slot.data_ptr()] = slot
        self.peak = max(self.peak, len(self._leased))
        return slot[:numel].zero_()

    def release(self, leased: Tensor) -> None:
        slot = self._leased.pop(leased.data_ptr())
        if len(self._leased) + len(self._free) < GRAD_SLOTS:
            self._free.append(slot)

    def free(self) -> None:
        """Let go of slots that nobody has."""
        self._free.clear()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All slots, leased or free."""
        return (*self._free, *self._leased.values())

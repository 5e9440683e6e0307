"""Replicas of buckets whose params are kept as codes: a gather lands in staging memory, and codes are made of what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from layerwise.errors import StateError
from layerwise.kernels.stored import ParamStorage
from layerwise.layout.storage import STAGING_SLOTS
from layerwise.memory.replicas import Replica, ReplicaState
from layerwise.memory.streams import Written


class StagingRing:
    """Staging memory for gathers that cannot lie in an idle gradient: a few slots, each as long as the longest bucket."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._numel, self._device = numel, device
        self._free: list[tuple[Tensor, Written | None]] = []
        """Each with what was done with it last, on whichever stream."""
        self._leased: list[Tensor] = []

    @property
    def has_room(self) -> bool:
        return len(self._leased) < STAGING_SLOTS

    def lease(self, numel: int) -> Tensor:
        """Memory for a bucket."""
        if not self.has_room:
            raise StateError(f"all {STAGING_SLOTS} staging slots are out: one of their gathers has to land first.")
        if self._free:
            slot, written = self._free.pop()
            if written is not None:
                written.wait()
        else:
            slot = torch.empty(self._numel, dtype=torch.bfloat16, device=self._device)
        self._leased.append(slot)
        return slot[:numel]

    def release(self, leased: Tensor) -> None:
        (slot,) = (slot for slot in self._leased if slot.data_ptr() == leased.data_ptr())
        self._leased = [other for other in self._leased if other is not slot]
        self._free.append((slot, Written(self._device) if slot.is_cuda else None))

    def free(self) -> None:
        """Let go of slots that nobody has."""
        self._free.clear()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All slots, leased or free."""
        return (*(slot for slot, _ in self._free), *self._leased)


@dataclass(frozen=True, eq=False)
class KeptPlain:
    """A param of a staged bucket that has memory of its own, in its own dtype."""

    part: slice
    memory: Tensor

    @property
    def held(self) -> tuple[Tensor, ...]:
        return (self.memory.view(-1),)

    def settle(self, staged: Tensor, *, keep_values: bool) -> None:
        self.memory.copy_(staged[self.part].view(self.memory.shape))


@dataclass(frozen=True, eq=False)
class KeptCodes:
    """A param of a staged bucket that is kept as codes."""

    part: slice
    stored: ParamStorage

    @property
    def held(self) -> tuple[Tensor, ...]:
        return self.stored.codes

    def settle(self, staged: Tensor, *, keep_values: bool) -> None:
        values = staged[self.part].view(self.stored.shape)
        self.stored.settle(values)
        self.stored.taken()  # what was given meanwhile goes: masters have it, or it was not the truth
        if keep_values:
            self.stored.given = values.clone()


@dataclass(eq=False, kw_only=True)
class StagedReplica(Replica):
    """One bucket's replica on this rank, of which nothing is kept in the dtype that is gathered.

    A gather has the bucket's own gradient for staging where that is idle: it is as long or longer, and backward writes
    there only once forward has read what landed. Elsewhere it has a slot of a ring.
    """

    rank: int
    kept: tuple[KeptPlain | KeptCodes, ...]
    slots: StagingRing
    keep_values: bool = False
    """Whether params keep what lands beside their codes, for whoever trains them next."""
    _staged: Tensor | None = field(default=None, repr=False)
    _is_lent: bool = False
    _is_slot: bool = False

    def begin_with(self, staged: Tensor) -> None:
        """What the params begin with lies here until `settle()`."""
        self._staged = staged

    @property
    def landing(self) -> Tensor:
        if self._staged is None:
            raise StateError(f"{self.plan.label} has no staging memory: nothing is being gathered.")
        return self._staged

    @property
    def held(self) -> Sequence[Tensor]:
        return tuple(tensor for param in self.kept for tensor in param.held)

    @property
    def staging(self) -> Sequence[Tensor]:
        return self.slots.tensors

    def free_staging(self) -> None:
        self.slots.free()

    @property
    def is_lent(self) -> bool:
        return self._is_lent

    @property
    def needs_slot(self) -> bool:
        return self.grad is None or self.holds_gradient

    @property
    def has_slot(self) -> bool:
        return self._is_slot

    @property
    def has_room(self) -> bool:
        return not self.needs_slot or self.slots.has_room

    def message(self) -> Tensor:
        self._expect(ReplicaState.STALE, ReplicaState.IN_FLIGHT)
        if self.grad is None or self.holds_gradient:
            self._staged = self.slots.lease(self.plan.numel)
            self._is_slot = True
        else:
            self._staged = self.grad.view(self.shard.dtype)[: self.plan.numel]
            self._is_lent = True
        mine = self.landing[self.plan.shard_part(self.rank)]
        mine.copy_(self.shard.master)
        return mine

    def settle(self) -> None:
        staged = self.landing
        for param in self.kept:
            param.settle(staged, keep_values=self.keep_values)
        if self._is_lent:
            staged.zero_()  # a reduction sums what lies between params too
        if self._is_slot:
            self.slots.release(staged)
        self._staged, self._is_lent, self._is_slot = None, False, False

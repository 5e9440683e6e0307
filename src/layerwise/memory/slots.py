"""Staging memory for the exchange: every passage leases the place that was planned for it, and gives it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from layerwise.errors import StateError
from layerwise.layout.slots import OWN, Slot, SlotPlan, passage_nbytes


class Lease:
    """A slot in somebody's hands: room for what is sent and for what is received."""

    def __init__(
        self, slots: Slots, who: str, slot: Slot, memory: Tensor, sent: int, received: int, dtype: torch.dtype
    ) -> None:
        self._slots = slots
        self.who, self.slot = who, slot
        middle = passage_nbytes(sent * dtype.itemsize, 0)
        self.send = memory[: sent * dtype.itemsize].view(dtype)
        self.receive = memory[middle : middle + received * dtype.itemsize].view(dtype)

    def release(self) -> None:
        self._slots.take_back(self)


class Slots:
    """Memory of its own comes with the first exchange and stays; borrowed memory is zero whenever no exchange has it."""

    def __init__(self, plan: SlotPlan, device: torch.device, borrowed: Sequence[Tensor] = ()) -> None:
        self.plan = plan
        self._device = device
        self._borrowed = tuple(borrowed)  # uint8 each
        self._own = self._nothing()
        self._leases: list[Lease] = []
        self._is_open = False

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """The time in which slots may be leased: borrowed memory is not its owner's then, and zero again afterwards."""
        if self._own.numel() < self.plan.own_nbytes:
            self._own = torch.empty(self.plan.own_nbytes, dtype=torch.uint8, device=self._device)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._leases.clear()
            for memory in self._borrowed:
                memory.zero_()

    def lease(self, slot: Slot, sent: int, received: int, dtype: torch.dtype, who: str) -> Lease:
        """A slot, for so many elements each way."""
        if not self._is_open:
            raise StateError(f"{who} wants a slot, but no exchange is under way.")
        for other in self._leases:
            if other.slot.overlaps(slot):
                raise StateError(f"{who} wants a slot that {other.who} has not given back.")
        memory = (self._own if slot.region == OWN else self._borrowed[slot.region])[slot.start : slot.stop]
        lease = Lease(self, who, slot, memory, sent, received, dtype)
        self._leases.append(lease)
        return lease

    def take_back(self, lease: Lease) -> None:
        if lease not in self._leases:
            raise StateError(f"{lease.who} gives back a slot that it does not have.")
        self._leases.remove(lease)

    def free(self) -> None:
        """Let go of the memory; the next exchange takes some again."""
        if self._is_open:
            raise StateError("staging memory cannot be freed while an exchange is under way.")
        self._own = self._nothing()

    @property
    def nbytes(self) -> int:
        """Bytes of its own."""
        return self._own.nbytes

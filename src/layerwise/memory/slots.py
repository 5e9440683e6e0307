"""Staging memory for the exchange: every passage leases the place that was planned for it, and gives it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from layerwise.errors import StateError
from layerwise.layout.slots import Slot, SlotPlan, passage_nbytes


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
    """The memory of all slots. It is allocated by the first exchange and stays until `free()`."""

    def __init__(self, plan: SlotPlan, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self._memory = self._nothing()  # uint8
        self._leases: list[Lease] = []
        self._is_open = False

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow leases inside the `with` block. Allocates the memory of all slots where there is none yet."""
        if self._memory.numel() < self.plan.nbytes:
            self._memory = torch.empty(self.plan.nbytes, dtype=torch.uint8, device=self._device)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._leases.clear()

    def lease(self, slot: Slot, sent: int, received: int, dtype: torch.dtype, who: str) -> Lease:
        """A slot, for so many elements each way."""
        if not self._is_open:
            raise StateError(f"{who} wants a slot, but no exchange is under way.")
        for other in self._leases:
            if other.slot.overlaps(slot):
                raise StateError(f"{who} wants a slot that {other.who} has not given back.")
        lease = Lease(self, who, slot, self._memory[slot.start : slot.stop], sent, received, dtype)
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
        self._memory = self._nothing()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return self._memory.nbytes

"""Staging memory for the exchange: equal slots, leased one at a time and given back by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from layerwise.errors import StateError, listed
from layerwise.layout.slots import SlotPlan, passage_nbytes


class Lease:
    """A slot in somebody's hands: room for what is sent and for what is received."""

    def __init__(self, slot: Tensor, sent: int, received: int, dtype: torch.dtype, who: str) -> None:
        first = passage_nbytes(sent * dtype.itemsize, 0)
        self.who = who
        self.slot = slot
        self.send = slot[: sent * dtype.itemsize].view(dtype)
        self.receive = slot[first : first + received * dtype.itemsize].view(dtype)


class Slots:
    """The ring. Memory of its own comes with the first lease and stays; borrowed memory is zero whenever nobody has it."""

    def __init__(self, plan: SlotPlan, device: torch.device, borrowed: Sequence[Tensor] = ()) -> None:
        self.plan = plan
        self._device = device
        self._borrowed = list(borrowed)  # uint8 each
        self._own: list[Tensor] = []
        self._free: list[Tensor] = []
        self._leased: dict[int, Lease] = {}
        self._is_open = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """The time in which slots may be leased: borrowed memory is not its owner's then, and zero again afterwards."""
        self._own += [
            torch.empty(self.plan.nbytes, dtype=torch.uint8, device=self._device)
            for _ in range(self.plan.number - len(self._borrowed) - len(self._own))
        ]
        self._free, self._is_open = [*self._borrowed, *self._own], True
        try:
            yield
        finally:
            self._is_open = False
            self._leased.clear()
            for slot in self._borrowed:
                slot.zero_()

    def lease(self, sent: int, received: int, dtype: torch.dtype, who: str) -> Lease:
        """A slot for so many elements each way."""
        if not self._is_open or not self._free:
            holders = listed(sorted(lease.who for lease in self._leased.values()))
            raise StateError(
                f"{who} wants a slot, but {f'all {self.plan.number} are out, to {holders}' if self._is_open else 'no exchange is under way'}. "
                "A passage gives its slot back once it was unpacked."
            )
        slot = self._free.pop()
        lease = Lease(slot, sent, received, dtype, who)
        self._leased[id(slot)] = lease
        return lease

    def release(self, lease: Lease) -> None:
        if self._leased.pop(id(lease.slot), None) is not lease:
            raise StateError(f"{lease.who} gives back a slot that it does not have.")
        self._free.append(lease.slot)

    def free(self) -> None:
        """Let go of the memory; the next exchange takes some again."""
        if self._is_open:
            raise StateError("staging memory cannot be freed while an exchange is under way.")
        self._own.clear()
        self._free.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of its own."""
        return sum(slot.nbytes for slot in self._own)

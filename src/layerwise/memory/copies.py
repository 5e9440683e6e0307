"""Copies of tensors in memory of the host, for who goes on reading what training is about to change."""

from __future__ import annotations

import torch
from torch import Tensor

_SLAB_NBYTES, _ALIGNMENT = 64 << 20, 64


class Copies:
    """One set of copies at a time, in slabs that are kept for the next set: new memory takes several times as long to fill, and
    pinned memory, which copies from a GPU go to, longer still to get."""

    def __init__(self, device: torch.device) -> None:
        """`device`: where most of what is copied lies."""
        self._device = device
        self._slabs: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """Nobody reads the copies of before any more."""
        self._used = 0
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")

    def add(self, tensor: Tensor) -> Tensor:
        """A copy, which is there after `finish()`."""
        while tensor.nbytes > len(self._room):
            if self._used == len(self._slabs):
                nbytes, is_pinned = max(_SLAB_NBYTES, tensor.nbytes), self._device.type == "cuda"
                self._slabs.append(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned))
            self._room = self._slabs[self._used]
            self._used += 1
        own = self._room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._room = self._room[-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT :]
        return own.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Wait for copies that a GPU makes."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def free(self) -> None:
        """Keep no memory; whoever has a copy still has it."""
        self._slabs = []
        self.begin()

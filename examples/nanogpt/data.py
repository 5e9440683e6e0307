"""Text as bytes. Nothing is downloaded: without a file, the text is that of Python's own standard library."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor


class Text:
    """The bytes of a text; the last tenth is for validation."""

    def __init__(self, path: str, block_size: int) -> None:
        files = [Path(path)] if path else sorted(Path(os.__file__).parent.glob("*.py"))
        tokens = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        cut = len(tokens) * 9 // 10
        self.train, self.val, self.block_size = tokens[:cut], tokens[cut:], block_size

    def train_batch(self, batch_size: int, number: int) -> tuple[Tensor, Tensor]:
        """Batch `number`, wherever and whenever it is asked for: a run that goes on needs no state of a generator."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.train) - self.block_size - 1, (batch_size,), generator=generator)
        return self._windows(self.train, starts)

    def val_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Windows at even distances, always the same."""
        return self._windows(self.val, torch.arange(batch_size) * (len(self.val) - self.block_size - 1) // batch_size)

    def _windows(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = tokens[starts.unsqueeze(1) + torch.arange(self.block_size + 1)].long()
        return windows[:, :-1], windows[:, 1:]

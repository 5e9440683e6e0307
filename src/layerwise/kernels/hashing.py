"""A hash of bits that is exact, and the same on every device and for every order of summation."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
"""Elements at a time: integers of a whole bucket would need several times its memory."""


def hash_bits(flat: Tensor) -> Tensor:
    """Two int64 numbers: the sum of all elements' bits, and the same with weights, so that order counts."""
    bits = flat.reshape(-1).view(_INTEGERS[flat.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(torch.split(bits, _CHUNK)):
        wide = chunk.to(torch.int64)
        place = torch.arange(1, chunk.numel() + 1, device=flat.device)
        total += torch.stack((wide.sum(), ((wide + 1) * (place * 2654435761 + number)).sum()))
    return total

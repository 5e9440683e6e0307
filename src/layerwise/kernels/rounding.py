"""Stochastic rounding: fp32 to bf16, up or down with the probability that makes the expected value exact."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_BITS = 16
"""Bits of an fp32 number that bf16 does not have."""


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """`x` in bf16. What bf16 can hold exactly stays as it is; inf and NaN do too."""
    noise = torch.randint(0, 1 << _LOW_BITS, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    # A carry out of the low bits is the step to the next bf16 number, also across exponents.
    rounded = ((x.view(torch.int32) + noise) & -(1 << _LOW_BITS)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(torch.bfloat16)

"""Numbers that are hard to encode: ties, ends of exponents, subnormals, zeros of both signs, what is not finite."""

from __future__ import annotations

import torch
from torch import Tensor

from layerwise.layout.recipes import FP8_ROWS, FP8_TILES, MX_E4M3, MX_E5M2, BlockFormat

FORMATS: dict[str, BlockFormat] = {
    "mx e4m3": MX_E4M3,
    "mx e5m2": MX_E5M2,
    "fp8 rows": FP8_ROWS,
    "fp8 tiles": FP8_TILES,
}


def hard_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, run: int = 32) -> Tensor:
    """Runs of elements, each of one kind, in the order of memory."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (count, run), generator=generator, dtype=torch.int64)

    def of_bits(sign: Tensor, exponent: Tensor, mantissa: Tensor) -> Tensor:
        return (sign << 31 | exponent << 23 | mantissa).to(torch.int32).view(torch.float32)

    numel = torch.Size(shape).numel()
    count = -(-numel // run)
    sign, low, zeros = integers(0, 2), integers(0, 1 << 23), integers(0, 1)
    step = (integers(0, 16) << 19) + integers(-1, 2)  # halfway between elements of 3 or 2 bits, or next to it
    ties = of_bits(sign, 110 + integers(0, 20), step.clamp(0, (1 << 23) - 1))
    one = integers(1, 255)[:, :1]
    anything = torch.randint(-(1 << 31), 1 << 31, (count, run), generator=generator).to(torch.int32)
    plain = torch.randn((count, run), generator=generator)
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])[integers(0, 4)]
    kinds = [
        anything.view(torch.float32),
        plain,
        plain * 0.02,
        of_bits(sign, one.expand(count, run), low),
        ties,
        of_bits(sign, (one - integers(0, 24)).clamp(0), step.clamp(0, (1 << 23) - 1)),
        of_bits(sign, integers(0, 20), low),
        of_bits(sign, integers(236, 255), low),
        of_bits(sign, zeros, low),
        of_bits(sign, zeros, zeros),
        torch.where(integers(0, 24) == 0, bad, plain),
        torch.where(integers(0, 24) == 0, torch.tensor(3.0e38), plain),
    ]
    chosen = integers(0, len(kinds))[:, :1]
    found = torch.stack(kinds).gather(0, chosen.expand(count, run)[None])[0]
    return found.flatten()[:numel].view(shape).to(dtype)

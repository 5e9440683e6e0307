"""Eight-bit codes by the book, slow and obvious: every number that an element can be is listed, and the nearest one is looked up.

What is multiplied is rounded to fp32 as the definition says; everything else is exact in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _numbers() -> list[float]:
    """The numbers of e4m3 from zero upwards, in the order of their codes."""
    found = []
    for code in range(127):
        exponent, mantissa = divmod(code, 8)
        found.append(mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return found


E4M3 = torch.tensor(_numbers(), dtype=torch.float64)
LARGEST = 448.0


def nearest(numbers: Tensor) -> Tensor:
    """Codes as bytes of float64 numbers: the nearest element, of two that are as near the one with the even code."""
    size = numbers.abs().clamp(max=LARGEST)
    upper = torch.searchsorted(E4M3, size).clamp(max=len(E4M3) - 1)
    lower = (upper - 1).clamp(min=0)
    down, up = size - E4M3[lower], E4M3[upper] - size
    code = torch.where((down < up) | ((down == up) & (lower % 2 == 0)), lower, upper)
    return (code + 128 * torch.signbit(numbers)).to(torch.uint8)


def encode(values: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    """Codes as bytes, and scales, of a 2D or 3D bf16 tensor whose sides are whole blocks."""
    tall, wide = {"mxfp8": (1, 32), "blockwise": (128, 128)}[recipe]
    *batch, rows, cols = values.shape
    blocks = values.double().reshape(*batch, rows // tall, tall, cols // wide, wide)
    largest = blocks.abs().amax((-3, -1))
    factors, scales = torch.empty_like(largest), torch.empty_like(largest)
    for place in range(largest.numel()):
        most = float(largest.view(-1)[place])
        if recipe == "mxfp8":
            exponent = max(math.frexp(most)[1] - 1 - 8, -127) if most else -127
            factors.view(-1)[place], scales.view(-1)[place] = 2.0**-exponent, exponent + 127
        else:
            bound = torch.tensor(max(most, LARGEST * 2.0**-126), dtype=torch.float32)
            top = torch.tensor(LARGEST, dtype=torch.float32)  # a number instead would be multiplied with a reciprocal
            factors.view(-1)[place], scales.view(-1)[place] = float(top / bound), float(bound / top)
    scaled = (blocks.float() * factors.float()[..., :, None, :, None]).double()
    return nearest(scaled).reshape(values.shape), scales

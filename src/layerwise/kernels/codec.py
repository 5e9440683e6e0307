"""Eight-bit codes with a scale for each block: MXFP8 and blockwise FP8, in both directions.

[Note: What a code is] With a the largest magnitude in a block, as fp32, and M the largest number of the element type
(448 for e4m3, 57344 for e5m2), of which floor(log2 M) is E (8 and 15):

* e8m0 (OCP Microscaling Formats v1.0): the scale is 2^(floor(log2 a) - E), but no less than 2^-127, the least that its
  byte has; the greatest that a needs, 2^(128 - E), it always has. The factor is its inverse, a power of two.
* fp32 (as DeepSeek-V3 has it): with b = max(a, M * 2^-126), the scale is b / M and the factor M / b, each one IEEE
  division in fp32. The bound keeps both normal numbers, for a block of zeros too.

A code is x * factor, one IEEE multiplication in fp32, then saturated to [-M, M], then rounded to the nearest element,
ties to even, subnormal elements included. The multiplication by a power of two rounds nothing that the second rounding
would not make a zero of anyway. Zeros keep their sign.

A NaN makes its whole block NaN: the scale is NaN (the byte 255, or an fp32 NaN), NaN and Inf have the code 127, which is
NaN too, other codes of the block are zeros with the sign of their number. Inf is a magnitude like any other for e8m0:
the scale is 2^(128 - E) and its code M or -M, which comes back as Inf, for M * 2^(128 - E) is more than fp32 has. With
an fp32 scale, which has no such place, Inf makes its block NaN as NaN does.

Only operations that IEEE 754 defines to the last bit are used, and exponents are read off bits: the same input gives the
same bits on every device, and by our own kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.layout.recipes import BlockFormat


class Element(NamedTuple):
    """An eight-bit float."""

    dtype: torch.dtype
    largest: float
    exponent: int  # of the largest


ELEMENTS = {
    "e4m3": Element(torch.float8_e4m3fn, 448.0, 8),
    "e5m2": Element(torch.float8_e5m2, 57344.0, 15),
}
SCALES = {"e8m0": torch.uint8, "fp32": torch.float32}

_MANTISSA = 23
_MAGNITUDE = 0x7FFFFFFF
_INF = 0x7F800000
_LEAST_NORMAL = 2.0**-126
_NAN_BYTE = 255


@dataclass(frozen=True, eq=False)
class Codes:
    """A tensor as eight-bit codes and the scales of its blocks."""

    values: Tensor
    """In the element type, of the shape of what was encoded."""
    scales: Tensor
    """(..., blocks of rows, blocks of columns): exponents + 127 in uint8, of which 255 is NaN, or fp32.

    [Note: Scales of rows lie by columns] Where a block is part of one row, scales of the same columns lie beside each other,
    row after row: then what is written of them with a tile fills whole sectors of memory. The other way round they took half
    the bandwidth of all codes. It is the order, too, in which products of such codes read them.
    """
    format: BlockFormat

    @classmethod
    def empty(cls, shape: tuple[int, ...], format: BlockFormat, device: torch.device | str = "cpu") -> Codes:
        """Uninitialised memory for a tensor of this shape."""
        *batch, down, across = format.scales_shape(tuple(shape))
        order = (*batch, across, down) if _has_scales_by_columns(format) else (*batch, down, across)
        scales = torch.empty(order, dtype=SCALES[format.scale], device=device)
        values = torch.empty(shape, dtype=ELEMENTS[format.element].dtype, device=device)
        return cls(values, scales.mT if _has_scales_by_columns(format) else scales, format)

    @property
    def scales_in_order(self) -> Tensor:
        """The scales as they lie in memory."""
        return self.scales.mT if _has_scales_by_columns(self.format) else self.scales

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def _has_scales_by_columns(format: BlockFormat) -> bool:
    """See [Note: Scales of rows lie by columns]."""
    return format.block[0] == 1


def decode(codes: Codes, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Code times scale, one multiplication in fp32, rounded to `dtype`. With e8m0 scales nothing is rounded above 2^-126."""
    rows, cols = codes.values.shape[-2:]
    tall, wide = codes.format.block
    scales = scale_numbers(codes)
    if tall > 1:
        scales = scales.repeat_interleave(tall, -2)[..., :rows, :]
    scales = scales.repeat_interleave(wide, -1)[..., :cols]
    return codes.values.to(torch.float32).mul_(scales).to(dtype)


def scale_numbers(codes: Codes) -> Tensor:
    """The scales as fp32 numbers."""
    if codes.format.scale == "fp32":
        return codes.scales
    exponents = codes.scales.to(torch.int32)
    bits = (exponents << _MANTISSA).masked_fill_(exponents == 0, 1 << (_MANTISSA - 1))  # 2^-127 is subnormal
    return bits.view(torch.float32).masked_fill_(exponents == _NAN_BYTE, float("nan"))


def encode_by_torch(x: Tensor, out: Codes) -> None:
    """Leave the codes of x in `out`: what every other way of writing them is compared with."""
    element = ELEMENTS[out.format.element]
    blocks = _blocks(x, out.format.block)
    largest = (blocks.view(torch.int32) & _MAGNITUDE).amax((-3, -1), keepdim=True)  # as integers NaN > Inf > numbers
    choose = _power_of_two if out.format.scale == "e8m0" else _quotient
    scales, factors = choose(largest, element)
    out.scales.copy_(scales.squeeze(-1).squeeze(-2))
    scaled = (blocks * factors).clamp_(-element.largest, element.largest)
    scaled.masked_fill_(scaled.isnan(), float("nan"))  # whose sign depends on the machine
    rows, cols = x.shape[-2:]
    values = scaled.to(element.dtype).flatten(-4, -3).flatten(-2, -1)
    out.values.copy_(values[..., :rows, :cols])


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x in fp32 as (..., blocks of rows, rows, blocks of columns, columns); short blocks are filled up with zeros."""
    (*batch, rows, cols), (tall, wide) = x.shape, block
    padded = torch.nn.functional.pad(x, (0, -cols % wide, 0, -rows % tall)).to(torch.float32).contiguous()
    return padded.view(*batch, -(-rows // tall), tall, -(-cols // wide), wide)


def _power_of_two(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Scales as bytes, and the factors that are their inverses, from the bits of the largest magnitudes."""
    is_nan = largest > _INF
    exponents = ((largest >> _MANTISSA) - element.exponent).clamp_(min=0)
    factors = ((254 - exponents) << _MANTISSA).masked_fill_(is_nan, 0).view(torch.float32)
    return exponents.masked_fill_(is_nan, _NAN_BYTE).to(torch.uint8), factors


def _quotient(largest: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """Scales in fp32, and the factors to codes, from the bits of the largest magnitudes."""
    is_finite = largest < _INF
    bound = largest.view(torch.float32).clamp(min=element.largest * _LEAST_NORMAL)
    top = torch.full_like(bound, element.largest)  # by a number torch may not divide but multiply
    return (bound / top).masked_fill_(~is_finite, float("nan")), (top / bound).masked_fill_(~is_finite, 0.0)

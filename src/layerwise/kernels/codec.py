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
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.errors import warn
from layerwise.kernels.facts import encoder_for
from layerwise.layout.recipes import FP8_ROWS, FP8_TILES, MX_E4M3, MX_E5M2, BlockFormat, codes_nbytes

__all__ = [
    "FP8_ROWS",
    "FP8_TILES",
    "MX_E4M3",
    "MX_E5M2",
    "BlockFormat",
    "Codes",
    "codes_nbytes",
    "decode",
    "encode",
    "encode_both_into",
    "encode_into",
]


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


def encode(x: Tensor, format: BlockFormat) -> Codes:
    """The codes of x, in new memory."""
    out = Codes.empty(tuple(x.shape), format, x.device)
    encode_into(x, out)
    return out


def encode_into(x: Tensor, out: Codes) -> None:
    """Leave the codes of x, of bf16 or fp32, in `out`."""
    _check(x, out, tuple(x.shape))
    if _has_kernel(x, out):
        from layerwise.kernels.triton_codec import fused_encode

        fused_encode(x, out, None)
        return
    _encode_into(x, out)


def encode_both_into(x: Tensor, rows: Codes, cols: Codes) -> None:
    """Leave the codes of x in `rows` and those of its transpose in `cols`."""
    _check(x, rows, tuple(x.shape))
    _check(x, cols, tuple(x.mT.shape))
    if rows.format == cols.format and _has_kernel(x, rows, cols):
        from layerwise.kernels.triton_codec import fused_encode

        fused_encode(x, rows, cols)
        return
    encode_into(x, rows)
    encode_into(x.mT, cols)


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


def _has_kernel(x: Tensor, *outs: Codes) -> bool:
    """Whether our own kernel can write these codes."""
    if not all(tensor.is_contiguous() for out in outs for tensor in (out.values, out.scales_in_order)):
        return False
    format = outs[0].format
    return encoder_for(x, format).backend == "triton" and _is_exact(x.device, format)


@cache
def _is_exact(device: torch.device, format: BlockFormat) -> bool:
    """Whether our own kernel writes torch's bits on this device: tried once, on numbers of every kind. It is made of
    instructions that compilers and cards have changed before."""
    from layerwise.kernels.triton_codec import fused_encode

    bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)  # all there are
    spread = bits[torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(0), device="cpu").to(device)]
    finite = spread.nan_to_num(1.0, 2.0, -2.0).view(2, 128, 256)
    for x in (finite, spread.view(2, 128, 256), finite[:, :104, :152].contiguous()):
        found, expected = ([Codes.empty(tuple(y.shape), format, device) for y in (x, x.mT)] for _ in range(2))
        try:
            fused_encode(x, found[0], found[1])
        except Exception as error:
            warn(f"our own kernel for codes does not run here, torch writes them: {type(error).__name__}: {error}.")
            return False
        for y, out in zip((x, x.mT), expected, strict=True):
            _encode_into(y, out)
        if not all(map(_same_bits, found, expected)):
            warn(f"our own kernel for codes of {format} has other bits than torch on {device}: torch writes them.")
            return False
    return True


def _same_bits(one: Codes, other: Codes) -> bool:
    pairs = ((one.values, other.values), (one.scales, other.scales))
    return all(
        torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)) for left, right in pairs
    )


def _encode_into(x: Tensor, out: Codes) -> None:
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


def _check(x: Tensor, out: Codes, shape: tuple[int, ...]) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"only bf16 and fp32 are encoded, got {x.dtype}. Cast first.")
    wanted = (
        ("values", out.values, shape, ELEMENTS[out.format.element].dtype),
        ("scales", out.scales, out.format.scales_shape(shape), SCALES[out.format.scale]),
    )
    for name, found, size, dtype in wanted:
        if tuple(found.shape) != size or found.dtype != dtype or found.device != x.device:
            raise ValueError(
                f"the {name} of the codes do not fit what is encoded: expected {dtype} of shape {size} on {x.device}, "
                f"got {found.dtype} of shape {tuple(found.shape)} on {found.device}."
            )

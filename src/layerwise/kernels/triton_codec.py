"""Codes of one or both directions from one read of bf16, as a Triton kernel: bit by bit what `codec` defines.

Imported only where `choose_encoder` says so: it needs Triton. A program reads a tile of whole blocks of both directions,
so no scale depends on two programs. What it computes is written with operations of one meaning: maxima are those of the
bits of magnitudes, which are in order as integers are, with NaN above Inf above all numbers.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from layerwise.kernels.codec import ELEMENTS, Codes
from layerwise.kernels.encoders import LONGEST, EncoderTile, encoder_tile
from layerwise.kernels.triton_launch import launch

MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
ONE = tl.constexpr(0x3F800000)
LEAST_NORMAL = tl.constexpr(2.0**-126)
UPPER = tl.constexpr(-0x10000)
"""Of 32 bits, those of the second number of a pair."""


@triton.jit
def _reciprocal(x, BY_BITS: tl.constexpr):
    """1 / x but for the last bits."""
    if BY_BITS:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _scales_and_factors(
    largest, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E8M0: tl.constexpr, BY_BITS: tl.constexpr
):
    """From the bits of the largest magnitudes of blocks: their scales, as they are stored, and the factors to codes."""
    if IS_E8M0:
        exponent = tl.maximum((largest & INF) - (EXPONENT << 23), 0)
        factor = tl.where(largest > INF, 0, (254 << 23) - exponent).to(tl.float32, bitcast=True)
        scale = tl.where(largest > INF, 255, exponent >> 23)
    else:
        # [Note: Quotients to the last bit] A quotient is corrected by its remainder, which fp32 holds exactly, so that
        # its rounding is that of one division; no number on the way is subnormal but a remainder. Tried for every
        # magnitude of bf16, and for every mantissa of fp32 with reciprocals up to two last bits off.
        INVERSE: tl.constexpr = 1.0 / LARGEST
        bound = tl.maximum(largest.to(tl.float32, bitcast=True), LARGEST * LEAST_NORMAL)
        scale = bound * INVERSE
        scale = tl.fma(tl.fma(-scale, LARGEST, bound), INVERSE, scale)
        scale = tl.where(largest < INF, scale, float("nan"))
        bits = bound.to(tl.int32, bitcast=True)
        mantissa = ((bits & 0x7FFFFF) | ONE).to(tl.float32, bitcast=True)
        inverse = _reciprocal(mantissa, BY_BITS)
        inverse = tl.fma(inverse, tl.fma(-mantissa, inverse, 1.0), inverse)
        factor = inverse * LARGEST
        factor = tl.fma(tl.fma(-mantissa, factor, LARGEST), inverse, factor)
        bits = factor.to(tl.int32, bitcast=True) - ((bits & INF) - ONE)
        factor = tl.where(largest < INF, bits, 0).to(tl.float32, bitcast=True)
    return scale, factor


@triton.jit
def _rounded(scaled, LARGEST: tl.constexpr, IS_E4M3: tl.constexpr):
    """Saturated and rounded to the nearest element, ties to even, in 32 bits: for whoever has no instruction for it."""
    MANTISSA: tl.constexpr = 3 if IS_E4M3 else 2
    LEAST: tl.constexpr = -6 if IS_E4M3 else -14
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE
    is_nan = magnitude > INF
    small = tl.minimum(tl.where(is_nan, 0, magnitude).to(tl.float32, bitcast=True), LARGEST)
    magnitude = small.to(tl.int32, bitcast=True)
    half = (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
    normal = ((magnitude + half) >> DROPPED) - ((LEAST + 126) << MANTISSA)
    # The sum has the spacing of subnormal elements, so that its rounding is theirs and its last bits are the code.
    SHIFT: tl.constexpr = 2.0 ** (LEAST - MANTISSA + 23)
    subnormal = (small + SHIFT).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(small < 2.0**LEAST, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(is_nan, 0x7F, code)


@triton.jit
def _two_codes(a, b, LARGEST: tl.constexpr, IS_E4M3: tl.constexpr, BY_BITS: tl.constexpr):
    """The codes of two numbers in 16 bits, the first below."""
    if BY_BITS:
        return (_rounded(a, LARGEST, IS_E4M3) | (_rounded(b, LARGEST, IS_E4M3) << 8)).to(tl.int16)
    else:
        CONVERT: tl.constexpr = "cvt.rn.satfinite.e4m3x2.f32" if IS_E4M3 else "cvt.rn.satfinite.e5m2x2.f32"
        return tl.inline_asm_elementwise(
            CONVERT + " $0, $2, $1;", "=h,f,f", [a, b], dtype=tl.int16, is_pure=True, pack=1
        )


@triton.jit
def _four_codes(a, b, c, d, LARGEST: tl.constexpr, IS_E4M3: tl.constexpr, BY_BITS: tl.constexpr):
    """The codes of four numbers in 32 bits, the first below."""
    low = _two_codes(a, b, LARGEST, IS_E4M3, BY_BITS).to(tl.int32) & 0xFFFF
    return low | (_two_codes(c, d, LARGEST, IS_E4M3, BY_BITS).to(tl.int32) << 16)


@triton.jit
def _first(pairs):
    """The first numbers of pairs of bf16, as fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _second(pairs):
    return (pairs & UPPER).to(tl.float32, bitcast=True)


@triton.jit
def _largest(pairs):
    """The larger magnitude of each pair, in the upper half of the bits; what is below breaks ties alone."""
    return tl.maximum((pairs << 16) & MAGNITUDE, pairs & MAGNITUDE)


@triton.jit
def _larger(a, b, c, d):
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def _row(
    pairs, largest,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E4M3: tl.constexpr, IS_E8M0: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """The codes of a row's pairs, two by two, and the scales that belong to the largest magnitudes of their blocks."""
    scales, factors = _scales_and_factors(largest & UPPER, LARGEST, EXPONENT, IS_E8M0, BY_BITS)
    return _two_codes(_first(pairs) * factors, _second(pairs) * factors, LARGEST, IS_E4M3, BY_BITS), scales


@triton.jit
def _row_largest(pairs, WIDE: tl.constexpr):
    largest = tl.max(_largest(pairs), axis=3, keep_dims=True)
    if WIDE > 32:
        largest = tl.max(largest, axis=1, keep_dims=True)
    return largest


@triton.jit
def _col_largest(largest, WIDE: tl.constexpr):
    largest = tl.max(largest, axis=2, keep_dims=True)
    if WIDE > 32:
        largest = tl.max(largest, axis=0, keep_dims=True)
    return largest


@triton.jit(do_not_specialize=["quads", "pairs", "stride_batch", "stride_row"])
def encode_kernel(
    x, row_values, row_scales, col_values, col_scales,
    quads, pairs, stride_batch, stride_row,
    HAS_ROWS: tl.constexpr, HAS_COLS: tl.constexpr, WHOLE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E4M3: tl.constexpr, IS_E8M0: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """One tile: its codes by rows, and its codes by columns as a tile of the transpose.

    Memory is seen as what a lane has together: pairs of numbers, two codes of a row, four codes of a column. Rows are
    counted by four, in `quads`, and columns by two, in `pairs`.
    """
    across, down, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # [Note: A square for each warp] With 8 x 4 lanes that have 4 rows of 8 columns each, 32 x 32 elements are those of one
    # warp: maxima of 32 need no other, loads are 16 bytes wide, and what a lane has of a column are 4 codes in a row of
    # the transpose. The four rows are four tensors, so that they are with one lane whatever a compiler does.
    DOWN: tl.constexpr = ROWS // 32
    ACROSS: tl.constexpr = COLS // 32
    top, left = down * (ROWS // 4), across * (COLS // 2)
    square_down = tl.arange(0, DOWN)[:, None, None, None]
    square_across = tl.arange(0, ACROSS)[None, :, None, None]
    quad = square_down * 8 + tl.arange(0, 8)[None, None, :, None]
    pair = square_across * 16 + tl.arange(0, 16)[None, None, None, :]
    is_down = None if WHOLE else quad < quads - top
    is_across = None if WHOLE else pair < pairs - left
    inside = None if WHOLE else (quad < quads - top) & tl.max_constancy(pair < pairs - left, [1, 1, 1, 4])
    zero = None if WHOLE else 0
    read = x + batch * stride_batch + top.to(tl.int64) * 4 * stride_row + left + (quad * 4 * stride_row + pair)
    a = tl.load(tl.multiple_of(read, [16, 16, 16, 16]), mask=inside, other=zero)
    b = tl.load(tl.multiple_of(read + stride_row, [16, 16, 16, 16]), mask=inside, other=zero)
    c = tl.load(tl.multiple_of(read + 2 * stride_row, [16, 16, 16, 16]), mask=inside, other=zero)
    d = tl.load(tl.multiple_of(read + 3 * stride_row, [16, 16, 16, 16]), mask=inside, other=zero)
    if TALL > 1:
        largest = tl.reshape(_larger(_largest(a), _largest(b), _largest(c), _largest(d)), (ROWS * COLS // 8,))
        tile_largest = tl.max(largest, axis=0)
    if HAS_ROWS:
        into = row_values + (batch * quads + top) * 4 * pairs + left + (quad * 4 * pairs + pair)
        if TALL > 1:
            largest_a, largest_b, largest_c, largest_d = tile_largest, tile_largest, tile_largest, tile_largest
        else:
            largest_a, largest_b = _row_largest(a, WIDE), _row_largest(b, WIDE)
            largest_c, largest_d = _row_largest(c, WIDE), _row_largest(d, WIDE)
        codes, scale_a = _row(a, largest_a, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
        tl.store(tl.multiple_of(into, [8, 8, 8, 8]), codes, mask=inside)
        codes, scale_b = _row(b, largest_b, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
        tl.store(tl.multiple_of(into + pairs, [8, 8, 8, 8]), codes, mask=inside)
        codes, scale_c = _row(c, largest_c, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
        tl.store(tl.multiple_of(into + 2 * pairs, [8, 8, 8, 8]), codes, mask=inside)
        codes, scale_d = _row(d, largest_d, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
        tl.store(tl.multiple_of(into + 3 * pairs, [8, 8, 8, 8]), codes, mask=inside)
        if TALL > 1:
            tl.store(row_scales + (batch * tl.num_programs(1) + down) * tl.num_programs(0) + across, scale_a)
        elif IS_E8M0:
            at = row_scales + (batch * tl.cdiv(pairs, 16) + left // 16) * quads + top + (square_across * quads + quad)
            four = scale_a | (scale_b << 8) | (scale_c << 16) | (scale_d << 24)
            tl.store(at, four, mask=None if WHOLE else is_down & (square_across * 16 < pairs - left))
        else:
            at = row_scales + (batch * tl.num_programs(0) + across) * quads * 4 + (top + quad) * 4
            tl.store(at, scale_a, mask=is_down)
            tl.store(at + 1, scale_b, mask=is_down)
            tl.store(at + 2, scale_c, mask=is_down)
            tl.store(at + 3, scale_d, mask=is_down)
    if HAS_COLS:
        if TALL > 1:
            first_largest, second_largest = tile_largest, tile_largest
        else:
            first = _larger((a << 16) & MAGNITUDE, (b << 16) & MAGNITUDE, (c << 16) & MAGNITUDE, (d << 16) & MAGNITUDE)
            second = _larger(a & MAGNITUDE, b & MAGNITUDE, c & MAGNITUDE, d & MAGNITUDE)
            first_largest, second_largest = _col_largest(first, WIDE), _col_largest(second, WIDE)
        first_scale, first_factor = _scales_and_factors(first_largest & UPPER, LARGEST, EXPONENT, IS_E8M0, BY_BITS)
        second_scale, second_factor = _scales_and_factors(second_largest & UPPER, LARGEST, EXPONENT, IS_E8M0, BY_BITS)
        into = col_values + (batch * pairs + left) * 2 * quads + top + (pair * 2 * quads + quad)
        codes = _four_codes(
            _first(a) * first_factor, _first(b) * first_factor, _first(c) * first_factor, _first(d) * first_factor,
            LARGEST, IS_E4M3, BY_BITS,
        )  # fmt: skip
        tl.store(into, codes, mask=inside)
        codes = _four_codes(
            _second(a) * second_factor, _second(b) * second_factor, _second(c) * second_factor, _second(d) * second_factor,
            LARGEST, IS_E4M3, BY_BITS,
        )  # fmt: skip
        tl.store(into + quads, codes, mask=inside)
        if TALL > 1:
            tl.store(col_scales + (batch * tl.num_programs(0) + across) * tl.num_programs(1) + down, first_scale)
        elif IS_E8M0:
            at = col_scales + (batch * tl.cdiv(quads, 8) + top // 8) * pairs + left + (square_down * pairs + pair)
            two = (first_scale | (second_scale << 8)).to(tl.int16)
            tl.store(at, two, mask=None if WHOLE else is_across & (square_down * 8 < quads - top))
        else:
            at = col_scales + (batch * tl.num_programs(1) + down) * pairs * 2 + (left + pair) * 2
            tl.store(at, first_scale, mask=is_across)
            tl.store(at + 1, second_scale, mask=is_across)


def fused_encode(x: Tensor, rows: Codes | None, cols: Codes | None, tile: EncoderTile | None = None) -> None:
    """Leave the codes of x in `rows` and those of its transpose in `cols`; either may be None. Both have one format."""
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        fused_encode(x.mT, cols, rows, tile)
        return
    found = rows if rows is not None else cols
    if found is None or x.numel() == 0:
        return
    format, element = found.format, ELEMENTS[found.format.element]
    tile = tile or encoder_tile(format, rows=rows is not None, cols=cols is not None)
    num_rows, num_cols = x.shape[-2:]
    batch = prod(x.shape[:-2])
    numbers = x.reshape(batch, num_rows, num_cols)  # a copy only where leading dimensions do not lie in one step
    starts = (numbers.storage_offset(), *numbers.stride()[:2])
    if numbers.stride(2) != 1 or numbers.stride(1) >= LONGEST or any(start % 8 for start in starts):
        numbers = numbers.clone(memory_format=torch.contiguous_format)
    numbers = numbers.view(torch.int32)
    memory = (*_memory(rows, torch.int16, torch.int32), *_memory(cols, torch.int32, torch.int16))
    by_bits = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 9)
    flags = (rows is not None, cols is not None, num_rows % tile.rows == 0 and num_cols % tile.cols == 0)
    constants = (
        *flags, *format.block, tile.rows, tile.cols,
        element.largest, element.exponent, format.element == "e4m3", format.scale == "e8m0", by_bits,
    )  # fmt: skip
    strides = numbers.stride()[:2]
    key = ("encode", x.device, format, tile, flags, strides[0] >= 2**31)
    grid = -(-num_cols // tile.cols), -(-num_rows // tile.rows), batch
    arguments = (numbers, *memory, num_rows // 4, num_cols // 2, *strides, *constants)
    with torch.cuda.device_of(x):
        launch(encode_kernel, key, grid, arguments, warps=tile.warps)


def _memory(codes: Codes | None, values: torch.dtype, bytes: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Codes and scales in the order that they have in memory, as the kernel counts them."""
    if codes is None:
        return None, None
    scales = codes.scales_in_order
    return codes.values.view(values), scales.view(bytes) if codes.format.scale == "e8m0" else scales

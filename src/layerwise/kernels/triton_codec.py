"""Codes of both directions from one read, as a Triton kernel: bit by bit what `codec` defines.

Imported only where `choose_codec` says so: it needs Triton. A program reads a tile of whole blocks of both directions,
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
    """From the bits of the largest magnitudes of blocks: their scales as they are stored, and the factors to codes."""
    if IS_E8M0:
        exponent = tl.maximum((largest & INF) - (EXPONENT << 23), 0)
        factor = tl.where(largest > INF, 0, (254 << 23) - exponent).to(tl.float32, bitcast=True)
        scale = tl.where(largest > INF, 255, exponent >> 23).to(tl.uint8)
    else:
        # [Note: Quotients to the last bit] A quotient is corrected by its remainder, which fp32 holds exactly, so that
        # its rounding is that of one division; no number on the way is subnormal but a remainder. Tried for every
        # mantissa of the bound, at both ends of its exponents, with reciprocals up to two last bits off.
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
def _rounded(scaled, LARGEST: tl.constexpr, IS_E4M3: tl.constexpr, BY_BITS: tl.constexpr):
    """Saturated and rounded to the nearest element, ties to even, as bytes."""
    if BY_BITS:
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
        return tl.where(is_nan, 0x7F, code).to(tl.uint8)
    else:
        dtype: tl.constexpr = tl.float8e4nv if IS_E4M3 else tl.float8e5
        return scaled.to(dtype).to(tl.uint8, bitcast=True)


@triton.jit
def _encoded(
    x, largest,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E4M3: tl.constexpr, IS_E8M0: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """The codes of numbers, and the scales that belong to the largest magnitudes of their blocks."""
    scales, factors = _scales_and_factors(largest, LARGEST, EXPONENT, IS_E8M0, BY_BITS)
    return _rounded(x * factors, LARGEST, IS_E4M3, BY_BITS), scales


@triton.jit(do_not_specialize=["rows", "cols", "stride_batch", "stride_row"])
def encode_kernel(
    x, row_values, row_scales, col_values, col_scales,
    rows, cols, stride_batch, stride_row,
    HAS_ROWS: tl.constexpr, HAS_COLS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E4M3: tl.constexpr, IS_E8M0: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """One tile: its codes by rows, and its codes by columns as a tile of the transpose."""
    across, down, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    top, left = down * ROWS, across * COLS
    # [Note: A square for each warp] With 8 x 4 lanes that have 4 rows of 8 columns each, 32 x 32 elements are those of one
    # warp: maxima of 32 need no other, loads are 16 bytes wide, and what a lane has of a column are 4 codes in a row of
    # the transpose. Triton gives the last dimensions to lanes, those before to warps and the first to a lane alone.
    DOWN: tl.constexpr = ROWS // 32
    ACROSS: tl.constexpr = COLS // 32
    own_row = tl.arange(0, 4)[:, None, None, None, None]
    square_down = tl.arange(0, DOWN)[None, :, None, None, None]
    square_across = tl.arange(0, ACROSS)[None, None, :, None, None]
    lane_row = tl.arange(0, 8)[None, None, None, :, None]
    row = square_down * 32 + lane_row * 4 + own_row
    col = square_across * 32 + tl.arange(0, 32)[None, None, None, None, :]
    read = x + batch * stride_batch + top.to(tl.int64) * stride_row + left + (row * stride_row + col)
    mask = (row < rows - top) & (col < cols - left)
    if ALIGNED:
        read, mask = tl.multiple_of(read, [16, 16, 16, 16, 16]), tl.max_constancy(mask, [1, 1, 1, 1, 16])
    if WHOLE:
        bits = tl.load(read)
    else:
        bits = tl.load(read, mask=mask, other=0)
    if x.dtype.element_ty == tl.int16:  # bf16 is the upper half of fp32
        bits = bits.to(tl.int32) << 16
    numbers = bits.to(tl.float32, bitcast=True)
    magnitudes = bits & MAGNITUDE
    if TALL > 1:
        largest = tl.max(tl.reshape(magnitudes, (ROWS * COLS,)), axis=0)
        codes, scale = _encoded(numbers, largest, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
    if HAS_ROWS:
        if TALL == 1:
            largest = tl.max(magnitudes, axis=4, keep_dims=True)
            if WIDE > 32:
                largest = tl.max(largest, axis=2, keep_dims=True)
            codes, scales = _encoded(numbers, largest, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
            num_blocks = tl.cdiv(cols, WIDE)
            at = row_scales + (batch * rows + top) * num_blocks + left // WIDE
            if WIDE > 32:
                tl.store(at + row * num_blocks, scales, mask=None if WHOLE else row < rows - top)
            else:
                inside = (row < rows - top) & (square_across * 32 < cols - left)
                tl.store(at + (row * num_blocks + square_across), scales, mask=None if WHOLE else inside)
        else:
            tl.store(row_scales + (batch * tl.num_programs(1) + down) * tl.num_programs(0) + across, scale)
        into = row_values + (batch * rows + top) * cols + left + (row * cols + col)
        if ALIGNED:
            into = tl.multiple_of(into, [8, 8, 8, 8, 8])  # no more: a thread stores what it has loaded
        tl.store(into, codes, mask=None if WHOLE else mask)
    if HAS_COLS:
        if TALL == 1:
            largest = tl.max(tl.max(magnitudes, axis=0, keep_dims=True), axis=3, keep_dims=True)
            if WIDE > 32:
                largest = tl.max(largest, axis=1, keep_dims=True)
            codes, scales = _encoded(numbers, largest, LARGEST, EXPONENT, IS_E4M3, IS_E8M0, BY_BITS)
            num_blocks = tl.cdiv(rows, WIDE)
            at = col_scales + (batch * cols + left) * num_blocks + top // WIDE
            if WIDE > 32:
                tl.store(at + col * num_blocks, scales, mask=None if WHOLE else col < cols - left)
            else:
                inside = (col < cols - left) & (square_down * 32 < rows - top)
                tl.store(at + (col * num_blocks + square_down), scales, mask=None if WHOLE else inside)
        else:
            tl.store(col_scales + (batch * tl.num_programs(0) + across) * tl.num_programs(1) + down, scale)
        turned = tl.reshape(tl.permute(codes, (2, 4, 1, 3, 0)), (COLS, ROWS))
        row, col = tl.arange(0, ROWS)[None, :], tl.arange(0, COLS)[:, None]
        into = col_values + (batch * cols + left) * rows + top + (col * rows + row)
        mask = (col < cols - left) & (row < rows - top)
        if ALIGNED:
            into, mask = tl.multiple_of(into, [16, 16]), tl.max_constancy(mask, [1, 16])
        tl.store(into, turned, mask=None if WHOLE else mask)


def fused_encode(x: Tensor, rows: Codes | None, cols: Codes | None, tile: EncoderTile | None = None) -> None:
    """Leave the codes of x in `rows` and those of its transpose in `cols`; either may be None. Both have one format."""
    if x.stride(-1) != 1 and x.stride(-2) == 1:
        fused_encode(x.mT, cols, rows, tile)
        return
    found = rows if rows is not None else cols
    if found is None or x.numel() == 0:
        return
    format, element = found.format, ELEMENTS[found.format.element]
    tile = tile or encoder_tile(format)
    num_rows, num_cols = x.shape[-2:]
    batch = prod(x.shape[:-2])
    numbers = x.reshape(batch, num_rows, num_cols)  # a copy only where leading dimensions do not lie in one step
    if numbers.stride(2) != 1 or numbers.stride(1) >= LONGEST:
        numbers = numbers.contiguous()
    numbers = numbers.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)
    grid = -(-num_cols // tile.cols), -(-num_rows // tile.rows), batch
    pairs = [(None, None) if out is None else (out.values.view(torch.uint8), out.scales) for out in (rows, cols)]
    memory = [tensor for pair in pairs for tensor in pair]
    strides = numbers.stride()[:2]
    # Then rows begin at multiples of 16 bytes here and in the codes; no compiler sees it in the strides.
    places = [tensor.data_ptr() % 16 for tensor in (numbers, *memory) if tensor is not None]
    is_aligned = not any(number % 16 for number in (*places, *strides, num_rows, num_cols))
    is_whole = num_rows % tile.rows == 0 and num_cols % tile.cols == 0
    by_bits = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 9)
    flags = (rows is not None, cols is not None, is_aligned, is_whole)
    constants = (
        *flags, *format.block, tile.rows, tile.cols,
        element.largest, element.exponent, format.element == "e4m3", format.scale == "e8m0", by_bits,
    )  # fmt: skip
    key = ("encode", x.device, x.dtype, format, tile, flags, strides[0] >= 2**31, *(not place for place in places))
    arguments = (numbers, *memory, num_rows, num_cols, *strides, *constants)
    with torch.cuda.device_of(x):
        launch(encode_kernel, key, grid, arguments, warps=tile.warps, registers=tile.registers)

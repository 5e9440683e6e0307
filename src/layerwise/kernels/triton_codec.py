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
LEAST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def _scales_and_factors(largest, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E8M0: tl.constexpr):
    """From the bits of the largest magnitudes of blocks: their scales as they are stored, and the factors to codes."""
    if IS_E8M0:
        exponent = tl.maximum((largest >> 23) - EXPONENT, 0)
        factor = tl.where(largest > INF, 0, (254 - exponent) << 23).to(tl.float32, bitcast=True)
        scale = tl.where(largest > INF, 255, exponent).to(tl.uint8)
    else:
        bound = tl.maximum(largest.to(tl.float32, bitcast=True), LARGEST * LEAST_NORMAL)
        # bound / LARGEST to the last bit, in three operations: no remainder here is more than fp32 holds exactly.
        INVERSE: tl.constexpr = 1.0 / LARGEST
        quotient = bound * INVERSE
        quotient = tl.fma(tl.fma(-quotient, LARGEST, bound), INVERSE, quotient)
        scale = tl.where(largest < INF, quotient, float("nan"))
        factor = tl.where(largest < INF, tl.div_rn(LARGEST, bound), 0.0)
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
    scales, factors = _scales_and_factors(largest, LARGEST, EXPONENT, IS_E8M0)
    return _rounded(x * factors, LARGEST, IS_E4M3, BY_BITS), scales


@triton.jit(do_not_specialize=["num_tiles", "num_across", "rows", "cols", "stride_batch", "stride_row"])
def encode_kernel(
    x, row_values, row_scales, col_values, col_scales,
    num_tiles, num_across, rows, cols, stride_batch, stride_row,
    HAS_ROWS: tl.constexpr, HAS_COLS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
    LARGEST: tl.constexpr, EXPONENT: tl.constexpr, IS_E4M3: tl.constexpr, IS_E8M0: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    """One tile: its codes by rows, and its codes by columns as a tile of the transpose."""
    batch = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    num_down = num_tiles // num_across
    begin = tile // (GROUP * num_across) * GROUP
    height = tl.minimum(num_down - begin, GROUP)
    down = begin + tile % (GROUP * num_across) % height
    across = tile % (GROUP * num_across) // height
    top, left = down * ROWS, across * COLS
    DOWN: tl.constexpr = ROWS // 32
    ACROSS: tl.constexpr = COLS // 32
    # [Note: Squares of a warp]
    g = tl.arange(0, 4)[:, None, None, None, None]
    d = tl.arange(0, DOWN)[None, :, None, None, None]
    a = tl.arange(0, ACROSS)[None, None, :, None, None]
    r = tl.arange(0, 8)[None, None, None, :, None]
    c = tl.arange(0, 32)[None, None, None, None, :]
    row, col = d * 32 + g * 8 + r, a * 32 + c
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
                tl.store(at + row * num_blocks, scales, mask=row < rows - top)
            else:
                tl.store(at + row * num_blocks + a, scales, mask=(row < rows - top) & (a * 32 < cols - left))
        else:
            tl.store(row_scales + batch * num_tiles + down * num_across + across, scale)
        into = row_values + (batch * rows + top) * cols + left + (row * cols + col)
        if ALIGNED:
            into = tl.multiple_of(into, [16, 16, 16, 16, 16])
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
                tl.store(at + col * num_blocks, scales, mask=col < cols - left)
            else:
                tl.store(at + col * num_blocks + d, scales, mask=(col < cols - left) & (d * 32 < rows - top))
        else:
            tl.store(col_scales + batch * num_tiles + across * num_down + down, scale)
        turned = tl.reshape(tl.permute(codes, (2, 4, 1, 0, 3)), (COLS, ROWS))
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
    across = -(-num_cols // tile.cols)
    tiles = -(-num_rows // tile.rows) * across
    pairs = [
        (None, None) if codes is None else (codes.values.view(torch.uint8), codes.scales) for codes in (rows, cols)
    ]
    memory = [tensor for pair in pairs for tensor in pair]
    strides = numbers.stride()[:2]
    # Then rows begin at multiples of 16 bytes here and in the codes; no compiler sees it in the strides.
    places = [tensor.data_ptr() % 16 for tensor in (numbers, *memory) if tensor is not None]
    is_aligned = not any(number % 16 for number in (*places, *strides, num_rows, num_cols))
    is_whole = num_rows % tile.rows == 0 and num_cols % tile.cols == 0
    by_bits = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 9)
    flags = (rows is not None, cols is not None, is_aligned, is_whole)
    constants = (
        *flags, *format.block, tile.rows, tile.cols, tile.group,
        element.largest, element.exponent, format.element == "e4m3", format.scale == "e8m0", by_bits,
    )  # fmt: skip
    key = ("encode", x.device, x.dtype, format, tile, flags, strides[0] >= 2**31, *(not place for place in places))
    arguments = (numbers, *memory, tiles, across, num_rows, num_cols, *strides, *constants)
    with torch.cuda.device_of(x):
        launch(encode_kernel, key, batch * tiles, arguments, warps=tile.warps, registers=tile.registers)

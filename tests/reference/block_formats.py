"""Eight-bit codes with a scale for each block, from the formats' definitions, in numpy and float64: slow and obvious.

An element type is the table of the numbers that its 256 bytes mean; a code is the byte whose number is nearest.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


def numbers(element: str) -> NDArray[np.float64]:
    """What the bytes 0 to 255 mean. e4m3 has no Inf and one NaN, e5m2 is as IEEE 754 would have it."""
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[element]
    found = []
    for byte in range(256):
        sign = -1.0 if byte >= 128 else 1.0
        exponent = (byte >> mantissa_bits) % 2**exponent_bits
        mantissa = byte % 2**mantissa_bits
        if exponent == 0:
            value = math.ldexp(mantissa, 1 - bias - mantissa_bits)
        else:
            value = math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)
        if element == "e4m3" and byte % 128 == 127:
            value = math.nan
        if element == "e5m2" and exponent == 31:
            value = math.inf if mantissa == 0 else math.nan
        found.append(sign * value)
    return np.array(found)


def nearest(x: NDArray[np.float64], element: str) -> Bytes:
    """The byte of the nearest finite number, of two the one with the even byte; NaN is 127."""
    table = numbers(element)[:128]
    finite = table[np.isfinite(table)]
    magnitude = np.minimum(np.abs(np.where(np.isnan(x), 0.0, x)), finite[-1])
    above = np.searchsorted(finite, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = np.abs(finite[above] - magnitude), np.abs(magnitude - finite[below])
    is_up = (up < down) | ((up == down) & (above % 2 == 0))
    byte = np.where(is_up, above, below) + 128 * np.signbit(x)
    return np.where(np.isnan(x), 127, byte).astype(np.uint8)


def widened(x: NDArray[np.float32]) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore"):  # of signalling NaN
        return x.astype(np.float64)


def encoded(
    x: NDArray[np.float32], element: str, block: tuple[int, int], scale: str
) -> tuple[Bytes, NDArray[np.uint8] | NDArray[np.float32]]:
    """The codes of a matrix and the scales of its blocks, as bytes or fp32."""
    (rows, cols), (tall, wide) = x.shape, block
    down, across = -(-rows // tall), -(-cols // wide)
    whole = np.zeros((down * tall, across * wide), np.float32)  # zeros change no largest magnitude
    whole[:rows, :cols] = x
    blocks = whole.reshape(down, tall, across, wide).swapaxes(1, 2).reshape(down * across, tall * wide)
    codes, scales = (mx if scale == "e8m0" else blockwise)(blocks, element)
    values = codes.reshape(down, across, tall, wide).swapaxes(1, 2).reshape(whole.shape)
    return values[:rows, :cols].copy(), scales.reshape(down, across)


def not_a_number(x: NDArray[np.float64], element: str) -> Bytes:
    """The codes of blocks whose scale is NaN: of what is finite only the sign stays."""
    return nearest(np.where(np.isfinite(x), np.copysign(0.0, x), np.nan), element)


def mx(x: NDArray[np.float32], element: str) -> tuple[Bytes, NDArray[np.uint8]]:
    """Blocks of OCP's Microscaling Formats: a scale is a power of two, in a byte with bias 127."""
    table, exact = numbers(element), widened(x)
    largest_power = math.frexp(table[np.isfinite(table)].max())[1] - 1
    largest = np.abs(exact).max(axis=1)
    bad, infinite, zero = np.isnan(largest), np.isinf(largest), largest == 0
    power = np.frexp(np.where(bad | infinite | zero, 1.0, largest))[1] - 1
    power = np.where(infinite, 128, np.where(zero, -1000, power))
    exponent = np.maximum(power - largest_power, -127)
    codes = nearest(exact * np.ldexp(1.0, -exponent)[:, None], element)
    return np.where(bad[:, None], not_a_number(exact, element), codes), np.where(bad, 255, exponent + 127).astype(
        np.uint8
    )


def blockwise(x: NDArray[np.float32], element: str) -> tuple[Bytes, NDArray[np.float32]]:
    """Blocks with fp32 scales; divisions and the product are rounded to fp32 one by one."""
    table, exact = numbers(element), widened(x)
    top = np.float32(table[np.isfinite(table)].max())
    largest = np.abs(exact).max(axis=1)
    bad = ~np.isfinite(largest)
    bound = np.maximum(np.where(bad, 1.0, largest), float(top) * 2.0**-126).astype(np.float32)
    factor = top / bound
    product = np.where(bad[:, None], 0.0, exact) * factor.astype(np.float64)[:, None]  # 48 bits, so exact
    codes = nearest(product.astype(np.float32).astype(np.float64), element)
    return np.where(bad[:, None], not_a_number(exact, element), codes), np.where(bad, np.float32(np.nan), bound / top)

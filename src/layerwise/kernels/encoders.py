"""Which kernel writes codes, and with which tiles: pure functions of facts, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from layerwise.layout.recipes import BlockFormat

LONGEST = 2**21
"""Rows and columns are less than this: places in a tile are counted in 32 bits, and tiles down in 16."""
_MOST = 2**16
"""Matrices are less than this: they are counted in 16 bits."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Who writes codes, and the reason as a sentence."""

    backend: Literal["torch", "triton"]
    reason: str


@dataclass(frozen=True, slots=True)
class EncoderTile:
    """What one program encodes, and how."""

    rows: int
    cols: int
    warps: int
    registers: int | None = None


def choose_encoder(
    *, device: str, capability: tuple[int, int] | None, triton: str | None, format: BlockFormat, shape: tuple[int, ...]
) -> Encoder:
    """The back end for a tensor of this shape; `triton` is its version, if it is there. All write the same bits."""
    if device != "cuda":
        return Encoder("torch", f"codes on {device} are written by torch")
    if capability is None:
        return Encoder("torch", "our own kernel is made for CUDA, and this is none")
    if triton is None:
        return Encoder("torch", "our own kernel needs Triton, which is not installed. Run: pip install triton")
    if max(shape[-2:]) >= LONGEST or prod(shape[:-2]) >= _MOST:
        found = f"got {shape}"
        return Encoder(
            "torch", f"our own kernel takes less than {_MOST} matrices of sides less than {LONGEST}, {found}"
        )
    if format.block not in _TILES:
        return Encoder("torch", f"our own kernel knows blocks of 1x32, 1x128 and 128x128, not {format.block}")
    return Encoder("triton", f"both directions from one read through Triton {triton}")


# A thread has 32 elements: few enough registers that others run while it waits for memory.
_TILES = {
    (1, 32): EncoderTile(rows=64, cols=128, warps=8, registers=80),
    (1, 128): EncoderTile(rows=128, cols=128, warps=16, registers=64),
    (128, 128): EncoderTile(rows=128, cols=128, warps=16, registers=64),
}
"""By block. A tile has whole blocks of both directions."""


def encoder_tile(format: BlockFormat) -> EncoderTile:
    """The tile for a format."""
    return _TILES[format.block]

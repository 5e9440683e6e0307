"""Which kernel writes codes, and with which tiles: pure functions of facts, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layerwise.layout.recipes import BlockFormat

LONGEST = 2**24
"""Rows and columns less than this: places in a tile are counted in 32 bits."""


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
    group: int = 8
    """Rows of tiles that are walked together: neighbours in time write near each other in both directions."""


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
    if max(shape[-2:]) >= LONGEST:
        return Encoder("torch", f"our own kernel takes rows and columns of less than {LONGEST}, got {shape}")
    if format.block not in _TILES:
        return Encoder("torch", f"our own kernel knows blocks of 1x32, 1x128 and 128x128, not {format.block}")
    return Encoder("triton", f"both directions from one read through Triton {triton}")


_TILES = {
    (1, 32): EncoderTile(rows=128, cols=128, warps=8),
    (1, 128): EncoderTile(rows=128, cols=128, warps=8),
    (128, 128): EncoderTile(rows=128, cols=128, warps=8),
}
"""By block. Whole blocks of both directions lie in a tile."""


def encoder_tile(format: BlockFormat) -> EncoderTile:
    """The tile for a format."""
    return _TILES[format.block]

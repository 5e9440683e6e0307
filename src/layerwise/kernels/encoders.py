"""Which kernel writes codes, and with which tiles: pure functions of facts, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from layerwise.layout.recipes import BlockFormat

LONGEST = 2**21
"""Rows and columns are less than this: places in a tile are counted in 32 bits, and tiles down in 16."""
TOGETHER = 8
"""Numbers of a row that are read at once, in 16 bytes."""
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


def choose_encoder(
    *,
    device: str,
    capability: tuple[int, int] | None,
    triton: str | None,
    format: BlockFormat,
    dtype: str,
    shape: tuple[int, ...],
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
    if dtype != "bf16" or any(side % TOGETHER for side in shape[-2:]):
        return Encoder(
            "torch", f"our own kernel takes bf16 with sides that are multiples of {TOGETHER}, got {dtype} of {shape}"
        )
    if format.block not in _TILES:
        return Encoder("torch", f"our own kernel knows blocks of 1x32, 1x128 and 128x128, not {format.block}")
    return Encoder("triton", f"both directions from one read through Triton {triton}")


_TILES = {
    (1, 32): EncoderTile(rows=32, cols=128, warps=4),
    (1, 128): EncoderTile(rows=128, cols=128, warps=4),
    (128, 128): EncoderTile(rows=128, cols=128, warps=4),
}
"""By block. A tile has whole blocks of both directions."""
_ROW_TILES = {**_TILES, (1, 128): EncoderTile(rows=64, cols=128, warps=8)}
"""A tile for codes by rows alone has whole blocks of rows."""


def encoder_tile(format: BlockFormat, *, rows: bool, cols: bool) -> EncoderTile:
    """The tile for codes by rows, by columns or both."""
    if rows and cols:
        return _TILES[format.block]
    tile = _ROW_TILES[format.block]
    return tile if rows else replace(tile, rows=tile.cols, cols=tile.rows)

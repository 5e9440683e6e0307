"""How numbers are stored in 8 bits with a scale for each block: formats and their bytes, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

SCALE_ITEMSIZE = {"e8m0": 1, "fp32": 4}


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Eight-bit elements, of which each block of rows x columns shares a scale.

    The last block of a row or column may be shorter; its scale is as good as any other.
    """

    element: Literal["e4m3", "e5m2"]
    block: tuple[int, int]
    """Rows and columns of a block."""
    scale: Literal["e8m0", "fp32"]
    """A power of two in a byte, as OCP's Microscaling Formats have it, or an fp32 number."""

    def scales_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a tensor of this shape, whose last two dimensions are rows and columns.

        >>> MX_E4M3.scales_shape((8, 100, 70))
        (8, 100, 3)
        """
        if len(shape) < 2:
            raise ValueError(f"a tensor of shape {shape} has no blocks: expected rows and columns, got {len(shape)}-D.")
        *batch, rows, cols = shape
        return (*batch, -(-rows // self.block[0]), -(-cols // self.block[1]))


MX_E4M3 = BlockFormat("e4m3", (1, 32), "e8m0")
MX_E5M2 = BlockFormat("e5m2", (1, 32), "e8m0")
FP8_ROWS = BlockFormat("e4m3", (1, 128), "fp32")
"""What DeepSeek-V3 quantises activations to."""
FP8_TILES = BlockFormat("e4m3", (128, 128), "fp32")
"""What DeepSeek-V3 quantises weights to."""


def codes_nbytes(shape: tuple[int, ...], format: BlockFormat) -> int:
    """Bytes of a tensor of this shape in one direction, scales included.

    >>> codes_nbytes((4, 64), MX_E4M3), codes_nbytes((130, 64), FP8_TILES)
    (264, 8328)
    """
    return prod(shape) + prod(format.scales_shape(shape)) * SCALE_ITEMSIZE[format.scale]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How weights of products are kept, and what the numbers that meet them are rounded to."""

    name: str
    weights: BlockFormat
    activations: BlockFormat
    """Of inputs, and of gradients of outputs."""

    @property
    def both_directions(self) -> bool:
        """Whether a weight and its transpose have codes of their own: where blocks are square they are the same."""
        rows, cols = self.weights.block
        return rows != cols

    @property
    def multiple(self) -> int:
        """What rows and columns of a weight must be multiples of, so that both directions have whole blocks."""
        return max(self.weights.block)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight.

        >>> RECIPES["mxfp8"].nbytes((64, 64)) / 64**2, RECIPES["blockwise"].nbytes((256, 256)) / 256**2
        (2.0625, 1.000244140625)
        """
        *batch, rows, cols = shape
        other = codes_nbytes((*batch, cols, rows), self.weights) if self.both_directions else 0
        return codes_nbytes(shape, self.weights) + other


RECIPES = {
    recipe.name: recipe for recipe in (Recipe("mxfp8", MX_E4M3, MX_E4M3), Recipe("blockwise", FP8_TILES, FP8_ROWS))
}

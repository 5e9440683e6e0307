"""Products of activations with weights that are kept as codes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.kernels.codec import Codes, decode
from layerwise.kernels.encoders import TOGETHER
from layerwise.kernels.encoding import encode
from layerwise.layout.recipes import FP8_ROWS, FP8_TILES, Recipe

_HOPPER = (9, 0)
_TILES_TOGETHER = 4
"""What the length of a row of scales is a multiple of, as cuBLAS reads those of tiles."""


def product(x: Tensor, weight: Codes, recipe: Recipe) -> Tensor:
    """`x @ w.mT`, both operands as their codes have it: `x` is encoded in blocks along what is summed over.

    Where the device multiplies such codes itself it does, and sums in fp32. Elsewhere both operands are decoded first. Codes
    times powers of two are exact in bf16, so that with MX formats only the sum rounds, in fp32 and then to the dtype of `x`;
    fp32 scales round every operand to bf16 once more.
    """
    shape = x.shape
    if weight.values.dim() == 2:
        x = x.reshape(-1, shape[-1])
    num_rows = x.shape[-2]
    missing = -num_rows % TOGETHER if x.is_cuda else 0  # our own kernel takes so many rows together
    x = F.pad(x, (0, 0, 0, missing)) if missing else x.contiguous()
    seen = encode(x, recipe.activations)
    if multiplies_codes(seen, weight):
        out = _product_of_codes(seen, weight, x.dtype)
    else:
        out = decode(seen, x.dtype) @ decode(weight, x.dtype).mT
    return out[..., :num_rows, :].reshape(*shape[:-1], out.shape[-1])


def multiplies_codes(x: Codes, weight: Codes) -> bool:
    """Whether the device has a product of these codes: blocks of a row with whole tiles of 128 x 128, on Hopper."""
    return (
        (x.format, weight.format) == (FP8_ROWS, FP8_TILES)
        and weight.values.is_cuda
        and torch.cuda.get_device_capability(weight.values.device) == _HOPPER
        and weight.values.dim() == 2
        and not any(side % tile for side, tile in zip(weight.shape, FP8_TILES.block, strict=True))
        and x.shape[0] > 0
    )


def _product_of_codes(x: Codes, weight: Codes, dtype: torch.dtype) -> Tensor:
    tiles = F.pad(weight.scales, (0, -weight.scales.shape[1] % _TILES_TOGETHER)).contiguous()
    return F.scaled_mm(
        x.values,
        weight.values.contiguous().mT,
        x.scales,
        F.ScalingType.BlockWise1x128,
        tiles.mT,
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )

"""Products of activations with weights that are kept as codes."""

from __future__ import annotations

from torch import Tensor

from layerwise.kernels.codec import Codes, decode, encode
from layerwise.layout.recipes import Recipe


def product(x: Tensor, weight: Codes, recipe: Recipe) -> Tensor:
    """`x @ w.mT`, both operands as their codes have it: `x` is encoded in blocks along what is summed over.

    Codes times powers of two are exact in bf16, so that with MX formats only the sum rounds, in fp32 and then to the dtype
    of `x`. fp32 scales round every operand to bf16 once.
    """
    seen = decode(encode(x.contiguous(), recipe.activations), x.dtype)
    return seen @ decode(weight, x.dtype).mT

"""Products of codes by the device itself, against the same product of what the codes stand for, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import layerwise
from layerwise.kernels.codec import decode
from layerwise.kernels.encoding import encode
from layerwise.kernels.quantized_products import multiplies_codes, product
from layerwise.layout.recipes import RECIPES

if not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

BLOCKWISE = RECIPES["blockwise"]
SHAPES = [
    ((512,), 512, 768),
    ((100,), 640, 768),
    ((7,), 768, 640),
    ((1,), 128, 128),
    ((2, 3, 5), 1280, 128),
    ((16,), 4096, 256),
]
"""Rows, what is summed over, columns: of 4 tiles in a row and of other numbers, few rows and many dimensions of them."""


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    seen = decode(encode(x.reshape(-1, x.shape[-1]), BLOCKWISE.activations), torch.float32).double()
    return (seen @ decode(encode(w, BLOCKWISE.weights), torch.float32).double().mT).view(*x.shape[:-1], -1)


@pytest.mark.parametrize(("batch", "depth", "num_cols"), SHAPES)
def test_the_product_of_codes_is_that_of_what_they_stand_for(batch: tuple[int, ...], depth: int, num_cols: int) -> None:
    torch.manual_seed(depth)
    x = torch.randn(*batch, depth, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(num_cols, depth, device="cuda", dtype=torch.bfloat16)
    w *= 2.0 ** torch.randint(-6, 6, (num_cols // 128, 1, depth // 128, 1), device="cuda").expand(
        -1, 128, -1, 128
    ).reshape(w.shape)  # tiles whose scales are far apart: a wrong one is seen
    codes = encode(w, BLOCKWISE.weights)
    assert multiplies_codes(
        encode(torch.zeros(8, depth, device="cuda", dtype=torch.bfloat16), BLOCKWISE.activations), codes
    )
    found, expected = product(x, codes, BLOCKWISE), exact(x, w)
    assert found.shape == (*batch, num_cols)
    assert found.dtype == torch.bfloat16
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 2**-8  # the sum is fp32, and rounded to bf16 once


@pytest.mark.parametrize(("num_rows", "num_cols"), [(640, 384), (1024, 512)])
def test_the_transposed_codes_of_a_tile_are_multiplied_too(num_rows: int, num_cols: int) -> None:
    torch.manual_seed(0)
    module = nn.Linear(num_rows, num_cols, bias=False, device="cuda", dtype=torch.bfloat16)
    w = module.weight.detach().clone()
    layerwise.quantize(module, recipe="blockwise", skip=[])
    x = torch.randn(24, num_rows, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(24, num_cols, device="cuda", dtype=torch.bfloat16)
    module(x).backward(grad)
    expected = exact(grad, w.mT.contiguous())
    assert x.grad is not None
    assert (x.grad.double() - expected).norm() / expected.norm() < 2**-8

"""Who writes codes, and whether to trust it: torch, or a kernel of our own where it runs and has torch's bits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from layerwise.errors import warn
from layerwise.kernels.codec import ELEMENTS, SCALES, Codes, encode_by_torch
from layerwise.kernels.facts import encoder_for
from layerwise.layout.recipes import BlockFormat


def encode(x: Tensor, format: BlockFormat) -> Codes:
    """The codes of x, in new memory."""
    out = Codes.empty(tuple(x.shape), format, x.device)
    encode_into(x, out)
    return out


def encode_into(x: Tensor, out: Codes) -> None:
    """Leave the codes of x, of bf16 or fp32, in `out`."""
    _check(x, out, tuple(x.shape))
    if _has_kernel(x, out):
        from layerwise.kernels.triton_codec import fused_encode

        fused_encode(x, out, None)
        return
    encode_by_torch(x, out)


def encode_both_into(x: Tensor, rows: Codes, cols: Codes) -> None:
    """Leave the codes of x in `rows` and those of its transpose in `cols`."""
    _check(x, rows, tuple(x.shape))
    _check(x, cols, tuple(x.mT.shape))
    if rows.format == cols.format and _has_kernel(x, rows, cols):
        from layerwise.kernels.triton_codec import fused_encode

        fused_encode(x, rows, cols)
        return
    encode_into(x, rows)
    encode_into(x.mT, cols)


def _has_kernel(x: Tensor, *outs: Codes) -> bool:
    """Whether our own kernel can write these codes."""
    if not all(tensor.is_contiguous() for out in outs for tensor in (out.values, out.scales_in_order)):
        return False
    format = outs[0].format
    return encoder_for(x, format).backend == "triton" and _is_exact(x.device, format)


@cache
def _is_exact(device: torch.device, format: BlockFormat) -> bool:
    """Whether our own kernel writes torch's bits on this device: tried once, on numbers of every kind. It is made of
    instructions that compilers and cards have changed before."""
    from layerwise.kernels.triton_codec import fused_encode

    bits = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)  # all there are
    spread = bits[torch.randperm(bits.numel(), generator=torch.Generator().manual_seed(0), device="cpu").to(device)]
    finite = spread.nan_to_num(1.0, 2.0, -2.0).view(2, 128, 256)
    for x in (finite, spread.view(2, 128, 256), finite[:, :104, :152].contiguous()):
        found, expected = ([Codes.empty(tuple(y.shape), format, device) for y in (x, x.mT)] for _ in range(2))
        try:
            fused_encode(x, found[0], found[1])
        except Exception as error:
            warn(f"our own kernel for codes does not run here, torch writes them: {type(error).__name__}: {error}.")
            return False
        for y, out in zip((x, x.mT), expected, strict=True):
            encode_by_torch(y, out)
        if not all(map(_same_bits, found, expected)):
            warn(f"our own kernel for codes of {format} has other bits than torch on {device}: torch writes them.")
            return False
    return True


def _same_bits(one: Codes, other: Codes) -> bool:
    pairs = ((one.values, other.values), (one.scales, other.scales))
    return all(
        torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8)) for left, right in pairs
    )


def _check(x: Tensor, out: Codes, shape: tuple[int, ...]) -> None:
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"only bf16 and fp32 are encoded, got {x.dtype}. Cast first.")
    wanted = (
        ("values", out.values, shape, ELEMENTS[out.format.element].dtype),
        ("scales", out.scales, out.format.scales_shape(shape), SCALES[out.format.scale]),
    )
    for name, found, size, dtype in wanted:
        if tuple(found.shape) != size or found.dtype != dtype or found.device != x.device:
            raise ValueError(
                f"the {name} of the codes do not fit what is encoded: expected {dtype} of shape {size} on {x.device}, "
                f"got {found.dtype} of shape {tuple(found.shape)} on {found.device}."
            )

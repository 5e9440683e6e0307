"""What the kernels' choices are made from: the device, and whether Triton is there."""

from __future__ import annotations

from functools import cache
from importlib import metadata

import torch
from torch import Tensor

from layerwise.kernels.encoders import Encoder, choose_encoder
from layerwise.kernels.products import Products, choose_products
from layerwise.layout.recipes import BlockFormat

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@cache
def products_for(device: torch.device, input_dtype: torch.dtype, dtype: torch.dtype) -> Products:
    """Who multiplies matrices of `input_dtype` on this device when Newton-Schulz is to run in `dtype`, and why."""
    return choose_products(
        device=device.type,
        capability=_capability(device),
        triton=_triton_version(),
        input_dtype=_NAMES.get(input_dtype, str(input_dtype)),
        dtype=_NAMES.get(dtype, str(dtype)),
    )


def has_own_kernels(device: torch.device) -> bool:
    """Whether our own kernels run on this device at all."""
    return products_for(device, torch.bfloat16, torch.bfloat16).backend == "triton"


def products_in_words(device: torch.device, input_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """The same as a sentence, with how they are launched."""
    products = products_for(device, input_dtype, dtype)
    launched = ""
    if products.backend == "triton":
        known = [why for (place, _), why in _chains.items() if place == device]
        why = max(known, key=len) if known else why_no_chains(device, torch.float16)
        launched = f", one launch each: {why}" if why else ", several in one launch where they are small"
    return f"{products.backend}: {products.reason}{launched}"


_chains: dict[tuple[torch.device, torch.dtype], str] = {}
"""Why there are none, by device and dtype; empty where there are."""


def chains_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether several products can be one launch there."""
    return not why_no_chains(device, dtype)


def give_up_chains(device: torch.device, dtype: torch.dtype, why: str) -> None:
    """There are none from here on."""
    _chains[device, dtype] = why


def why_no_chains(device: torch.device, dtype: torch.dtype) -> str:
    """Empty where there are chains. The first call compiles them."""
    if (device, dtype) not in _chains:
        if device.type != "cuda":
            return f"there are none on {device.type}"
        if torch.cuda.is_current_stream_capturing():
            return "nothing can be loaded while a stream is recorded"
        from layerwise.kernels.chain_driver import why_none

        _chains[device, dtype] = why_none(device, dtype)
    return _chains[device, dtype]


def encoder_for(x: Tensor, format: BlockFormat) -> Encoder:
    """Who writes the codes of a tensor, and why."""
    return choose_encoder(
        device=x.device.type,
        capability=_capability(x.device),
        triton=_triton_version(),
        format=format,
        dtype=_NAMES.get(x.dtype, str(x.dtype)),
        shape=tuple(x.shape),
    )


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if is_cuda else None


@cache
def _triton_version() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None

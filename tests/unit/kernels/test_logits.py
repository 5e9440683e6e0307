"""Largest logits in blocks are those of all logits at once."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerwise.kernels import logits as module
from layerwise.kernels.logits import max_logits


def whole_numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: their products add up exactly in any order, and in any dtype."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def naive(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    """All logits, written down."""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    key = key.repeat_interleave(heads // kv_heads, dim=-3)
    all_logits = query.float() @ key.float().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        kept = torch.ones(all_logits.shape[-2:], dtype=torch.bool).tril()
        all_logits = torch.where(kept, all_logits, -math.inf)
    if mask is not None:
        all_logits = torch.where(mask, all_logits, -math.inf) if mask.dtype == torch.bool else all_logits + mask
    return all_logits.movedim(-3, 0).flatten(1).amax(dim=1)


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "as many key heads": ((2, 3, 7, 4), (2, 3, 7, 4)),
    "two query heads on each key head": ((2, 4, 7, 4), (2, 2, 7, 4)),
    "one key head": ((3, 4, 5, 16), (3, 1, 5, 16)),
    "more keys than queries": ((2, 2, 3, 4), (2, 2, 9, 4)),
    "more queries than keys": ((2, 2, 9, 4), (2, 2, 3, 4)),
    "no batch": ((2, 6, 4), (2, 6, 4)),
    "two batch dims, one of the key's shared": ((2, 3, 2, 5, 4), (2, 1, 2, 5, 4)),
    "one position": ((2, 2, 1, 4), (2, 2, 1, 4)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("limits", [(2**24, 256), (1, 1), (60, 2)], ids=["one block", "row by row", "small blocks"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_blocks_have_the_maximum_of_the_whole(shapes: Any, limits: tuple[int, int], dtype: torch.dtype) -> None:
    query, key = whole_numbers(*shapes[0], dtype=dtype), whole_numbers(*shapes[1], seed=1, dtype=dtype)
    size = (query.shape[-2], key.shape[-2])
    kept = whole_numbers(*size, seed=2) > -2
    per_head = whole_numbers(query.shape[-3], *size, seed=3)
    per_sample = whole_numbers(*query.shape[:-3], 1, *size, seed=4)
    per_both = whole_numbers(*query.shape[:-2], *size, seed=5)
    with mock.patch.multiple(module, _BLOCK_NUMEL=limits[0], _MOST_ROWS=limits[1]):
        for mask, is_causal, scale in (
            (None, False, None),
            (None, True, None),
            (None, True, 0.125),
            (None, False, -0.5),
            (kept, False, None),
            (per_head > 0, False, 2.0),
            (per_head, False, None),
            (torch.where(kept, 0.0, -math.inf), False, None),
            (per_sample > -2, False, None),
            (per_sample, False, 0.5),
            (per_both > 0, False, None),
            (4.0 * per_both, False, None),
        ):
            found = max_logits(query, key, mask, is_causal=is_causal, scale=scale)
            assert found.dtype == torch.float32
            assert torch.equal(found, naive(query, key, mask, is_causal, scale).float())


def test_never_all_logits_at_once() -> None:
    query, key = whole_numbers(3, 4, 64, 4), whole_numbers(3, 2, 64, 4, seed=1)
    sizes, bmm = [], torch.bmm

    def measured(*args: Any, **named: Any) -> Tensor:
        sizes.append((found := bmm(*args, **named)).numel())
        return found

    with mock.patch.multiple(module, _BLOCK_NUMEL=2048, _MOST_ROWS=16), mock.patch("torch.bmm", measured):
        found = max_logits(query, key, is_causal=True)
    assert max(sizes) <= 2048 < 3 * 4 * 64 * 64
    assert torch.equal(found, naive(query, key, None, True, None))


def test_nan_is_kept_and_what_is_masked_does_not_count() -> None:
    query, key = whole_numbers(1, 3, 4, 4), whole_numbers(1, 3, 4, 4, seed=1)
    query[0, 0, 2, 1] = math.nan
    key[0, 1, 3, 0] = math.inf  # the last key, which only the last query may see
    query[0, 1, :, 0] = 1.0
    causal = max_logits(query, key, is_causal=True)
    assert math.isnan(causal[0])
    assert causal[1] == math.inf
    masked = torch.ones(4, 4, dtype=torch.bool)
    masked[:, 3] = masked[2] = False
    found = max_logits(query, key, masked)
    assert found.isfinite().all()
    assert torch.equal(max_logits(query, key, torch.zeros(4, 4, dtype=torch.bool)), torch.full((3,), -math.inf))
    assert torch.equal(max_logits(query[:, :, :0], key), torch.full((3,), -math.inf))


def test_neither_autocast_nor_gradients_change_it() -> None:
    query, key = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(2))
    plain = max_logits(query, key)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(max_logits(query, key), plain)
    assert not plain.requires_grad

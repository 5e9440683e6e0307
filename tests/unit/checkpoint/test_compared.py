"""The number by which ranks compare what they hold after a load."""

from __future__ import annotations

import pytest
import torch

from layerwise.checkpoint.loading import _sum

SIZES = (0, 1, 63, 64, 127, 128, 129, 1000, 4099)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("numel", SIZES)
def test_one_bit_anywhere_counts(numel: int, dtype: torch.dtype) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    found = _sum(flat)
    assert found == _sum(flat.clone())
    for place in range(0, numel, max(1, numel // 40)):
        other = flat.clone()
        other[place : place + 1].view(torch.uint8)[0] ^= 1
        assert _sum(other) != found


def test_the_same_elements_count_alike_wherever_they_lie_in_memory() -> None:
    memory = torch.randn(1030).to(torch.bfloat16)
    for start in range(5):
        assert _sum(memory[start : start + 1024]) == _sum(memory[start : start + 1024].clone())


def test_rows_that_have_changed_places_are_seen() -> None:
    flat = torch.randn(4096)
    first, second, rest = flat.split((128, 128, 3840))
    assert _sum(torch.cat((second, first, rest))) != _sum(flat)

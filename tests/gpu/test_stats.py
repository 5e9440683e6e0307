"""Sums over lists of tensors by our own kernels, on a GPU or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from layerwise.kernels.stats import count_zeros, group_sums, square_sums
from layerwise.kernels.triton_stats import fused_square_sums, fused_zero_counts
from tests.gpu.lists import COUNTS, DEVICE, PLACES, Guarded, lengths, numbers, same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(value: Tensor) -> float:
    return math.fsum((value.double() ** 2).flatten().tolist())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", COUNTS)
def test_square_sums_of_a_list(count: int, place: str) -> None:
    values = [numbers(n, n) for n in (*lengths(count), 16385)]
    guarded = Guarded(values, place)
    found = fused_square_sums(guarded.views)
    once = {numel: exact(value) for numel, value in {value.numel(): value for value in values}.items()}
    expected = torch.tensor([once[value.numel()] for value in values], dtype=torch.float64)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-15, atol=0)
    guarded.check_around()


def test_a_sum_has_the_same_bits_wherever_a_tensor_lies() -> None:
    values = [numbers(n, n) for n in (*lengths(max(COUNTS)), 16385)]
    together = fused_square_sums(values)
    same_bits([fused_square_sums(values)], [together])
    same_bits([fused_square_sums(Guarded(values, "odd").views)], [together])
    for value, one in list(zip(values, together, strict=True))[:20]:
        same_bits([fused_square_sums([value])[0]], [one])


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_dtypes_views_and_mixtures(dtype: torch.dtype) -> None:
    values = [
        numbers(5000, 1).to(dtype),
        numbers((30, 40), 2).mT.to(dtype),
        numbers(77, 3),
        torch.zeros(0, device=DEVICE),
    ]
    found = fused_square_sums(values)
    expected = torch.tensor([exact(value) for value in values], dtype=torch.float64)
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-15, atol=0)


def test_what_is_not_finite_shows_in_its_own_sum_alone() -> None:
    values = [torch.ones(5000, device=DEVICE) for _ in range(4)]
    values[1][4999], values[2][0] = math.inf, math.nan
    found = fused_square_sums(values).tolist()
    assert found[0] == found[3] == 5000.0
    assert found[1] == math.inf
    assert math.isnan(found[2])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", COUNTS)
def test_zeros_are_counted(count: int, place: str) -> None:
    values = [numbers(n, n) * (numbers(n, n + 1) > 0.01) for n in lengths(count)]
    for value in values:
        value[:1], value[1:2], value[2:3] = -0.0, math.nan, 1e-45
    guarded = Guarded(values, place)
    expected = torch.tensor([float((value == 0).sum()) for value in values], dtype=torch.float64)
    same_bits([fused_zero_counts(guarded.views).cpu()], [expected])
    same_bits([count_zeros(guarded.views).cpu()], [expected.sum()])


def test_a_list_of_none_and_empty_tensors() -> None:
    nothing = torch.zeros(0, device=DEVICE)
    assert square_sums([]).tolist() == []
    assert fused_square_sums([nothing, torch.ones(3, device=DEVICE), nothing]).tolist() == [0.0, 3.0, 0.0]
    assert fused_zero_counts([nothing]).tolist() == [0.0]
    assert float(count_zeros([])) == 0.0


def test_sums_of_norm_groups_repeat_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(20_000, generator=generator, dtype=torch.float64).to(DEVICE)
    group_of = torch.randint(0, 3, (20_000,), generator=generator).to(DEVICE)
    first = group_sums(values, group_of, 4)
    assert all(torch.equal(group_sums(values, group_of, 4), first) for _ in range(200))
    assert torch.allclose(first.cpu(), group_sums(values.cpu(), group_of.cpu(), 4), rtol=1e-12, atol=0.0)

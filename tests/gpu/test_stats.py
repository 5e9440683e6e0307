"""Sums over lists of tensors by our own kernels, on a GPU or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import layerwise
from layerwise.engine.policy import StepPolicy
from layerwise.kernels.stats import add_totals, count_zeros, group_sums, square_sums, verdict_of
from layerwise.kernels.triton_stats import fused_square_sums, fused_totals, fused_verdict, fused_zero_counts
from layerwise.kernels.verdicts import LARGEST, Bounds
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


@pytest.mark.parametrize("count", [1, 511, 2000])
def test_totals_of_groups_and_counts_of_what_is_not_finite_in_one_launch(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    sums = torch.randint(0, 1000, (count,), generator=generator).double()  # exact in any order
    group_of = torch.randint(-1, 3, (count,), generator=generator)
    place_of = torch.randint(0, 7, (count,), generator=generator)
    for index, bad in enumerate((math.inf, math.nan, -math.inf)):
        found = sums.clone().to(DEVICE)
        found[index::97] = bad
        vectors = [torch.zeros(13, dtype=torch.float64, device=DEVICE) for _ in range(2)]
        for vector, add in zip(vectors, (fused_totals, in_several), strict=True):
            add(found, group_of.to(DEVICE), place_of.to(DEVICE), vector[1:5], vector[5:12])
        same_bits(vectors[:1], vectors[1:])
        assert vectors[0][5:12].sum() == len(found[index::97])
        first = vectors[0].clone()
        for _ in range(3):
            vectors[0].zero_()
            fused_totals(found, group_of.to(DEVICE), place_of.to(DEVICE), vectors[0][1:5], vectors[0][5:12])
            same_bits([vectors[0]], [first])


NAMES = ("experts", "matrix", "other", "routers")


def bounds(**asked: Any) -> Bounds:
    clip_grad_norm = asked.pop("clip_grad_norm", None)
    return StepPolicy(layerwise.GradientPolicy(**asked), clip_grad_norm).bounds(NAMES, 4.0)


def by_hand(sums: list[float], clip: float, apart: bool) -> list[float]:
    """Factors of the four groups, whose norms are those of sums that are four times too large."""
    family = math.sqrt(sums[2] if apart else sums[1] + sums[2]) / 4.0
    norms = [math.sqrt(sums[0]) / 4.0, 0.0 if apart else family, family, math.sqrt(sums[3]) / 4.0]
    return [min(1.0, clip / (norm + 1e-6)) for norm in norms]


@pytest.mark.parametrize("params", [1, 511, 513])
def test_a_verdict_has_the_bits_of_its_formulas(params: int) -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        sums = (torch.rand(4, generator=generator, dtype=torch.float64) * 3.0**seed).tolist()
        vector = torch.tensor([5.0, *sums, *[0.0] * params], dtype=torch.float64, device=DEVICE)
        for scope in ("all", "other-only"):
            found = fused_verdict(vector[1:5], vector[5:], bounds(clip_grad_norm=0.37, clip=scope))
            expected = torch.tensor([1.0, 1.0, *by_hand(sums, 0.37, scope == "other-only")], dtype=torch.float64)
            same_bits([found.cpu()], [expected.float()])
            assert scope == "all" or found[3] == 1.0


def test_a_verdict_skips_for_what_is_not_finite_and_for_norms_above_a_bound() -> None:
    groups = torch.tensor([1e9, 144.0, 256.0, 1e9], dtype=torch.float64, device=DEVICE)  # a norm of 5
    fine, bad = (torch.zeros(700, dtype=torch.float64, device=DEVICE) for _ in range(2))
    bad[600] = 1.0
    assert fused_verdict(groups, fine, bounds()).tolist() == [1.0] * 6
    assert fused_verdict(groups, bad, bounds()).tolist()[0] == 0.0
    assert fused_verdict(groups, bad, bounds(nonfinite="ignore")).tolist()[0] == 1.0
    assert fused_verdict(groups, fine, bounds(skip_above=5.0)).tolist()[0] == 1.0
    assert fused_verdict(groups, fine, bounds(skip_above=4.99)).tolist()[0] == 0.0
    for number in (math.nan, math.inf):
        groups[1] = number
        ignored = fused_verdict(groups, bad, bounds(nonfinite="ignore", clip_grad_norm=1.0)).tolist()
        assert ignored[:1] == [1.0]
        assert ignored[3:5] == [1.0 if math.isnan(number) else 0.0] * 2  # as Python's min() has it


@pytest.mark.parametrize("group", range(4))
def test_a_verdict_skips_for_a_norm_whose_square_overflows_after_clipping(group: int) -> None:
    """At the bound to the bit, as the formulas have it that a host decides by."""
    fine = torch.zeros(700, dtype=torch.float64, device=DEVICE)
    largest = 4.0 * LARGEST  # the divisor of these bounds
    for norm in (math.nextafter(largest, 0.0), largest, math.nextafter(largest, math.inf), 1e30):
        numbers = [1.0] * 4
        numbers[group] = norm * norm
        groups = torch.tensor(numbers, dtype=torch.float64, device=DEVICE)
        for asked in (
            {},
            {"nonfinite": "ignore"},
            {"clip_grad_norm": 1.0},
            {"clip_grad_norm": 3e19, "clip": "other-only"},
        ):
            here = bounds(**asked)
            assert fused_verdict(groups, fine, here).tolist() == verdict_of(groups.cpu(), fine.cpu(), here).tolist()
    assert fused_verdict(groups, fine, bounds()).tolist()[0] == 0.0


def in_several(sums: Tensor, group_of: Tensor, place_of: Tensor, groups: Tensor, nonfinite: Tensor) -> None:
    """As where there are no kernels of our own."""
    found = [torch.zeros(len(part), dtype=torch.float64) for part in (groups, nonfinite)]
    add_totals(sums.cpu(), group_of.cpu(), place_of.cpu(), groups=found[0], nonfinite=found[1])
    groups.copy_(found[0])
    nonfinite.copy_(found[1])

from __future__ import annotations

import math

import pytest
import torch

from layerwise.kernels import stats
from layerwise.kernels.stats import add_totals, group_sums, masked_sums, square_sums


def test_sums_of_a_group_are_taken_in_the_order_of_its_values() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(999, generator=generator, dtype=torch.float64)
    group_of = torch.randint(0, 3, (999,), generator=generator)
    expected = [0.0, 0.0, 0.0, 0.0]
    for value, group in zip(values.tolist(), group_of.tolist(), strict=True):
        expected[group] += value
    assert group_sums(values, group_of, 4).tolist() == expected


def test_the_sums_without_atomics_are_those_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 1000, (999,), generator=generator).double()  # exact in any order
    group_of = torch.randint(0, 3, (999,), generator=generator)
    assert torch.equal(masked_sums(values, group_of, 4), group_sums(values, group_of, 4))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_group(bad: float) -> None:
    found = masked_sums(torch.tensor([1.0, bad, 2.0]), torch.tensor([0, 1, 0]), 3)
    assert found[0] == 3.0
    assert not math.isfinite(found[1])
    assert found[2] == 0.0


def test_nothing_sums_to_nothing() -> None:
    nothing, nowhere = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long)
    assert masked_sums(nothing, nowhere, 2).tolist() == group_sums(nothing, nowhere, 2).tolist() == [0.0, 0.0]


def test_a_long_span_is_summed_in_pieces_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_CHUNK", 4)
    span = torch.tensor([3.0, 1.0, 2.0, 5.0, 7.0, 1.0, 4.0, 2.0, 6.0])
    assert square_sums([span, span[:0], span[:4]]).tolist() == [145.0, 0.0, 39.0]


def test_totals_leave_out_what_counts_in_no_group_but_not_what_is_wrong_with_it() -> None:
    groups, nonfinite = torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    sums = torch.tensor([1.0, 2.0, math.nan, 4.0, math.inf], dtype=torch.float64)
    group_of, place_of = torch.tensor([0, 1, -1, 0, -1]), torch.tensor([0, 1, 1, 2, 1])
    add_totals(sums, group_of, place_of, groups=groups, nonfinite=nonfinite)
    assert groups.tolist() == [5.0, 2.0]
    assert nonfinite.tolist() == [0.0, 2.0, 0.0]

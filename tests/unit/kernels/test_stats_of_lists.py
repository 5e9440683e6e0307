"""Sums over gradients of any shape and dtype."""

from __future__ import annotations

import math

import torch

from layerwise.kernels.stats import count_zeros, square_sums

SPANS = [torch.tensor([[3.0, 0.0], [-0.0, 4.0]]).mT, torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.zeros(0)]


def test_each_span_has_a_sum_of_squares_of_its_own() -> None:
    assert square_sums(SPANS).tolist() == [25.0, 6.25, 0.0]
    assert square_sums([]).tolist() == []


def test_what_is_not_finite_shows() -> None:
    found = square_sums([torch.tensor([1.0, math.inf]), torch.tensor([math.nan]), torch.tensor([1e30])]).tolist()
    assert found[0] == math.inf
    assert math.isnan(found[1])
    assert math.isfinite(found[2])


def test_zeros_of_both_signs_are_counted_over_all_spans() -> None:
    assert float(count_zeros(SPANS)) == 2.0
    assert float(count_zeros([])) == 0.0

"""The element-wise formulas, each against a few lines of plain Python on single numbers. No option has a neutral value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerwise.kernels.elementwise import adamw_, copy_all_, couple_, keep_of, lion_, momentum_, subtract_scaled_
from layerwise.kernels.second_moment import normalise_elements, normalise_rows

WEIGHTS = [0.5, -1.25, 2.0, 0.0]
GRADS = [[0.75, -0.5, 0.125, 1.0], [-0.25, -1.0, 0.5, 0.0], [0.0, 2.0, -0.75, -0.5]]
"""One list for each step."""


def two_runs(values: list[float]) -> list[torch.Tensor]:
    """The same numbers as a run of one and a run of the rest."""
    return [torch.tensor(values[:1]), torch.tensor(values[1:])]


def joined(runs: list[torch.Tensor]) -> list[float]:
    return torch.cat(runs).tolist()


def close(expected: list[float]) -> object:
    return pytest.approx(expected, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize(("mode", "kept"), [("decoupled", 1 - 0.3 * 0.2), ("independent", 1 - 0.2), ("coupled", 1.0)])
def test_what_decay_keeps_in_every_mode(mode: str, kept: float) -> None:
    assert keep_of(lr=0.3, weight_decay=0.2, mode=mode) == pytest.approx(kept)


def test_decay_that_is_coupled_is_a_part_of_the_clipped_gradient() -> None:
    masters, grads = two_runs(WEIGHTS), two_runs(GRADS[0])
    couple_(grads, masters, weight_decay=0.2, scale=0.5)
    assert joined(masters) == close(WEIGHTS)
    assert joined(grads) == close([0.5 * g + 0.2 * w for g, w in zip(GRADS[0], WEIGHTS, strict=True)])


def test_an_unknown_mode_of_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay_mode must be decoupled, independent or coupled, got 'other'"):
        keep_of(lr=0.1, weight_decay=0.1, mode="other")


def kept_and_scaled(update: Callable[..., None], state: int, **given: Any) -> None:
    """An update with `keep` and `scale` is the same bits as one of weights and gradients that were multiplied before."""
    on_the_way = two_runs(WEIGHTS), two_runs(GRADS[0])
    before = [[run * 0.75 for run in on_the_way[0]], [run * 0.3 for run in on_the_way[1]]]
    states, other_states = ([two_runs(GRADS[1]) for _ in range(state)] for _ in range(2))
    update(*on_the_way, *[[run.abs() for run in runs] for runs in states], **given, keep=0.75, scale=0.3)
    update(*before, *[[run.abs() for run in runs] for runs in other_states], **given)
    assert joined(on_the_way[0]) == joined(before[0]) != WEIGHTS


def test_weights_decay_and_gradients_are_clipped_on_the_way() -> None:
    kept_and_scaled(adamw_, 2, step=3, lr=0.1, betas=(0.9, 0.8), eps=1e-8)
    kept_and_scaled(lion_, 1, lr=0.1, betas=(0.9, 0.8))


def test_momentum_of_gradients_that_are_clipped_on_the_way() -> None:
    grads, clipped = two_runs(GRADS[0]), [run * 0.3 for run in two_runs(GRADS[0])]
    momenta, others = two_runs(GRADS[1]), two_runs(GRADS[1])
    momentum_(grads, momenta, momentum=0.9, nesterov=True, scale=0.3)
    momentum_(clipped, others, momentum=0.9, nesterov=True)
    assert (joined(grads), joined(momenta)) == (joined(clipped), joined(others))


def test_masters_decay_as_directions_are_taken_off_them() -> None:
    masters = two_runs(WEIGHTS)
    lengths = [run.numel() for run in masters]
    subtract_scaled_(masters, two_runs(GRADS[0]), [0.5, 3.0], [0.9, 1.0])
    factors, keeps = ([*[first] * lengths[0], *[second] * lengths[1]] for first, second in ((0.5, 3.0), (0.9, 1.0)))
    expected = [k * w - f * g for k, w, f, g in zip(keeps, WEIGHTS, factors, GRADS[0], strict=True)]
    assert joined(masters) == close(expected)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_is_an_average_and_nesterov_looks_one_step_ahead(nesterov: bool) -> None:
    mu, kept = 0.7, [0.0] * 4
    momenta = two_runs(kept)
    for step in GRADS:
        grads = two_runs(step)
        momentum_(grads, momenta, momentum=mu, nesterov=nesterov)
        kept = [mu * m + (1 - mu) * g for m, g in zip(kept, step, strict=True)]
        ahead = [(1 - mu) * g + mu * m for m, g in zip(kept, step, strict=True)]
        assert joined(momenta) == close(kept)
        assert joined(grads) == close(ahead if nesterov else kept)


def test_momentum_goes_elsewhere_in_the_dtype_there() -> None:
    grads, momenta = two_runs(GRADS[0]), two_runs([0.0] * 4)
    expected = [(0.3 + 0.7 * 0.3) * g for g in GRADS[0]]
    into = [torch.empty_like(grad, dtype=torch.bfloat16) for grad in grads]
    momentum_(grads, momenta, into, momentum=0.7, nesterov=True)
    assert joined(into) == [float(torch.tensor(e).bfloat16()) for e in expected]


def test_an_update_is_taken_off_with_the_factor_of_its_run() -> None:
    masters = two_runs(WEIGHTS)
    subtract_scaled_(masters, two_runs(GRADS[0]), [0.5, 3.0])
    factors = [0.5, 3.0, 3.0, 3.0]
    assert joined(masters) == close([w - f * u for w, f, u in zip(WEIGHTS, factors, GRADS[0], strict=True)])


def test_an_update_in_bf16_is_multiplied_in_the_dtype_of_the_weights() -> None:
    weights, update = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, -1.5], [1.0, 3.0]])
    kept = update.bfloat16()
    subtract_scaled_([weights], [kept.mT], [0.1])
    assert weights.flatten().tolist() == close([1 - 0.05, 2 - 0.1, 3 + 0.15, 4 - 0.3])
    assert torch.equal(kept, update.bfloat16())


def test_copies_cast_and_keep_to_their_views() -> None:
    whole, other = torch.zeros(3, 4), torch.zeros(2, dtype=torch.bfloat16)
    sources = [torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16), torch.tensor([1.0, 2.0])]
    copy_all_([whole[:, 1:3], other], sources)
    assert whole.tolist() == [[0, 1, 2, 0], [0, 3, 4, 0], [0, 5, 6, 0]]
    assert other.tolist() == [1, 2]
    copy_all_([], [])


def test_adamw_corrects_both_averages_for_their_start() -> None:
    lr, (beta1, beta2), eps = 0.03, (0.6, 0.8), 0.05
    masters, firsts, seconds = two_runs(WEIGHTS), two_runs([0.0] * 4), two_runs([0.0] * 4)
    weights, m, v = list(WEIGHTS), [0.0] * 4, [0.0] * 4
    for step, grads in enumerate(GRADS, start=1):
        adamw_(masters, two_runs(grads), firsts, seconds, step=step, lr=lr, betas=(beta1, beta2), eps=eps)
        for i, g in enumerate(grads):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g * g
            mean, square = m[i] / (1 - beta1**step), v[i] / (1 - beta2**step)
            weights[i] -= lr * mean / (math.sqrt(square) + eps)
        assert joined(firsts) == close(m)
        assert joined(seconds) == close(v)
        assert joined(masters) == close(weights)


def test_lion_steps_along_one_average_and_keeps_another() -> None:
    lr, (beta1, beta2) = 0.03, (0.6, 0.8)
    masters, averages = two_runs(WEIGHTS), two_runs([0.0] * 4)
    weights, m = list(WEIGHTS), [0.0] * 4
    for grads in GRADS:
        lion_(masters, two_runs(grads), averages, lr=lr, betas=(beta1, beta2))
        for i, g in enumerate(grads):
            direction = beta1 * m[i] + (1 - beta1) * g
            weights[i] -= lr * ((direction > 0) - (direction < 0))
            m[i] = beta2 * m[i] + (1 - beta2) * g
        assert joined(averages) == close(m)
        assert joined(masters) == close(weights)


def test_an_empty_list_of_runs_is_nothing_to_do() -> None:
    couple_([], [], weight_decay=0.1)
    momentum_([], [], momentum=0.9, nesterov=True)
    subtract_scaled_([], [], [])
    adamw_([], [], [], [], step=1, lr=0.1, betas=(0.9, 0.9), eps=1e-8)
    lion_([], [], [], lr=0.1, betas=(0.9, 0.9))


UPDATES = [[[0.5, -1.0, 2.0], [1.5, 0.25, 0.0]], [[-1.0, 0.5, 0.5], [0.0, 2.0, -1.0]]]
"""A matrix of two rows for each step."""


def to_polar_norm(rows: list[list[float]]) -> list[float]:
    """Scaled to the Frobenius norm of a polar factor of two rows and three columns."""
    norm = math.sqrt(sum(value * value for row in rows for value in row))
    return [value * math.sqrt(2) / norm for row in rows for value in row]


def test_normuon_divides_rows_by_the_root_of_their_running_mean_square() -> None:
    beta2, eps, moment, kept = 0.6, 0.1, torch.zeros(1, 2), [0.0, 0.0]
    for rows in UPDATES:
        found = normalise_rows(torch.tensor([rows]), moment, beta2=beta2, eps=eps)
        kept = [beta2 * k + (1 - beta2) * sum(v * v for v in row) / 3 for k, row in zip(kept, rows, strict=True)]
        divided = [[v / (math.sqrt(k) + eps) for v in row] for k, row in zip(kept, rows, strict=True)]
        assert moment[0].tolist() == close(kept)
        assert found.flatten().tolist() == close(to_polar_norm(divided))


def test_adamuon_divides_elements_by_the_root_of_their_running_square() -> None:
    beta2, eps, moment, kept = 0.6, 0.1, torch.zeros(1, 2, 3), [[0.0] * 3] * 2
    for rows in UPDATES:
        found = normalise_elements(torch.tensor([rows]), moment, beta2=beta2, eps=eps)
        kept = [
            [beta2 * k + (1 - beta2) * v * v for k, v in zip(ks, row, strict=True)]
            for ks, row in zip(kept, rows, strict=True)
        ]
        divided = [
            [v / (math.sqrt(k) + eps) for k, v in zip(ks, row, strict=True)] for ks, row in zip(kept, rows, strict=True)
        ]
        assert moment.flatten().tolist() == close([k for ks in kept for k in ks])
        assert found.flatten().tolist() == close(to_polar_norm(divided))

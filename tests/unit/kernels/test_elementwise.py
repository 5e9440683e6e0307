"""The element-wise formulas, each against a few lines of plain Python on single numbers. No option has a neutral value."""

from __future__ import annotations

import math

import pytest
import torch

from layerwise.kernels.elementwise import adamw_, copy_all_, decay_, lion_, momentum_, subtract_scaled_
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


@pytest.mark.parametrize(
    ("mode", "expected_weights", "expected_grads"),
    [
        ("decoupled", [w * (1 - 0.3 * 0.2) for w in WEIGHTS], GRADS[0]),
        ("independent", [w * (1 - 0.2) for w in WEIGHTS], GRADS[0]),
        ("coupled", WEIGHTS, [g + 0.2 * w for g, w in zip(GRADS[0], WEIGHTS, strict=True)]),
    ],
)
def test_decay_in_every_mode(mode: str, expected_weights: list[float], expected_grads: list[float]) -> None:
    masters, grads = two_runs(WEIGHTS), two_runs(GRADS[0])
    decay_(masters, grads, lr=0.3, weight_decay=0.2, mode=mode)
    assert joined(masters) == close(expected_weights)
    assert joined(grads) == close(expected_grads)


def test_an_unknown_mode_of_decay_is_refused() -> None:
    with pytest.raises(ValueError, match="weight_decay_mode must be decoupled, independent or coupled, got 'other'"):
        decay_([torch.ones(1)], [torch.ones(1)], lr=0.1, weight_decay=0.1, mode="other")


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
    decay_([], [], lr=0.1, weight_decay=0.1, mode="coupled")
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

"""Coefficient sets: what a schedule holds past its set, where it sends singular values, and what is refused."""

from __future__ import annotations

import pytest

from layerwise.config.coefficients import COEFFICIENT_SETS, Coefficient, check_coefficients, coefficient_schedule

CYCLING = ("simple", "quintic")
REPEATING = ("polar_express", "cans", "deepseekv4")
FIXED = ("aol", "cubic5")


def applied(schedule: tuple[Coefficient, ...], value: float) -> float:
    for a, b, c in schedule:
        value = a * value + b * value**3 + c * value**5
    return value


def band(schedule: tuple[Coefficient, ...], low: float, high: float) -> tuple[float, float]:
    values = [applied(schedule, low + (high - low) * point / 5000) for point in range(5001)]
    return min(values), max(values)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("simple", 1),
        ("quintic", 5),
        ("polar_express", 8),
        ("cans", 5),
        ("aol", 4),
        ("deepseekv4", 10),
        ("cubic5", 5),
    ],
)
def test_a_set_has_its_published_number_of_steps_and_a_source(name: str, length: int) -> None:
    assert len(COEFFICIENT_SETS[name].triples) == length
    assert COEFFICIENT_SETS[name].source


def test_every_set_is_covered_by_the_rules_below() -> None:
    assert {*CYCLING, *REPEATING, *FIXED} == set(COEFFICIENT_SETS)


@pytest.mark.parametrize("name", list(COEFFICIENT_SETS))
def test_a_schedule_has_one_triple_for_every_step(name: str) -> None:
    steps = len(COEFFICIENT_SETS[name].triples)
    schedule = coefficient_schedule(name, steps)
    assert len(schedule) == steps
    assert all(len(triple) == 3 for triple in schedule)


@pytest.mark.parametrize("name", CYCLING)
def test_a_tuned_cycle_starts_again_past_its_end(name: str) -> None:
    triples = COEFFICIENT_SETS[name].triples
    assert coefficient_schedule(name, 2 * len(triples)) == (*triples, *triples)


def test_part_of_a_round_is_refused_because_it_undoes_the_round_before() -> None:
    with pytest.raises(ValueError) as caught:
        coefficient_schedule("quintic", 6)
    assert str(caught.value) == (
        "coefficients 'quintic' come in rounds of 5 steps, got steps=6: a part of a round undoes the one before. "
        "Use at most 5 or a multiple of it."
    )
    six = (*COEFFICIENT_SETS["quintic"].triples, COEFFICIENT_SETS["quintic"].triples[0])
    assert band(six, 0.01, 1.0)[1] < 0.3, "the reason for the refusal"


def test_a_fifth_step_of_aol_would_turn_the_update_around() -> None:
    five = (*COEFFICIENT_SETS["aol"].triples, COEFFICIENT_SETS["aol"].triples[0])
    assert band(five, 0.05, 0.85)[1] < 0.0


@pytest.mark.parametrize("name", REPEATING)
def test_a_converged_set_repeats_its_last_triple_past_its_end(name: str) -> None:
    triples = COEFFICIENT_SETS[name].triples
    assert coefficient_schedule(name, len(triples) + 3) == (*triples, *[triples[-1]] * 3)


def test_fewer_steps_take_the_first_triples() -> None:
    assert coefficient_schedule("polar_express", 3) == COEFFICIENT_SETS["polar_express"].triples[:3]


def test_a_custom_list_repeats_its_last_triple() -> None:
    assert coefficient_schedule([(2, -1.5, 0.5), (1.5, -0.5, 0)], 4) == (
        (2.0, -1.5, 0.5),
        (1.5, -0.5, 0.0),
        (1.5, -0.5, 0.0),
        (1.5, -0.5, 0.0),
    )


def test_cubic5_never_needs_the_squared_product() -> None:
    assert all(c == 0.0 for _, _, c in coefficient_schedule("cubic5", 5))


@pytest.mark.parametrize(
    ("name", "steps", "domain", "expected"),
    [
        ("simple", 5, (0.01, 1.0), (0.681, 1.135)),
        ("quintic", 5, (0.01, 1.0), (0.977, 1.032)),
        ("polar_express", 5, (0.005, 1.0), (0.870, 1.124)),
        ("polar_express", 8, (0.005, 1.0), (0.9999, 1.0001)),
        ("cans", 5, (0.005, 1.0), (0.866, 1.134)),
        # Tuned for row-rescaled input: a singular value above 0.884 of the Frobenius norm comes out negative.
        ("aol", 4, (0.05, 0.85), (0.987, 1.012)),
        ("deepseekv4", 10, (0.005, 1.0), (0.9999, 1.0006)),
        ("cubic5", 5, (0.01, 1.0), (0.774, 1.301)),
    ],
)
def test_a_set_sends_its_domain_into_its_band(
    name: str, steps: int, domain: tuple[float, float], expected: tuple[float, float]
) -> None:
    low, high = band(coefficient_schedule(name, steps), *domain)
    assert expected[0] <= low
    assert high <= expected[1]


def test_a_band_is_missed_by_a_step_left_out() -> None:
    low, high = band(coefficient_schedule("polar_express", 4), 0.005, 1.0)
    assert low < 0.870
    assert high > 1.124


def test_polar_express_leaves_headroom_above_one() -> None:
    """The safety factor: a singular value that rounding pushed one per cent past 1 is still brought back."""
    low, high = band(coefficient_schedule("polar_express", 5), 0.005, 1.01)
    assert low >= 0.870
    assert high <= 1.124


def test_an_unknown_set_names_the_one_meant() -> None:
    with pytest.raises(ValueError) as caught:
        coefficient_schedule("polar_expres", 5)
    assert str(caught.value) == "coefficients 'polar_expres' is not a known set. Did you mean 'polar_express'?"


def test_an_unknown_set_like_no_other_lists_the_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        coefficient_schedule("zzz", 5)
    assert str(caught.value) == (
        "coefficients 'zzz' is not a known set. Known: aol, cans, cubic5, deepseekv4, polar_express, quintic, simple."
    )


@pytest.mark.parametrize("steps", [0, -1])
@pytest.mark.parametrize("coefficients", ["simple", [(1.5, -0.5, 0.0)]])
def test_zero_steps_are_refused(coefficients: str | list[Coefficient], steps: int) -> None:
    with pytest.raises(ValueError) as caught:
        coefficient_schedule(coefficients, steps)
    assert str(caught.value) == f"steps must be at least 1, got {steps}. Five is usual."


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        coefficient_schedule([], 5)
    assert str(caught.value) == "coefficients is an empty list: expected at least one (a, b, c)."


def test_a_triple_of_the_wrong_length_is_named_by_its_position() -> None:
    with pytest.raises(ValueError) as caught:
        coefficient_schedule([(1.5, -0.5, 0.0), (1.5, -0.5)], 5)  # type: ignore[list-item]
    assert str(caught.value) == "coefficients[1] has 2 numbers: expected (a, b, c)."


@pytest.mark.parametrize("extra", [-1, 1])
@pytest.mark.parametrize("name", FIXED)
def test_a_set_of_fixed_length_is_refused_with_other_steps(name: str, extra: int) -> None:
    length = len(COEFFICIENT_SETS[name].triples)
    with pytest.raises(ValueError) as caught:
        coefficient_schedule(name, length + extra)
    assert str(caught.value) == (
        f"coefficients {name!r} are made for exactly {length} steps, got steps={length + extra}. Set steps={length}."
    )


def test_a_good_choice_has_no_problem() -> None:
    assert check_coefficients("polar_express", 5) is None
    assert check_coefficients([(1.5, -0.5, 0.0)], 1) is None

"""Coefficient sets: what a schedule holds past its set, where it sends singular values, and what is refused."""

from __future__ import annotations

import pytest

import layerwise
from layerwise.config.coefficients import COEFFICIENT_SETS, Coefficient, check_coefficients, coefficient_schedule

CYCLING = ("simple", "quintic")
REPEATING = ("polar_express", "cans", "deepseekv4")
FIXED = ("aol", "cubic5")


# What was published, number by number, with the safety factor that we divide by: a, b and c by its powers 1, 3 and 5, but not in the last step.
PUBLISHED: dict[str, tuple[float, list[Coefficient]]] = {
    "simple": (1.0, [(3.4445, -4.7750, 2.0315)]),
    "quintic": (
        1.0,
        [
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ],
    ),
    "polar_express": (
        1.01,
        [
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        ],
    ),
    "cans": (
        1.01,
        [
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ],
    ),
    "aol": (
        1.0,
        [
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ],
    ),
    "deepseekv4": (1.0, [*[(3.4445, -4.7750, 2.0315)] * 8, *[(2.0, -1.5, 0.5)] * 2]),
    "cubic5": (
        1.0,
        [
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ],
    ),
}


def applied(schedule: tuple[Coefficient, ...], value: float) -> float:
    for a, b, c in schedule:
        value = a * value + b * value**3 + c * value**5
    return value


def band(schedule: tuple[Coefficient, ...], low: float, high: float) -> tuple[float, float]:
    values = [applied(schedule, low + (high - low) * point / 5000) for point in range(5001)]
    return min(values), max(values)


@pytest.mark.parametrize("name", list(COEFFICIENT_SETS))
def test_a_set_has_its_published_numbers_and_a_source(name: str) -> None:
    safety, published = PUBLISHED[name]
    found = COEFFICIENT_SETS[name].triples
    assert len(found) == len(published)
    for step, (a, b, c) in enumerate(published):
        by = safety if step < len(published) - 1 else 1.0
        assert found[step] == pytest.approx((a / by, b / by**3, c / by**5), rel=1e-14, abs=0.0)
    assert COEFFICIENT_SETS[name].source


def test_every_set_is_covered_by_the_table_above_and_the_rules_below() -> None:
    assert {*CYCLING, *REPEATING, *FIXED} == set(COEFFICIENT_SETS) == set(PUBLISHED)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_coefficients_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"coefficients\[0\] is \(.*\): expected finite numbers"):
        layerwise.Muon(lr=0.1, coefficients=[(1.0, value, 1.0)])


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


def test_a_long_name_makes_no_wall_of_text() -> None:
    problem = check_coefficients("9" * 5000, 5)
    assert problem is not None
    assert problem.startswith("coefficients '9999")
    assert len(problem) < 300

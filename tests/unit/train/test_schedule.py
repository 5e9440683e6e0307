import itertools

import pytest

from layerwise.config.schema import ScheduleConfig
from layerwise.train.schedule import lr_factor


def factors(steps: int, **settings: object) -> list[float]:
    schedule = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [lr_factor(schedule, step, steps) for step in range(steps)]


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_moves_from_the_first_step_and_arrives(kind: str) -> None:
    found = factors(100, kind=kind, warmup_steps=4, decay_fraction=0.2)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine_falls_from_one_to_the_minimum_with_its_middle_in_the_middle() -> None:
    found = factors(101, kind="cosine", warmup_steps=1, min_lr_ratio=0.2)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.2)
    assert found[50] == pytest.approx(0.6)
    assert all(a > b for a, b in itertools.pairwise(found))


def test_wsd_is_flat_then_a_straight_line_over_its_share_of_the_run() -> None:
    found = factors(100, kind="wsd", warmup_steps=10, min_lr_ratio=0.0, decay_fraction=0.2)
    assert set(found[9:80]) == {1.0}
    assert found[80:] == pytest.approx([1 - (step + 1) / 20 for step in range(20)])
    assert found[-1] == pytest.approx(0.0)


def test_constant_stays() -> None:
    assert set(factors(50, kind="constant", warmup_steps=0)) == {1.0}


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("decay_fraction", [0.0, 0.5, 1.0])
def test_short_runs_have_factors_in_range(kind: str, steps: int, decay_fraction: float) -> None:
    found = factors(steps, kind=kind, warmup_steps=0, decay_fraction=decay_fraction)
    assert all(0.0 < factor <= 1.0 for factor in found)


def test_wsd_without_decay_is_constant() -> None:
    assert set(factors(20, kind="wsd", warmup_steps=0, decay_fraction=0.0)) == {1.0}

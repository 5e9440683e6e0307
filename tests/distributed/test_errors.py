"""Every wrong use of the library, case by case: the error's type and text, that nothing changed, and that no rank was left waiting (`tests.reliability.misuse`).

Cases that the library does not refuse yet are expected to fail, strictly: one that is refused from now on must lose its `instead`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.reliability import misuse  # noqa: F401  (it has the cases)
from tests.reliability.refusals import CASES, WORLDS, complaints_on_ranks, settled, take
from tests.reliability.sharded_misuse import NAMES

ON_RANKS = [case.name for case in CASES.values() if case.world > 1 and case.name not in NAMES]


def marked(names: list[str]) -> list[Any]:
    """Names as params of a test; what is not refused yet must fail."""
    return [
        pytest.param(
            name, marks=[pytest.mark.xfail(strict=True, reason=CASES[name].instead)] * bool(CASES[name].instead)
        )
        for name in names
    ]


def test_there_are_at_least_two_hundred_cases() -> None:
    assert len(settled(world=1)) >= 130
    assert len(settled(world=2)) >= 70
    assert len(settled()) >= 200
    assert len(NAMES) >= 50
    assert {case.world for case in CASES.values()} == {1, *WORLDS}


@pytest.mark.parametrize("name", marked([case.name for case in CASES.values() if case.world == 1]))
def test_a_misuse_is_refused_in_words_with_nothing_changed(name: str) -> None:
    assert take(CASES[name]).complaint == ""


@pytest.fixture(scope="module")
def complaints() -> dict[str, str]:
    return complaints_of([name for name in settled() if name in ON_RANKS])


@pytest.fixture(scope="module")
def sharded_complaints() -> dict[str, str]:
    return complaints_of([name for name in settled() if name in NAMES])


def complaints_of(names: list[str]) -> dict[str, str]:
    """All cases for one number of ranks on the same ranks."""
    by_world = [[name for name in names if CASES[name].world == world] for world in WORLDS]
    return {name: text for mine in by_world for name, text in complaints_on_ranks(mine).items()}


@pytest.mark.parametrize("name", marked(ON_RANKS))
def test_a_misuse_is_refused_on_every_rank_and_none_is_left_waiting(name: str, complaints: dict[str, str]) -> None:
    # What is not refused yet may leave ranks in any state: it gets ranks of its own.
    complaint = complaints_on_ranks([name])[name] if CASES[name].instead else complaints[name]
    assert complaint == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(NAMES))
def test_a_misuse_of_a_sharded_model_is_refused_on_every_rank(name: str, sharded_complaints: dict[str, str]) -> None:
    assert sharded_complaints[name] == ""

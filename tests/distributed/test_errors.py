"""Every wrong use of the library, case by case: the error's type and text, that nothing changed, and that no rank was left waiting (`tests.reliability.misuse`)."""

from __future__ import annotations

import pytest

from tests.reliability.misuse import CASES, complaints_on_ranks, take

ALONE = [name for name, case in CASES.items() if case.world == 1]
ON_RANKS = [name for name, case in CASES.items() if case.world == 2]


def test_there_are_at_least_forty_cases() -> None:
    assert len(ALONE) >= 40
    assert len(ON_RANKS) >= 15


@pytest.mark.parametrize("name", ALONE)
def test_a_misuse_is_refused_in_words_with_nothing_changed(name: str) -> None:
    assert take(CASES[name]).complaint == ""


@pytest.fixture(scope="module")
def complaints() -> dict[str, str]:
    return complaints_on_ranks(ON_RANKS)


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_misuse_is_refused_on_every_rank_and_none_is_left_waiting(name: str, complaints: dict[str, str]) -> None:
    assert complaints[name] == ""

"""Mistakes of another system: the library does not make them, and its tests would see them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.regressions import (
    building,
    layouts,
    norms,
    overlapping,
    publishing,
    quantizing,
    reducing,
    saving,
    sharding,
    state,
)
from tests.regressions.cases import Case, Mistake, observe

THEMES = (publishing, overlapping, layouts, building, reducing, norms, state, sharding, saving, quantizing)
CASES: tuple[Case, ...] = tuple(case for theme in THEMES for case in theme.CASES)
MISTAKES = [(case, mistake) for case in CASES for mistake in case.mistakes]
PAGE = Path(__file__).parent.parent.parent / "docs" / "regressions.md"

# Checks that train in many ways one after the other.
LONG = (
    *("R4", "R7", "R8", "R10", "R11", "R12", "R13", "R17", "R21", "R25", "R28", "R31", "R43"),
    *("D7", "D8", "Q2", "Q5", "Q7", "Q12"),
)

# Ranks that are left alone with a mistake must not be waited for long.
TIMES = {"timeout_s": 180.0, "pg_timeout_s": 60.0}


@pytest.mark.broad
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in LONG)) for case in CASES],
)
def test_the_library_is_right(case: Case) -> None:
    complaints = [text for texts in run_ranks(case.world, observe, case.check) for text in texts]
    assert not complaints, "\n".join(complaints[:10])


@pytest.mark.parametrize(
    ("case", "mistake"),
    [
        pytest.param(
            case,
            mistake,
            id=f"{case.name}: {mistake.what}",
            marks=() if any(case is theme.CASES[0] for theme in THEMES) else pytest.mark.slow,
        )
        for case, mistake in MISTAKES
    ],
)
def test_the_mistake_is_caught(case: Case, mistake: Mistake) -> None:
    found = [text for texts in run_ranks(case.world, observe, case.check, mistake.put_in, **TIMES) for text in texts]
    missed = mistake.is_missed_by(found)
    assert not missed, "\n".join([f"not seen: {missed}", *found[:10]])


def test_every_name_is_told_once_with_its_mistakes() -> None:
    rows = {
        cells[1].strip(): cells
        for line in PAGE.read_text().splitlines()
        if len(cells := line.split("|")) == 6 and re.fullmatch(r"[RDQ]\d+", cells[1].strip())
    }
    assert sorted(rows) == sorted(case.name for case in CASES)
    for case in CASES:
        assert case.check.__doc__, f"{case.name} does not say what went wrong"
        told = rows[case.name][4]
        assert [mistake.what for mistake in case.mistakes if mistake.what not in told] == [], case.name

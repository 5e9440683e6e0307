"""The quick profile of the reliability board: every figure must find nothing, and every figure's control must find something."""

from __future__ import annotations

import pytest

from tests.marks import sampled
from tests.reliability.__main__ import FIGURES, measure


@pytest.mark.parametrize("name", sampled(FIGURES))
def test_a_figure_finds_nothing_bad(name: str) -> None:
    found = measure(name, quick=True, sabotage=False)
    assert found["n"] > 0
    assert found["bad"] == 0, found["worst"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_the_control_of_a_figure_finds_what_was_broken_on_purpose(name: str) -> None:
    found = measure(name, quick=True, sabotage=True)
    assert found["bad"] > 0
    assert found["worst"]

"""The harness: ranks that do not find each other are started again, once; what a job raises is a failure at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests import ranks
from tests.ranks import RankFailure, run_ranks


def number(rank: int, world: int) -> int:
    return rank


def failing(rank: int, world: int) -> None:
    raise RuntimeError("of the job")


def test_ranks_that_do_not_find_each_other_are_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = ranks._run_once, 0

    def lost(*given: Any) -> Any:
        nonlocal times
        times += 1
        return ({1: 1}, {0: "tests.ranks._NotConnected"}) if times <= misses else real(*given)

    monkeypatch.setattr(ranks, "_run_once", lost)
    misses = 1
    assert run_ranks(2, number) == [0, 1]
    assert times == 2
    misses, times = 2, 0
    with pytest.raises(RankFailure, match="_NotConnected"):
        run_ranks(2, number)
    assert times == 2


def test_a_job_that_raises_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = ranks._run_once, 0

    def counted(*given: Any) -> Any:
        nonlocal times
        times += 1
        return real(*given)

    monkeypatch.setattr(ranks, "_run_once", counted)
    with pytest.raises(RankFailure, match="of the job"):
        run_ranks(2, failing)
    assert times == 1

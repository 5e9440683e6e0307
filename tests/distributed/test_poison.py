"""Poisoned memory: what nobody wrote is NaN, here and in every rank, and stays so whatever the trainer sets."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ranks import POISON, is_poisoned, run_ranks


def unwritten(rank: int, world: int) -> list[bool]:
    """Whether memory that nobody wrote is poisoned, in every way to get some."""
    torch.use_deterministic_algorithms(False)  # as the trainer does, where its config says so
    return _poisoned()


def _poisoned() -> list[bool]:
    floats = [
        torch.empty(7),
        torch.empty_like(torch.ones(7)),
        torch.ones(2).new_empty(7),
        torch.empty_strided((7,), (1,)),
    ]
    floats.append(torch.empty(7, dtype=torch.bfloat16))
    integers = torch.empty(7, dtype=torch.int64)
    return [
        *(all(map(math.isnan, tensor.tolist())) for tensor in floats),
        integers.tolist() == [torch.iinfo(torch.int64).max] * 7,
    ]


def test_a_rank_that_is_told_so_has_poisoned_memory() -> None:
    assert run_ranks(2, unwritten, poisoned=True) == [[True] * 6] * 2


def test_the_environment_poisons_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POISON, "1")
    assert run_ranks(2, unwritten) == [[True] * 6] * 2
    monkeypatch.setenv(POISON, "0")
    assert not is_poisoned()
    assert not all(run_ranks(1, unwritten)[0])


def test_the_tests_themselves_are_poisoned_where_that_is_asked_for() -> None:
    if is_poisoned():
        torch.use_deterministic_algorithms(False)
        assert all(_poisoned())

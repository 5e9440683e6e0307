from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import layerwise
from layerwise.comm import machines
from layerwise.comm.groups import NO_GROUPS, all_ranks
from layerwise.comm.machines import on_one_machine
from tests.ranks import run_ranks


def answers(rank: int, world: int, elsewhere: int | None, silent: bool) -> bool:
    """With one rank that is on another machine, or with a system that does not say."""
    name = "" if silent else "far away" if rank == elsewhere else machines._machine()
    with mock.patch.object(machines, "_machine", return_value=name):
        return on_one_machine(all_ranks())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says")
def test_ranks_of_one_machine_know_it() -> None:
    assert run_ranks(2, answers, None, False) == [True, True]
    assert on_one_machine(NO_GROUPS)


@pytest.mark.parametrize("elsewhere", [0, 1])
def test_one_rank_elsewhere_is_enough(elsewhere: int) -> None:
    assert run_ranks(2, answers, elsewhere, False) == [False, False]


def test_where_the_system_does_not_say_they_are_not() -> None:
    assert run_ranks(2, answers, None, True) == [False, False]


def broadcasts_of_a_gather(rank: int, world: int, apart: bool) -> int:
    """How many broadcasts bring the weights of a model after they have changed."""
    calls: list[int] = []
    real = dist.broadcast

    def noted(*given: object, **more: object) -> object:
        calls.append(1)
        return real(*given, **more)  # type: ignore[arg-type]

    with mock.patch.object(machines, "_machine", return_value=f"machine {rank if apart else 0}"):
        model = layerwise.DataParallel(nn.Linear(8, 8, bias=False), layout="flat")
    with mock.patch.object(dist, "broadcast", noted):
        model.engine.publisher.begin()
        model.ensure()
    return len(calls)


@pytest.mark.parametrize(("apart", "expected"), [(False, 2), (True, 0)])
def test_weights_go_by_broadcasts_on_one_machine_alone(apart: bool, expected: int) -> None:
    assert run_ranks(2, broadcasts_of_a_gather, apart) == [expected, expected]

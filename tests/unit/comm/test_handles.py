from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from layerwise.comm import leaving
from layerwise.comm.collectives import Communicator
from layerwise.comm.facts import gather_facts
from layerwise.comm.handles import Handle
from layerwise.errors import StateError
from layerwise.layout.schedule import stats_op
from tests.ranks import run_ranks


class CountedWork:
    def __init__(self, *, fails: bool = False) -> None:
        self.waits = 0
        self.fails = fails

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self) -> None:
        self.waits += 1
        if self.fails:
            raise RuntimeError("connection closed")


def test_waiting_gives_the_result_and_waits_for_the_work_once() -> None:
    result, work = torch.ones(2), CountedWork()
    assert Handle("reduce of bucket 3", result, (result,), (work,)).wait() is result
    assert work.waits == 1


def test_a_second_wait_is_an_error_that_names_the_collective() -> None:
    handle = Handle("reduce of bucket 3", torch.ones(2))
    handle.wait()
    with pytest.raises(StateError, match=r"reduce of bucket 3 was waited for already: a handle gives its result once"):
        handle.wait()


def test_the_source_stays_alive_until_the_wait_and_no_longer() -> None:
    result, source = torch.ones(2), torch.ones(3)
    memory = weakref.ref(source)
    handle = Handle("gather", result, (source, result), (CountedWork(),))
    del source
    gc.collect()
    assert memory() is not None
    handle.wait()
    gc.collect()
    assert memory() is None


def test_a_wait_that_failed_hands_out_no_result() -> None:
    handle = Handle("gather", torch.ones(2), (), (CountedWork(fails=True),))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            handle.wait()


def lend_and_take_back(rank: int, world: int) -> list[int]:
    """How many results of collectives are held, and how many tensors are lent once this process may end."""
    communicator, full = Communicator(dist.new_group()), torch.ones(8, dtype=torch.float64)
    held = [communicator.gather_numbers(torch.ones(3), label="x"), gather_facts("x")]
    held += [communicator.all_reduce(stats_op(8, world), full).wait() for _ in range(5)]
    communicator.all_reduce(stats_op(8, world), full.clone())  # dropped on its way
    leaving._leave_all()
    return [len(held), len(leaving._LENT)]


def test_a_process_that_ends_has_its_tensors_back_whatever_is_held() -> None:
    assert run_ranks(2, lend_and_take_back) == [[7, 0]] * 2


def test_a_tensor_is_lent_until_nobody_in_python_or_in_c_holds_it() -> None:
    tensor = torch.ones(3)
    leaving.lend([tensor])
    leaving.take_back()
    assert any(lent is tensor for lent in leaving._LENT)
    in_c, number = torch.ones(3, requires_grad=True), len(leaving._LENT)
    in_c.grad = tensor  # which is held in C++ now
    del tensor
    leaving.take_back()
    assert len(leaving._LENT) == number
    del in_c
    leaving.take_back()
    assert len(leaving._LENT) == number - 1

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from layerwise.comm.handles import Handle
from layerwise.errors import StateError


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

"""Scopes and flights: seen when somebody looks, and free of cost when nobody does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.profiler import profile

from layerwise.comm.handles import Handle
from layerwise.comm.scopes import recorded_flights, scope


class Future:
    def __init__(self) -> None:
        self.callbacks: list[Callable[[object], None]] = []
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callbacks.append(callback)

    def arrive(self) -> None:
        self.is_done = True
        for callback in self.callbacks:
            callback(self)


class WorkWithFuture:
    def __init__(self) -> None:
        self.future = Future()

    def get_future(self) -> Future:
        return self.future

    def is_completed(self) -> bool:
        return self.future.is_done

    def wait(self) -> None:
        pass


class WorkWithout(WorkWithFuture):
    def get_future(self) -> Future:
        raise RuntimeError("Work::getFuture not implemented.")


def test_a_scope_is_on_the_timeline_of_a_profiler() -> None:
    with profile() as profiler, scope("wait for bucket 3"):
        pass
    assert "layerwise::wait for bucket 3" in {event.name for event in profiler.events()}


def test_a_scope_makes_nothing_while_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layerwise.comm.scopes.record_function", None)  # calling it would raise
    with scope("wait for bucket 3"), scope("within"):
        pass


def test_a_flight_lasts_from_launch_to_its_last_part_and_not_to_the_wait() -> None:
    works = WorkWithFuture(), WorkWithFuture()
    with recorded_flights() as flights:
        handle = Handle("publish of bucket 3", torch.ones(2), (), works)
        works[1].future.arrive()
        assert flights[0].landed_ns is None
        works[0].future.arrive()
        landed_ns = flights[0].landed_ns
        assert flights[0].launched_ns <= (landed_ns or 0)
        time.sleep(0.001)
        handle.wait()
    assert [flight.label for flight in flights] == ["publish of bucket 3"]
    assert flights[0].is_exact
    assert flights[0].landed_ns == landed_ns


def test_a_flight_of_a_work_without_a_future_lasts_to_the_wait_and_says_so() -> None:
    with recorded_flights() as flights:
        handle = Handle("reduce of bucket 3", torch.ones(2), (), (WorkWithout(),))
        assert flights[0].landed_ns is None
        handle.wait()
    assert not flights[0].is_exact
    assert (flights[0].landed_ns or 0) > flights[0].launched_ns


def test_nothing_is_recorded_before_and_after() -> None:
    Handle("before", torch.ones(2), (), (WorkWithout(),)).wait()
    with recorded_flights() as flights:
        Handle("of one rank, complete at once", torch.ones(2)).wait()
    Handle("after", torch.ones(2), (), (WorkWithout(),)).wait()
    assert flights == []

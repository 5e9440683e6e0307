"""What a profiler sees of the engine: a scope for every bucket and phase, and every collective from launch to arrival.

Both cost next to nothing while nobody looks. torch's own `record_function` takes 10 us and more without a profiler, and
a step opens hundreds of scopes, so `scope` asks first whether one runs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

_NO_SCOPE = nullcontext()


def scope(name: str) -> AbstractContextManager[object]:
    """A named stretch of the profiler's timeline, if there is one."""
    return record_function(f"layerwise::{name}") if profiler._is_profiler_enabled else _NO_SCOPE


@dataclass(slots=True)
class Flight:
    """When a collective was launched and when its parts arrived, by `time.perf_counter_ns`."""

    label: str
    launched_ns: int
    parts: int = 1
    is_exact: bool = True
    """Whether the backend tells when a part arrived. Otherwise it is when waiting for it ended."""
    arrivals_ns: list[int] = field(default_factory=list)

    def land(self, _: object = None) -> None:
        """A part of it has arrived. Called in threads of the backend, several at once."""
        self.arrivals_ns.append(time.perf_counter_ns())

    @property
    def landed_ns(self) -> int | None:
        """When its last part arrived; None while it is under way."""
        return max(self.arrivals_ns) if len(self.arrivals_ns) >= self.parts else None


_flights: list[Flight] | None = None


@contextmanager
def recorded_flights() -> Iterator[list[Flight]]:
    """Every collective that is launched in here. A profiler sees the launch and the wait; what lies between is the
    backend's, in threads of its own and without our names."""
    global _flights
    before, _flights = _flights, []
    try:
        yield _flights
    finally:
        _flights = before


def settle(flights: Sequence[Flight], timeout_s: float) -> None:
    """Return when the backend has told of every arrival, or has had its time. A profiler that stops before takes the
    process with it, now and then: its callbacks and ours end in the same threads."""
    deadline = time.monotonic() + timeout_s
    while any(flight.is_exact and flight.landed_ns is None for flight in flights) and time.monotonic() < deadline:
        time.sleep(0.001)


def note_flight(label: str, result: Tensor, works: Sequence[Any]) -> Flight | None:
    """A collective was launched. One on a device that calls itself complete at once is left out: that is NCCL, whose kernels
    the profiler names."""
    if _flights is None or not works:
        return None
    flight = Flight(label, time.perf_counter_ns())
    try:
        futures = [work.get_future() for work in works]
    except RuntimeError:  # gloo's reduce-scatter has none
        flight.is_exact = False
    else:
        if result.is_cuda and all(future.done() for future in futures):
            return None
        flight.parts = len(futures)
        for future in futures:
            future.add_done_callback(flight.land)
    _flights.append(flight)
    return flight

"""A timeline of some steps on this rank, as a Chrome trace that Perfetto opens.

torch's profiler records scopes, kernels and, for gloo, nameless collectives. What it cannot tell is which bucket or cohort
is under way when, so every collective gets a line of its own from launch to arrival, on tracks called `in flight`.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from layerwise.comm.scopes import Flight, recorded_flights, settle

_CLOCK = "layerwise::clock"
_FIRST_TRACK = 1_000_000_000  # tracks are threads to the format: far from the number of any real one

_SETTLE_S = 10.0
"""What is under way when a recording ends has been launched by all ranks; only if one of them failed does it never arrive."""

Event = dict[str, Any]


def path_of(path: str | Path, rank: int) -> Path:
    """Where a rank writes: rank 0 to the path itself, rank 1 to `out.rank1.json` beside it."""
    asked = Path(path)
    return asked if rank == 0 else asked.with_name(f"{asked.stem}.rank{rank}{asked.suffix}")


@contextmanager
def recorded(path: str | Path, rank: int, device: torch.device) -> Iterator[None]:
    """Record what this rank does in here, and write it down at the end."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with recorded_flights() as flights:
        profiler = profile(activities=activities)
        profiler.start()
        try:
            with record_function(_CLOCK):
                clock_ns = time.perf_counter_ns()
            yield
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            end_ns = time.perf_counter_ns()
        finally:
            settle(flights, _SETTLE_S)
            profiler.stop()
    try:
        _write(profiler, path_of(path, rank), rank, flights, clock_ns, end_ns)
    except OSError as error:  # no reason to end a training
        warnings.warn(f"the timeline was not written to {path_of(path, rank)}: {error}.", stacklevel=3)


def _write(profiler: Any, path: Path, rank: int, flights: Sequence[Flight], clock_ns: int, end_ns: int) -> None:
    unfinished = path.with_name(f"{path.name}.part")  # a timeline is there whole, or not at all
    profiler.export_chrome_trace(str(unfinished))
    timeline = json.loads(unfinished.read_text(encoding="utf-8"))
    events: list[Event] = timeline["traceEvents"]
    pid = os.getpid()
    for event in events:
        if event.get("name") == "process_name" and event.get("pid") == pid:
            event["args"]["name"] = f"rank {rank}"
    # The profiler's clock is not ours; one scope whose time is known by both tells how they differ.
    offset_us = next(event["ts"] for event in events if event.get("name") == _CLOCK) - clock_ns / 1000
    events.extend(_flight_events(flights, pid, offset_us, end_ns))
    unfinished.write_text(json.dumps(timeline) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _flight_events(flights: Sequence[Flight], pid: int, offset_us: float, end_ns: int) -> Iterator[Event]:
    """Flights of a phase on as few tracks as have no two at once."""
    busy_until: dict[str, list[int]] = {}
    tracks: dict[tuple[str, int], int] = {}
    for flight in flights:
        phase = flight.label.split()[0]
        landed_ns = min(flight.landed_ns or end_ns, end_ns)
        lanes = busy_until.setdefault(phase, [])
        lane = next((lane for lane, until in enumerate(lanes) if until <= flight.launched_ns), len(lanes))
        lanes[lane : lane + 1] = [landed_ns]
        track = tracks.setdefault((phase, lane), _FIRST_TRACK + len(tracks))
        yield {
            "ph": "X",
            "cat": "in_flight",
            "name": flight.label,
            "pid": pid,
            "tid": track,
            "ts": flight.launched_ns / 1000 + offset_us,
            "dur": (landed_ns - flight.launched_ns) / 1000,
            "args": {"phase": phase, "arrived": landed_ns < end_ns, "exact": flight.is_exact},
        }
    for (phase, lane), track in tracks.items():
        name = f"in flight: {phase}" + (f" {lane + 1}" if lane else "")
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "args": {"sort_index": track}}

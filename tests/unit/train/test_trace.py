from __future__ import annotations

import json
import time
from pathlib import Path
from threading import Timer

import pytest
import torch

from layerwise.comm.scopes import Flight, note_flight, scope, settle
from layerwise.train import trace
from layerwise.train.trace import path_of, recorded

CPU = torch.device("cpu")


class SlowWork:
    """Has no future, like gloo's reduce-scatter."""

    def get_future(self) -> object:
        raise RuntimeError("Work::getFuture not implemented.")


def test_every_rank_has_a_file_of_its_own() -> None:
    assert path_of("runs/out.json", 0) == Path("runs/out.json")
    assert path_of("runs/out.json", 12) == Path("runs/out.rank12.json")
    assert path_of("timeline", 1) == Path("timeline.rank1")


def test_a_flight_lies_where_it_was_on_the_profilers_own_clock(tmp_path: Path) -> None:
    with recorded(tmp_path / "out.json", 0, CPU), scope("around"):
        time.sleep(0.002)
        flight = note_flight("publish all_gather of bucket 0", torch.ones(1), (SlowWork(),))
        time.sleep(0.005)
        assert flight is not None
        flight.land()
        time.sleep(0.002)
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    around = next(event for event in events if event["name"] == "layerwise::around")
    found = next(event for event in events if event.get("cat") == "in_flight")
    assert found["dur"] >= 5000
    assert around["ts"] + 1000 < found["ts"]
    assert found["ts"] + found["dur"] + 1000 < around["ts"] + around["dur"]
    assert found["args"] == {"phase": "publish", "arrived": True, "exact": False}


def test_flights_of_a_phase_that_overlap_are_on_different_tracks_and_others_share_one() -> None:
    flights = [
        Flight("publish of bucket 0", 1_000, arrivals_ns=[5_000]),
        Flight("publish of bucket 1", 2_000, arrivals_ns=[4_000]),
        Flight("publish of bucket 2", 4_500, arrivals_ns=[6_000]),
        Flight("reduce of bucket 0", 1_500),
    ]
    events = list(trace._flight_events(flights, pid=7, offset_us=100.0, end_ns=8_000))
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    lying = {event["name"]: event for event in events if event["ph"] == "X"}
    assert {name: tracks[event["tid"]] for name, event in lying.items()} == {
        "publish of bucket 0": "in flight: publish",
        "publish of bucket 1": "in flight: publish 2",
        "publish of bucket 2": "in flight: publish 2",
        "reduce of bucket 0": "in flight: reduce",
    }
    assert (lying["publish of bucket 0"]["ts"], lying["publish of bucket 0"]["dur"]) == (101.0, 4.0)
    assert (lying["reduce of bucket 0"]["dur"], lying["reduce of bucket 0"]["args"]["arrived"]) == (6.5, False)


class Told(torch.futures.Future[None]):
    """A work that is its own future: arrives when a result is set."""

    def get_future(self) -> Told:
        return self


def test_a_profiler_stops_when_every_arrival_has_been_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped before, it ended one process in twelve: gathers are under way when a recording ends."""
    under_way: list[bool] = []

    class Profiler(trace.profile):
        def stop(self) -> None:
            under_way.append(flight.landed_ns is None)
            super().stop()

    monkeypatch.setattr(trace, "profile", Profiler)
    parts = Told(), Told()
    with recorded(tmp_path / "out.json", 0, CPU):
        found = note_flight("publish all_gather of bucket 0", torch.ones(1), parts)
        assert found is not None
        flight = found
        parts[0].set_result(None)
        later = Timer(0.05, parts[1].set_result, (None,))
        later.start()
    later.join()
    assert under_way == [False]
    (event,) = (
        event
        for event in json.loads((tmp_path / "out.json").read_text())["traceEvents"]
        if event.get("cat") == "in_flight"
    )
    assert not event["args"]["arrived"]  # not within the recording


def test_a_flight_that_never_lands_is_not_waited_for_without_end() -> None:
    started = time.monotonic()
    settle([Flight("publish of bucket 0", 1_000), Flight("reduce of bucket 0", 1_000, is_exact=False)], 0.02)
    assert 0.02 <= time.monotonic() - started < 5.0
    started = time.monotonic()
    settle([Flight("reduce of bucket 0", 1_000, is_exact=False)], 60.0)  # tells nobody
    assert time.monotonic() - started < 30.0


def test_a_full_disk_ends_the_timeline_and_not_the_training(tmp_path: Path) -> None:
    expected = pytest.warns(UserWarning, match=r"the timeline was not written to .*gone/out.json")
    with expected, recorded(tmp_path / "gone" / "out.json", 0, CPU):
        pass


def test_an_error_inside_is_the_one_that_is_seen(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorded(tmp_path / "out.json", 0, CPU):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    assert not torch.autograd.profiler._is_profiler_enabled

"""What benchmarks/overlap.py makes of a timeline and of samples."""

from __future__ import annotations

from typing import Any

from benchmarks.overlap import BOTH, GATHER, REDUCE, SYNC, WAITED, Sample, joined, read_timeline, summary

MAIN, OTHER = 1, 2


def event(category: str, name: str, start: float, stop: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "tid": thread, "args": args}


def flight(phase: str, start: float, stop: float) -> dict[str, Any]:
    return event("in_flight", f"{phase} of bucket 0", start, stop, 9, phase=phase)


def test_stretches_are_joined_where_they_touch() -> None:
    assert joined([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]


def test_gathers_count_as_hidden_where_forward_computes_and_not_where_it_waits() -> None:
    events = [
        event("user_annotation", "layerwise::forward", 0, 10),
        flight("publish", 90, 130),  # of the first step, under the forward of the second
        event("user_annotation", "layerwise::forward", 100, 150),
        event("cpu_op", "aten::mm", 110, 120),
        event("cpu_op", "aten::add", 112, 115),  # within another
        event("cpu_op", "aten::mm", 120, 140, OTHER),  # somebody else's
        flight("publish", 160, 400),  # of the last step: cut off
    ]
    found = read_timeline({"traceEvents": events})["gathers_under_forward"]
    assert found == {"in_flight_ms": 0.04, "under_work_ms": 0.01, "share": 0.25, "work_ms": 0.01, "share_of_work": 1.0}


def test_on_a_device_the_kernels_count_that_a_scope_launched_whenever_they_run() -> None:
    events = [
        event("user_annotation", "layerwise::forward", 0, 1),
        event("user_annotation", "layerwise::orthogonalise dense cohort 0", 10, 20),
        event("cuda_runtime", "cudaLaunchKernel", 12, 13, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 25, 26, correlation=2),
        event("kernel", "gemm", 40, 60, 7, correlation=1),
        event("kernel", "copy", 60, 90, 7, correlation=2),
        flight("exchange", 30, 50),
        flight("return", 70, 80),
    ]
    found = read_timeline({"traceEvents": events})["exchange_under_newton_schulz"]
    assert found == {"in_flight_ms": 0.03, "under_work_ms": 0.01, "share": 0.333, "work_ms": 0.02, "share_of_work": 0.5}


def test_shares_come_from_the_slowest_rank_and_the_same_run() -> None:
    ms = {SYNC: 400, REDUCE: 300, GATHER: 350, BOTH: 260, WAITED: 280}
    ranks = [
        {
            "samples": {
                name: [Sample(value / 1000 * slow - rank / 100, 0.0) for slow in (1.0, 1.2, 1.0)]
                for name, value in ms.items()
            },
            "gather_alone_s": [0.1 - rank / 100] * 3,
            "exchange_waited_s": [0.04] * 3,
            "forward_s": [0.05],
            "backward_s": [0.1],
            "equal": dict.fromkeys(ms, True),
            "gather_nbytes": 3_000_000,
            "buckets": 7,
            "cohorts": [4],
        }
        for rank in range(2)
    ]
    found = summary("flat", ranks, mbit=300)
    assert [arm["ms"] for arm in found["arms"]] == list(ms.values())
    assert found["gathers_hidden"] == {"low": 0.5, "median": 0.5, "high": 0.55}  # of 0.5, 0.5 and, slowed down, 0.6
    assert found["gathers_hidden_beside_reductions"]["median"] == 0.4
    assert found["exchange_hidden"]["median"] == 0.5
    assert found["gathers_by_bytes_ms"] == 80.0
    assert found["same_bits"]
    ranks[1]["equal"] = {**ranks[1]["equal"], BOTH: False}
    assert not summary("flat", ranks, mbit=300)["same_bits"]

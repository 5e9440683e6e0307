"""`layerwise train --trace`: a timeline with a scope for every bucket, cohort and hook, or an error in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from layerwise.cli.exits import BAD_INPUT
from layerwise.cli.main import main
from tests.cli.test_main import layerwise
from tests.cli.test_train import SMALL


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question\n" * 200)
    return str(tmp_path / "text.txt")


def names_by_category(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        found.setdefault(event.get("cat", ""), []).append(event["name"])
    return found


@pytest.mark.slow
def test_two_ranks_write_a_timeline_each_with_every_bucket_collective_cohort_and_hook(
    tmp_path: Path, text: str
) -> None:
    trace = tmp_path / "out.json"
    words = ("--data.path", text, "--train.out-dir", str(tmp_path / "run"), "--parallel.layout", "flat")
    done = layerwise("train", *SMALL, *words, "--parallel.bucket-mib", "0.02", "--trace", str(trace), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"trace: {trace} (open it at https://ui.perfetto.dev)") == 1
    assert "profiler" not in done.stderr  # torch's own remarks would be in the user's way
    buckets = 0
    for rank, path in enumerate((trace, tmp_path / "out.rank1.json")):
        found = names_by_category(path)
        scopes, flights = found["user_annotation"], found["in_flight"]
        buckets = len({name for name in flights if name.startswith("publish ")})
        assert buckets > 1
        for bucket in range(buckets):
            for scope in (
                f"layerwise::launch gather of bucket {bucket}",
                f"layerwise::wait for publish all_gather of bucket {bucket}",
                f"layerwise::forward hook for bucket {bucket}",
                f"layerwise::launch reduction of bucket {bucket}",
                f"layerwise::wait for reduce reduce_scatter of bucket {bucket}",
            ):
                assert scopes.count(scope) == 2, f"rank {rank}: {scope}"  # steps 4 and 5
            assert flights.count(f"publish all_gather of bucket {bucket}") == 2
            assert flights.count(f"reduce reduce_scatter of bucket {bucket}") == 2
        for what in ("exchange of", "orthogonalise", "return of", "update masters of"):
            assert scopes.count(f"layerwise::{what} dense cohort 0") == 2
        assert flights.count("exchange all_to_all of dense cohort 0") == 2
        assert scopes.count("layerwise::gradient hook of blocks.0.mlp.down.weight") == 2
        assert [name for name in scopes if re.fullmatch(r"layerwise::step \d+", name)] == [
            "layerwise::step 4",
            "layerwise::step 5",
        ]
        assert process_name(path) == f"rank {rank}"
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.json", "out.rank1.json"]


def process_name(path: Path) -> Any:
    events = json.loads(path.read_text())["traceEvents"]
    pid = next(event["pid"] for event in events if event.get("cat") == "in_flight")
    return next(event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"] == pid)


def test_a_trace_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for trace, what in (
        ("", "is empty: expected a file to write, such as out.json."),
        (str(tmp_path), f"'{tmp_path}' is a folder: expected a file to write, such as '{tmp_path}/out.json'."),
        (str(tmp_path / "no" / "out.json"), f"'{tmp_path}/no' is no folder: make it first."),
        ("out\0.json", "'out\\x00.json' holds a NUL, which no file name can."),
        (str(tmp_path / ("o" * 300)), f"'{tmp_path}/oooo"),
    ):
        capsys.readouterr()
        code = main(["train", *SMALL, "--data.path", text, "--trace", trace, "--dry-run"])
        error = capsys.readouterr().err
        assert code == BAD_INPUT
        assert error.startswith(f"1 problem in the configuration:\n  1. --trace: {what}")


def test_a_run_too_short_for_a_trace_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", *SMALL, "--data.path", text, "--trace", str(tmp_path / "out.json"), "--dry-run"]
    assert main([*words, "--train.steps", "4"]) == BAD_INPUT
    assert "--trace: steps 4 and 5 are recorded, and train.steps is 4. Train for 5 steps" in capsys.readouterr().err
    assert main([*words, "--train.steps", "5"]) == 0

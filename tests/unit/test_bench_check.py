"""The gate for speed, in its CPU profile: limits here are factors, because times on a shared machine vary."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bench_check

ROOT = bench_check.ROOT
SLEEP = """

def _sleeping(step):
    def sleeps_first(*args, **named):
        import time
        time.sleep(0.3)
        return step(*args, **named)
    return sleeps_first

Optimizer.step = _sleeping(Optimizer.step)
"""


def pairs(*ratios: float) -> list[tuple[float, float]]:
    return [(10.0, 10.0 * ratio) for ratio in ratios]


def test_a_ratio_is_the_median_over_rounds_and_construction_is_not_gated() -> None:
    row = bench_check.row_of("an arm", pairs(1.0, 1.02, 5.0, 1.05, 1.04), limit=1.03)
    assert (row.old_ms, row.new_ms, row.ratio, row.iqr, row.gated, row.slower) == (10.0, 10.4, 1.04, 0.03, True, True)
    assert not bench_check.row_of("an arm", pairs(1.0, 1.02, 5.0), limit=1.03).slower
    assert not bench_check.row_of(bench_check.CONSTRUCTION, pairs(2.0), limit=1.03).slower


def test_the_table_says_which_rows_are_slower_not_gated_or_too_noisy() -> None:
    times = {"slow": pairs(1.5, 1.5), "noisy": pairs(0.5, 1.0, 1.5), bench_check.CONSTRUCTION: pairs(2.0)}
    rows = {name: bench_check.row_of(name, some, limit=1.03) for name, some in times.items()}
    _, slow, noisy, construction = bench_check.table(rows, limit=1.03).splitlines()
    assert slow.endswith("slower")
    assert "too noisy for this limit" in noisy
    assert construction.endswith("not gated")


def test_host_rows_are_those_of_steps_on_a_gpu() -> None:
    arms = ["Muon", "Newton-Schulz, one", bench_check.CONSTRUCTION]
    times = {name: pairs(1.0) for arm in arms for name in (arm, arm + bench_check.HOST)}
    assert list(bench_check.rows_of(times, "cuda", 1.03)) == ["Muon", "Muon, host", *arms[1:]]
    assert list(bench_check.rows_of(times, "cpu", 1.03)) == arms


def test_a_folder_without_the_library_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_check.main(["--old", str(tmp_path)]) == bench_check.NOT_MEASURED
    assert f"the folder {str(tmp_path)!r} has no src/layerwise" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no-such-revision", "--output=x"])
def test_a_revision_that_does_not_exist_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_check.main([f"--old={name}"]) == bench_check.NOT_MEASURED
    assert f"{name!r} is neither a folder nor a git revision" in capsys.readouterr().err


def test_something_to_compare_with_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_check.main(["--old", ""])
    assert "--old is missing" in capsys.readouterr().err


def test_a_revision_is_exported(tmp_path: Path) -> None:
    if bench_check.git(ROOT, "rev-parse", "HEAD") is None:
        pytest.skip("the sources are in no git repository")
    tree = bench_check.resolve("HEAD", tmp_path)
    assert tree.folder.parent == tmp_path
    assert (tree.folder / "src" / "layerwise" / "__init__.py").is_file()
    assert bench_check.git(ROOT, "rev-parse", "HEAD") == tree.folder.name


@pytest.mark.slow  # four processes import torch and build every arm
def test_equal_trees_pass_and_a_tree_whose_step_sleeps_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> int:
        return bench_check.main(["--old", str(ROOT), "--cpu", "--rounds", "3", "--limit", "5", *words])

    assert run("--self", "--json", str(tmp_path / "report.json")) == 0
    out = capsys.readouterr().out
    assert "no gate for GPU figures" in out
    assert out.endswith("Passed.\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert [name in out for name in report["rows"]] == [True] * 6
    assert {len(row["new_rounds_ms"]) for row in report["rows"].values()} == {3}

    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "src" / "layerwise" / "optim" / "optimizer.py").open("a") as file:
        file.write(SLEEP)
    assert run("--new", str(tmp_path)) == bench_check.SLOWER
    assert "Slower, new/old above 5: Muon, plain module; AdamW, plain module" in capsys.readouterr().out


@pytest.mark.slow
def test_the_error_of_a_worker_is_shown_and_ends_the_check(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(ROOT / "src" / "layerwise", tmp_path / "src" / "layerwise")
    (tmp_path / "src" / "layerwise" / "optim" / "optimizer.py").write_text("raise RuntimeError('broken tree')\n")
    assert bench_check.main(["--old", str(ROOT), "--new", str(tmp_path), "--cpu"]) == bench_check.NOT_MEASURED
    error = capfd.readouterr().err
    assert "broken tree" in error
    assert f"the worker of {str(tmp_path)!r} ended with exit code 1" in error


def test_a_worker_that_imports_another_tree_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-P", bench_check.__file__, "--worker", str(tmp_path), "--cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == bench_check.NOT_MEASURED
    assert "layerwise was imported from" in done.stderr

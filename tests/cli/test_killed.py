"""Runs of the trainer in which a process is killed with SIGKILL: ranks restart or end, and the folder of the run stays whole."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from layerwise.cli.exits import OK
from layerwise.cli.main import main
from layerwise.train.metrics import read_metrics
from tests.cli.test_main import layerwise
from tests.cli.test_train import SMALL, kinds_in

pytestmark = pytest.mark.slow

WATCHED = """
import os, pathlib, signal, threading, time

def sign():
    try:
        found = os.stat(os.environ["END_AT"])
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_mtime_ns) if found.st_size else None

def end_at_the_sign(before):
    while sign() in (None, before):
        time.sleep(0.002)
    pathlib.Path(os.environ["END_DONE"]).touch()
    os.kill(os.getpid(), signal.SIGKILL)

rank = os.environ.get("RANK", "none")
if "PIDS" in os.environ and rank != "none":
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(os.environ["PIDS"], f"{rank} of {attempt}").write_text(str(os.getpid()))
if os.environ.get("END_RANK") == rank:
    if os.path.exists(os.environ["END_DONE"]):
        time.sleep(3)
    else:
        threading.Thread(target=end_at_the_sign, args=(sign(),), daemon=True).start()
"""
"""Code that every Python process of a run executes first. The process of rank END_RANK kills itself once, as soon as END_AT is new
and not empty: a busy machine slows down the watcher and the run alike, and a test that polls from outside
could come too late. Once started again it comes 3 s after the others, which would meanwhile read what its predecessor has left."""
DEADLINE_S = 180.0
"""Seconds after which a run is taken to hang. An idle machine needs ten."""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question\n" * 200)
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "sitecustomize.py").write_text(WATCHED)
    (tmp_path / "runs").mkdir()
    (tmp_path / "pids").mkdir()
    out_dir = str(tmp_path / "runs" / "run")
    return ["train", *SMALL, "--data.path", str(tmp_path / "text.txt"), "--train.out-dir", out_dir]


def watched(tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a watched run, without the variable that has torchrun give each attempt a store of its own."""
    places = [str(tmp_path / "watch"), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **more}
    found.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    return found


def whole_checkpoints(run: Path) -> list[int]:
    """The steps of a run's checkpoints, of which every byte was verified. Beside them is only the name of the last one."""
    names = sorted(path.name for path in (run / "checkpoints").iterdir() if path.name != "latest")
    assert all(main(["ckpt", "verify", str(run / "checkpoints" / name)]) == OK for name in names), names
    assert (run / "checkpoints" / "latest").read_text().strip() == names[-1]
    return [int(name.removeprefix("step_")) for name in names]


def test_ranks_whose_launcher_is_killed_save_and_end(tmp_path: Path, words: list[str]) -> None:
    run = tmp_path / "runs" / "run"
    more = ("--train.steps", "100000", "--train.log-every", "1", "--checkpoint.every", "90000", "--nproc", "2")
    reader, writer = (
        os.pipe()
    )  # the ranks inherit the writer as their stdin: the reader sees its end when the last rank ends
    with (tmp_path / "said").open("w") as said:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "layerwise", *words, *more],
            env=watched(tmp_path, PIDS=str(tmp_path / "pids")),
            stdin=writer,
            stdout=said,
            stderr=said,
        )
    os.close(writer)
    ended = False
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not ((run / "metrics.jsonl").exists() and "step" in kinds_in(run / "metrics.jsonl")):
            assert launcher.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.05)
        launcher.kill()
        ended = bool(select.select([reader], [], [], DEADLINE_S)[0])
    finally:
        os.close(reader)
        launcher.kill()
        launcher.wait()
        for file in () if ended else (tmp_path / "pids").iterdir():
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)
    assert ended, f"a rank lives on: {(tmp_path / 'said').read_text()[-2000:]}"
    assert {file.name for file in (tmp_path / "pids").iterdir()} == {"0 of 0", "1 of 0"}
    assert kinds_in(run / "metrics.jsonl")[-1] == "end"
    (last,) = whole_checkpoints(run)
    assert last == [record["step"] for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"][-1]


def test_a_run_whose_ranks_torchrun_starts_again_reaches_its_last_step(tmp_path: Path, words: list[str]) -> None:
    """No environment variable is set for it: the ranks of the second attempt meet under a name of their own."""
    run = tmp_path / "runs" / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    more = ("--train.steps", "120", "--checkpoint.every", "20", "--checkpoint.keep", "none")
    killed = tmp_path / "killed"
    end = {"END_RANK": "1", "END_AT": str(run / "checkpoints" / "step_00000020"), "END_DONE": str(killed)}
    end["PIDS"] = str(tmp_path / "pids")
    with (tmp_path / "said").open("w") as said:
        agent = subprocess.Popen(
            [sys.executable, *torchrun, "-m", "layerwise", *words, *more],
            env=watched(tmp_path, **end),
            stdout=said,
            stderr=said,
        )
        try:
            code = agent.wait(timeout=DEADLINE_S)
        finally:
            if agent.poll() is None:
                agent.terminate()  # it ends its ranks
                try:
                    agent.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    agent.kill()
                    agent.wait()
    assert code == 0, (tmp_path / "said").read_text()[-3000:]
    assert killed.exists()
    assert {file.name for file in (tmp_path / "pids").iterdir()} == {"0 of 0", "1 of 0", "0 of 1", "1 of 1"}
    records = read_metrics(run / "metrics.jsonl")
    _, again = [record for record in records if record["kind"] == "run"]
    assert str(again["first_step"]) in map(str, range(20, 121, 20)), "it goes on from a checkpoint"
    assert [record["step"] for record in records if record["kind"] == "step"][-1] == 120
    assert records[-1]["kind"] == "end"
    assert whole_checkpoints(run) == list(range(20, 121, 20))
    assert os.listdir(tmp_path / "runs") == ["run"]


def test_a_run_that_is_killed_in_its_first_second_twice_has_one_folder(tmp_path: Path, words: list[str]) -> None:
    """The first kill comes when only its config is written, the second before its first checkpoint."""
    run = tmp_path / "runs" / "run"
    words = [*words, "--train.steps", "300", "--checkpoint.every", "300"]
    for number, sign in enumerate((run / "config.json", run / "metrics.jsonl")):
        killed = tmp_path / f"killed {number}"
        end = {"END_RANK": "none", "END_AT": str(sign), "END_DONE": str(killed)}
        done = layerwise(*words, **watched(tmp_path, **end))
        assert os.listdir(tmp_path / "runs") == ["run"]
        assert (done.returncode, killed.exists()) == (-signal.SIGKILL, True), done.stderr
        assert not list(run.glob("checkpoints/step_*[0-9]"))
    done = layerwise(*words, **watched(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"{run}: the run in it came to no checkpoint, and is begun anew." in done.stderr
    assert os.listdir(tmp_path / "runs") == ["run"]
    assert kinds_in(run / "metrics.jsonl").count("run") == 1
    assert kinds_in(run / "metrics.jsonl")[-1] == "end"
    assert whole_checkpoints(run) == [300]

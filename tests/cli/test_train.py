"""Training from the command line: alone, on two ranks, stopped early."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from layerwise.cli.exits import BAD_INPUT, OK
from layerwise.cli.main import main
from tests.cli.test_main import layerwise

CONFIGS = Path(__file__).parents[2] / "configs"

SMALL = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.n-kv-heads", "1"),
    *("--model.seq-len", "16", "--train.batch-size", "2", "--train.steps", "6", "--schedule.warmup-steps", "1"),
    *("--train.log-every", "2", "--train.eval-every", "0", "--train.eval-sequences", "4", "--train.device", "cpu"),
)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question\n" * 200)
    return str(tmp_path / "text.txt")


def kinds_in(metrics: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in metrics.read_text().splitlines()]


def test_a_plain_run_prints_plain_lines_and_leaves_a_report_and_a_config_that_repeats_it(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "run"
    done = layerwise("train", *SMALL, "--data.path", text, "--train.out-dir", str(out_dir), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "importing torch\nreading 8.2 KiB of text\n"
    lines = done.stdout.splitlines()
    assert "on 1 rank (cpu), layout flat, plan " in lines[0]
    assert lines[1].startswith("routing: matrix 4 params")
    assert lines[3].startswith("eval 0/6   0% | validation ")
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == ["step 2/6  33%", "step 4/6  66%", "step 6/6 100%"]
    for column in ("loss ", "bpb ", "grad ", " ms", " tok/s", "eta "):
        assert all(column in line for line in steps)
    assert lines[-3].startswith("finished: 6 steps, 192 tokens in ")
    assert lines[-2].startswith("validation: ")
    assert lines[-1] == f"report: {out_dir}/report.html (beside it loss.svg, metrics.jsonl, config.json)"
    assert "\x1b" not in done.stdout
    ElementTree.parse(out_dir / "loss.svg")
    assert kinds_in(out_dir / "metrics.jsonl") == ["run", "eval", "step", "step", "step", "eval", "end"]

    assert main(["train", str(out_dir / "config.json")]) == OK
    outputs = (done.stdout, capsys.readouterr().out)
    evals = [[line for line in output.splitlines() if line.startswith("eval")] for output in outputs]
    assert evals[0] == evals[1]
    assert (tmp_path / "run-2" / "report.html").exists()


@pytest.mark.slow
def test_two_ranks_through_torchrun_speak_with_one_voice(tmp_path: Path, text: str) -> None:
    out_dir = tmp_path / "run"
    done = layerwise("train", *SMALL, "--data.path", text, "--train.out-dir", str(out_dir), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[0].startswith("+ OMP_NUM_THREADS=")
    assert done.stdout.count("finished: 6 steps") == 1
    assert "on 2 ranks (cpu)" in done.stdout
    assert kinds_in(out_dir / "metrics.jsonl").count("run") == 1


@pytest.mark.slow
def test_a_pipeline_trains_on_two_ranks_through_torchrun(tmp_path: Path, text: str) -> None:
    out_dir = tmp_path / "run"
    words = ("--parallel.chunks", "2", "--model.seq-len", "16", "--train.steps", "4", "--train.log-every", "2")
    words = (*words, "--schedule.warmup-steps", "1", "--train.eval-sequences", "3", "--data.path", text)
    words = (*words, "--train.out-dir", str(out_dir), "--nproc", "2")
    done = layerwise("train", str(CONFIGS / "pipeline.toml"), *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished: 4 steps") == 1
    assert "routing: on rank 0: matrix " in done.stdout
    assert kinds_in(out_dir / "metrics.jsonl") == ["run", "eval", "step", "step", "eval", "end"]


def test_a_number_of_ranks_that_does_not_fit_is_refused_before_any_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = str(CONFIGS / "pipeline.toml")
    for words, found in (([], 1), (["--nproc", "3"], 3), (["--dry-run", "--nproc", "5"], 5)):
        assert main(["train", pipeline, *words]) == BAD_INPUT
        assert f"parallel.pp: expected a multiple of pp=2 ranks, got {found}." in capsys.readouterr().err
    assert main(["train", pipeline, "--dry-run"]) == OK  # of how many ranks is not known
    for rank, lines in ((0, 2), (1, 0)):  # said once, by the first rank of a machine
        capsys.readouterr()
        for variable, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3)):
            monkeypatch.setenv(variable, str(value))
        assert main(["train", pipeline]) == BAD_INPUT
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_signal_ends_the_run_with_a_report(tmp_path: Path, text: str) -> None:
    out_dir = tmp_path / "run"
    words = ["train", *SMALL, "--train.steps", "100000", "--data.path", text, "--train.out-dir", str(out_dir)]
    run = subprocess.Popen(
        [sys.executable, "-m", "layerwise", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + 240
        metrics = out_dir / "metrics.jsonl"
        while not (metrics.exists() and "step" in kinds_in(metrics)) and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=240)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 0, stderr
    assert "stopped on request at step" in stdout
    assert (out_dir / "report.html").exists()
    assert kinds_in(metrics)[-1] == "end"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom", "code"),
    [
        (signal.SIGINT, "all", 130),
        (signal.SIGTERM, "launcher", 143),
        (signal.SIGUSR1, "launcher", 138),
        (signal.SIGHUP, "launcher", 129),
    ],
)
def test_a_signal_to_several_ranks_ends_with_our_lines_and_no_traceback(
    tmp_path: Path, text: str, number: signal.Signals, whom: str, code: int
) -> None:
    """As a terminal sends it, to all of a process group, or a scheduler, to the process that it started."""
    out_dir = tmp_path / "run"
    words = ["train", *SMALL, "--train.steps", "100000", "--train.log-every", "1", "--checkpoint.every", "90000"]
    words = [*words, "--data.path", text, "--train.out-dir", str(out_dir), "--nproc", "2"]
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(
            [sys.executable, "-m", "layerwise", *words],
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # a suite under nohup ignores it
        ) as run,
    ):
        try:
            metrics = out_dir / "metrics.jsonl"
            deadline = time.monotonic() + 120
            while not (metrics.exists() and "step" in kinds_in(metrics)) and time.monotonic() < deadline:
                time.sleep(0.1)
            (os.killpg if whom == "all" else os.kill)(run.pid, number)
            assert run.wait(timeout=120) == code
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    lines = (tmp_path / "said").read_text().splitlines()
    assert [line.split(" ")[0] for line in lines[-3:]] == ["stopped", "validation:", "report:"]
    assert lines[-3].startswith("stopped on request at step ")
    assert not any("Traceback" in line or "SignalException" in line for line in lines)
    assert kinds_in(metrics)[-1] == "end"
    assert [path.name[:5] for path in sorted((out_dir / "checkpoints").glob("step_*"))] == ["step_"]


@pytest.mark.slow
def test_ranks_that_fail_end_with_the_summary_of_torchrun(tmp_path: Path, text: str) -> None:
    words = ("train", *SMALL, "--data.path", text, "--train.out-dir", str(tmp_path / "run"), "--nproc", "2")
    done = layerwise(*words, "--train.device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "torch sees no GPU" in done.stderr
    assert "Root Cause (first observed failure)" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_an_environment_problem(tmp_path: Path, text: str) -> None:
    done = layerwise("train", *SMALL, "--data.path", text, "--train.device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 3
    assert "torch sees no GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_rules_are_bad_input_before_and_after_the_model_is_built(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    words = ("train", *SMALL, "--data.path", text, "--train.out-dir", str(tmp_path / "run"))
    for content, message in (
        ("[[rule]]\nto = 3\n", "rule 1.to: expected a string, got 3."),
        ('[[rule]]\npattern = "*.uot.weight"\nto = "other"\n', "route rule 1 ('*.uot.weight') matches no param."),
    ):
        rules.write_text(content)
        assert main([*words, "--routing.rules-file", str(rules)]) == BAD_INPUT
        error = capsys.readouterr().err
        assert f"1 problem in the configuration:\n  1. {rules}: {message}" in error
        assert "Traceback" not in error

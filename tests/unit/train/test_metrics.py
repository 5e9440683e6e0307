import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from layerwise.config.load import load
from layerwise.config.schema import CheckpointConfig, LoopConfig, OptimConfig, TrainConfig
from layerwise.errors import ConfigError
from layerwise.train import rundir
from layerwise.train.metrics import (
    SCHEMA,
    EndRecord,
    EvalRecord,
    MetricsFile,
    Record,
    RunRecord,
    StepRecord,
    read_metrics,
    to_json,
)
from layerwise.train.rundir import create_run_dir, write_report


def run_record() -> RunRecord:
    return RunRecord(
        layerwise="0",
        torch="0",
        python="3",
        world=2,
        device="cpu",
        num_params=10,
        routing="matrix 1 params, 10 elements",
        layout="flat",
        plan_digest="abc",
        data_digest="def",
        train_bytes=100,
        val_bytes=10,
        steps=5,
        tokens_per_step=8,
        config={"optim": {"lr": float("inf"), "betas": (0.9, 0.95)}},
    )


def step_record(step: int, loss: float = 2.0) -> StepRecord:
    return StepRecord(
        step=step,
        loss=loss,
        bpb=loss / 0.6931,
        grad_norm=1.0,
        skipped=0,
        skip_reason="",
        lr_factor=1.0,
        step_ms=10.0,
        tokens_per_s=100.0,
        bytes_sent=0,
        elapsed_s=float(step),
    )


def eval_record(step: int, val_bpb: float = 3.0) -> EvalRecord:
    return EvalRecord(step=step, val_loss=val_bpb * 0.6931, val_bpb=val_bpb, elapsed_s=float(step))


def end_record(step: int) -> EndRecord:
    return EndRecord(
        step=step, outcome="finished", first_val_bpb=8.0, final_val_bpb=3.0, tokens=99, tokens_per_s=1.0, elapsed_s=9.0
    )


def test_every_record_is_one_line_of_json_with_its_kind() -> None:
    kinds = []
    for record in (run_record(), step_record(1), eval_record(1), end_record(1)):
        line = to_json(record)
        assert "\n" not in line
        kinds.append(json.loads(line)["kind"])
    assert kinds == ["run", "step", "eval", "end"]
    assert json.loads(to_json(run_record()))["schema"] == SCHEMA == 1


def test_the_fields_of_schema_1_are_pinned() -> None:
    names = {
        record.kind: sorted(json.loads(to_json(record))) for record in (step_record(1), eval_record(1), end_record(1))
    }
    assert names == {
        "step": sorted(
            [
                "kind",
                "step",
                "loss",
                "bpb",
                "grad_norm",
                "max_logit",
                "clipped_heads",
                "skipped",
                "skip_reason",
                "lr_factor",
                "step_ms",
                "tokens_per_s",
                "bytes_sent",
                "elapsed_s",
            ]
        ),
        "eval": sorted(["kind", "step", "val_loss", "val_bpb", "elapsed_s"]),
        "end": sorted(
            ["kind", "step", "outcome", "first_val_bpb", "final_val_bpb", "tokens", "tokens_per_s", "elapsed_s"]
        ),
    }


def test_numbers_that_are_not_finite_become_null() -> None:
    assert json.loads(to_json(step_record(1, loss=float("nan"))))["loss"] is None
    assert json.loads(to_json(run_record()))["config"] == {"optim": {"lr": None, "betas": [0.9, 0.95]}}


def test_what_is_written_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(step_record(1))
    assert [record["step"] for record in read_metrics(file.path)] == [1]
    file.write(step_record(2))
    assert [record["step"] for record in read_metrics(file.path)] == [1, 2]
    file.close()


def test_a_line_that_a_crash_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_json(step_record(1)) + "\n" + to_json(step_record(2))[:20])
    assert [record["step"] for record in read_metrics(path)] == [1]


def test_a_full_disk_ends_the_writing_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")

    def fail(text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file._file, "write", fail, raising=True)
    file.write(step_record(1))
    file.write(step_record(2))
    assert file.failure is not None
    assert "no longer written" in file.failure
    assert "No space left on device" in file.failure


def test_what_a_run_goes_on_from_is_kept_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for record in (run_record(), step_record(1), step_record(2)):
        file.write(record)
    file.close()
    before = path.read_bytes()
    going_on = replace(run_record(), first_step=1)

    def fail(self: Path, text: str, encoding: str = "") -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_text", fail)
        again = MetricsFile(path)
        again.write(going_on)
    assert again.failure is not None
    assert path.read_bytes() == before
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    again = MetricsFile(path)
    for record in (going_on, step_record(2, loss=1.0)):
        again.write(record)
    again.close()
    assert [(record["kind"], record.get("step")) for record in read_metrics(path)] == [
        ("run", None),
        ("step", 1),
        ("run", None),
        ("step", 2),
    ]


def test_what_is_validated_once_more_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for record in (run_record(), eval_record(0), step_record(3), eval_record(3), step_record(4), end_record(4)):
        file.write(record)
    file.close()
    file = MetricsFile(path)
    file.write(replace(run_record(), first_step=3))
    assert [record["kind"] for record in read_metrics(path)] == ["run", "eval", "step", "eval", "run"]
    file.write(eval_record(3))
    file.write(step_record(4))
    file.close()
    assert [(record["kind"], record.get("step")) for record in read_metrics(path)] == [
        ("run", None),
        ("eval", 0),
        ("step", 3),
        ("run", None),
        ("eval", 3),
        ("step", 4),
    ]


def test_two_runs_are_not_at_work_in_one_folder(tmp_path: Path) -> None:
    run = create_run_dir(TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run"))))
    said = r"train.out_dir: another run is at work in '.*run'"
    with run.claimed(), pytest.raises(ConfigError, match=said), run.claimed():
        pass
    with run.claimed():
        pass


def test_a_run_that_was_refused_leaves_nothing(tmp_path: Path) -> None:
    run = create_run_dir(TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run"))))
    with run.claimed():
        file = MetricsFile(run.metrics)
        file.close()
        run.discard()
    assert not list(tmp_path.iterdir())
    run = create_run_dir(TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run"))))
    file = MetricsFile(run.metrics)
    file.write(run_record())
    file.close()
    run.discard()
    assert run.config.exists()


def test_the_folder_that_one_is_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = TrainConfig(train=LoopConfig(out_dir="."))
    assert [create_run_dir(config).root.resolve().name for _ in range(2)] == ["here", "here-2"]


def test_a_full_disk_leaves_no_name_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run")))

    def fail(config: TrainConfig) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(rundir, "dump_json", fail)
        with pytest.raises(OSError, match="No space left"):
            create_run_dir(config)
    assert create_run_dir(config).root == tmp_path / "run"


def test_no_run_overwrites_another(tmp_path: Path) -> None:
    config = TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run")))
    names = [create_run_dir(config).root.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]
    assert load(str(tmp_path / "run-2" / "config.json")).config == config


def test_the_report_is_written_from_the_metrics(tmp_path: Path) -> None:
    run_dir = create_run_dir(TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run"))))
    file = MetricsFile(run_dir.metrics)
    for record in (run_record(), eval_record(0, 8.0), step_record(1), eval_record(1), end_record(1)):
        file.write(record)
    file.close()
    write_report(run_dir)
    assert run_dir.curve.read_text().startswith("<svg")
    assert "3.0000 bits per byte" in run_dir.report.read_text()


def begin(config: TrainConfig, *records: Record) -> Path:
    """The folder of a run that has written these records, as it is once its process is dead."""
    run = create_run_dir(config)
    with run.claimed():
        run.begin_anew(config)
        file = MetricsFile(run.metrics)
        for record in records:
            file.write(record)
        file.close()
    return run.root


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew_in_its_folder(tmp_path: Path) -> None:
    config = TrainConfig(
        train=LoopConfig(out_dir=str(tmp_path / "run")), checkpoint=CheckpointConfig(every=100, keep=None)
    )
    root = begin(config, run_record(), step_record(1))
    (root / "checkpoints" / "step_00000100.partial").mkdir(parents=True)
    (root / "checkpoints" / ".latest.partial").touch()
    other = replace(config, optim=OptimConfig(lr=0.125))
    for records in ((run_record(), step_record(7)), ()):  # killed with a line in its log, and without
        assert begin(other, *records) == root
        assert [record["kind"] for record in read_metrics(root / "metrics.jsonl")] == [
            record.kind for record in records
        ]
        assert sorted(path.name for path in root.iterdir()) == [".lock", "config.json", "metrics.jsonl"]
        assert load(str(root / "config.json")).config == other
    (root / "config.json").write_text("")  # killed in the middle of writing it
    assert begin(config) == root
    assert load(str(root / "config.json")).config == config


@pytest.mark.parametrize("what", ["ended", "saves nothing", "set aside", "not ours", "resume is off"])
def test_what_is_worth_keeping_keeps_its_folder(tmp_path: Path, what: str) -> None:
    checkpoint = CheckpointConfig(every=100, resume=what != "resume is off")
    config = TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run")), checkpoint=checkpoint)
    records: list[Record] = [run_record(), step_record(1)]
    if what == "ended":
        records.append(end_record(1))
    if what == "saves nothing":
        records[0] = replace(run_record(), config={"checkpoint": {"every": 0}})
    root = begin(config, *records)
    if what == "set aside":
        (root / "checkpoints" / "step_00000100.aside").mkdir(parents=True)
    if what == "not ours":  # the config.json of a model, say
        (root / ".lock").unlink()
    before = sorted((path.name, path.read_bytes()) for path in root.iterdir() if path.is_file())
    assert begin(config) == tmp_path / "run-2"
    assert sorted((path.name, path.read_bytes()) for path in root.iterdir() if path.is_file()) == before


def test_the_report_has_the_settings_of_the_newest_run(tmp_path: Path) -> None:
    run_dir = create_run_dir(TrainConfig(train=LoopConfig(out_dir=str(tmp_path / "run"))))
    file = MetricsFile(run_dir.metrics)
    going_on = replace(run_record(), config={"optim": {"lr": 0.375}}, world=3, steps=9, first_step=1)
    for record in (run_record(), eval_record(0, 8.0), step_record(1), going_on, step_record(2), end_record(2)):
        file.write(record)
    file.close()
    write_report(run_dir)
    page = run_dir.report.read_text()
    assert "<th>lr</th><td>0.375</td>" in page
    assert "<th>ranks</th><td>3 on cpu</td>" in page
    assert "<th>steps</th><td>2 of 9</td>" in page
    assert page.count("<th>lr</th>") == 1

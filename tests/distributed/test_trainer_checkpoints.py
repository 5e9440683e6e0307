"""A training run that was stopped goes on by the same command: with the same samples, rates and bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import layerwise
from layerwise.cli.exits import OK
from layerwise.cli.main import main
from layerwise.comm.joining import Ranks
from layerwise.config.schema import CheckpointConfig, TrainConfig
from layerwise.train import loop
from layerwise.train.metrics import Record, RunRecord, StepRecord
from tests.distributed.trainer_jobs import CPU, small_config
from tests.marks import sampled
from tests.ranks import raised, run_ranks
from tests.reliability.training import held_up
from tests.worlds import hash_tensors, held

MOE = {"n_experts": 4, "top_k": 2, "expert_hidden": 8, "router_penalty": 0.05}
MODES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "flat": (2, {}, {}),
    "padded, overlap off": (3, {"layout": "padded", "overlap_param_gather": False, "overlap_grad_reduce": False}, {}),
    "compact, ordered": (2, {"layout": "compact", "reducer": "ordered"}, {}),
    "experts": (2, {"ep": 2}, MOE),
    "pipeline, tied": (2, {"pp": 2}, {"tie_embeddings": True}),
    "chunks": (2, {"pp": 2, "chunks": 2}, {"n_layers": 4}),
    "ddp": (2, {"ddp": True}, {}),
    "fsdp": (2, {"fsdp": 2}, {}),
    "hsdp": (4, {"replicate": 2, "fsdp": 2}, {}),
    "fsdp x tp": (4, {"fsdp": 2, "tp": 2}, {}),
    "ep x fsdp": (4, {"fsdp": 4, "ep": 2}, MOE),
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("to be, or not to be, that is the question\n" * 200)
    return str(tmp_path / "text.txt")


def config_of(text: str, mode: str, **checkpoint: Any) -> TrainConfig:
    _, parallel, model = MODES[mode]
    found = small_config(text, model=model, parallel=parallel, train={"steps": 8, "accumulation": 4, "eval_every": 0})
    return replace(found, checkpoint=CheckpointConfig(**{"every": 3, **checkpoint}))


class Heard:
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.first_step = -1

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.losses[record.step] = record.loss
        if isinstance(record, RunRecord):
            self.first_step = record.first_step


def hash_of(optimizer: layerwise.Optimizer) -> str:
    """Weights, masters and state of this rank, whatever cut them."""
    optimizer.engine.publisher.ensure_all()
    return hash_tensors(held(optimizer.engine.storage))


def train(
    rank: int, world: int, config: TrainConfig, folder: str, stop_after: int = 0
) -> tuple[dict[int, float], int, tuple[float, float], str]:
    """Losses by step, the step that it went on from, both validations, and a hash of everything there is at the end."""
    heard, kept = Heard(), []
    prepare = loop.prepare

    def remember(*args: Any) -> loop.Run:
        kept.append(prepare(*args))
        return kept[0]

    with (
        mock.patch.object(loop, "prepare", remember),
        mock.patch.object(loop.Run, "should_stop", lambda self, stop, step: step == stop_after),
    ):
        where = Path(folder) if rank == 0 else None  # the first rank says where
        ranks = Ranks(rank=rank, world=world, local_rank=rank, device=CPU)
        end = loop.train(config, ranks, (heard,), checkpoints=where)
    return heard.losses, heard.first_step, (end.first_val_bpb, end.final_val_bpb), hash_of(kept[0].optimizer)


@pytest.mark.parametrize("mode", sampled(MODES, "flat"))
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path: Path, text: str, mode: str) -> None:
    world, config = MODES[mode][0], config_of(text, mode)
    straight = run_ranks(world, train, config, str(tmp_path / "straight"))
    stopped = run_ranks(world, train, config, str(tmp_path / "run"), 4)
    assert [name.name for name in sorted((tmp_path / "run").glob("step_*"))] == ["step_00000003", "step_00000004"]
    resumed = run_ranks(world, train, config, str(tmp_path / "run"))
    for whole, first, second in zip(straight, stopped, resumed, strict=True):
        assert (whole[1], second[1]) == (0, 4)
        assert {**first[0], **second[0]} == whole[0]
        assert sorted(second[0]) == [5, 6, 7, 8]
        assert second[2] == whole[2]
        assert second[3] == whole[3]
    assert straight[0][3] != stopped[0][3]  # the hash sees what four steps change


@pytest.mark.parametrize("log_every", [4, 5])
def test_a_run_that_was_killed_behind_a_checkpoint_has_the_log_of_one_that_was_not(
    tmp_path: Path, text: str, log_every: int
) -> None:
    """Also where a line is an average over steps from before and behind it."""
    config = config_of(text, "flat", keep=8)
    config = replace(config, train=replace(config.train, log_every=log_every, eval_every=3))
    straight = run_ranks(2, train, config, str(tmp_path / "run"))
    assert sorted(straight[0][0]) == sorted({3, 6, 8, log_every})
    for number in (6, 8):
        shutil.rmtree(tmp_path / "run" / f"step_0000000{number}")
    for whole, second in zip(straight, run_ranks(2, train, config, str(tmp_path / "run")), strict=True):
        assert second[0] == {step: loss for step, loss in whole[0].items() if step > 3}
        assert second[2:] == whole[2:]


def test_a_run_goes_on_to_the_bit_from_what_was_written_in_the_background(tmp_path: Path, text: str) -> None:
    config = config_of(text, "flat", every=1)
    aside = replace(config, checkpoint=replace(config.checkpoint, background=True))
    straight = run_ranks(2, train, config, str(tmp_path / "straight"))
    stopped = run_ranks(2, train, aside, str(tmp_path / "run"), 4)
    assert [path.name for path in sorted((tmp_path / "run").glob("step_*"))] == [f"step_0000000{n}" for n in (2, 3, 4)]
    resumed = run_ranks(2, train, aside, str(tmp_path / "run"))
    for whole, first, second in zip(straight, stopped, resumed, strict=True):
        assert (second[1], {**first[0], **second[0]}, second[2:]) == (4, whole[0], whole[2:])


def fails_in_the_background(rank: int, world: int, config: TrainConfig, folder: str) -> tuple[str, int]:
    """What a run says whose second rank cannot write its third checkpoint, and how many steps it took."""
    heard = Heard()

    def fail(rank: int, partial: Path) -> None:
        if rank == 1 and "step_00000003" in partial.name:
            raise OSError(28, "No space left on device")

    with held_up(fail):
        ranks = Ranks(rank=rank, world=world, local_rank=rank, device=CPU)
        said = raised(lambda: loop.train(config, ranks, (heard,), checkpoints=Path(folder)))
    return said, max(heard.losses, default=0)


def test_a_run_ends_soon_after_a_checkpoint_could_not_be_written(tmp_path: Path, text: str) -> None:
    config = config_of(text, "flat", every=3, background=True)
    config = replace(config, train=replace(config.train, steps=400, log_every=1))
    for said, steps in run_ranks(2, fails_in_the_background, config, str(tmp_path / "run")):
        assert "No space left on device" in said
        assert 0 < steps < 100  # as many as two threads need to hear of it, not the whole run
    assert not list((tmp_path / "run").glob("step_????????"))


def test_another_number_of_ranks_goes_on_with_the_next_sample_and_follows_the_run(tmp_path: Path, text: str) -> None:
    """Of the same 8 samples in a step two ranks read 4 each, one rank 8: sums round differently, samples are the same."""
    config = config_of(text, "flat")
    ((straight, *_), _) = run_ranks(2, train, config, str(tmp_path / "straight"))
    run_ranks(2, train, config, str(tmp_path / "run"), 4)
    alone = replace(config, train=replace(config.train, accumulation=8))
    ((losses, first, *_),) = run_ranks(1, train, alone, str(tmp_path / "run"))
    assert first == 4
    assert sorted(losses) == [5, 6, 7, 8]
    for step, loss in losses.items():
        assert loss == pytest.approx(straight[step], rel=1e-5)


def test_batches_of_another_size_begin_after_the_last_sample(tmp_path: Path, text: str) -> None:
    run = loop.prepare(config_of(text, "flat"), Ranks(rank=0, world=1, local_rank=0, device=CPU))
    larger = replace(run.loader.batching, batch_size=3).going_on(4, 32)
    assert list(larger.sample_numbers(4, 0, 0)) == [32, 33, 34]
    assert list(larger.sample_numbers(5, 0, 0)) == [44, 45, 46]
    assert larger.samples_before(5) == 44


def other_text(rank: int, world: int, config: TrainConfig, folder: str) -> str:
    return raised(lambda: train(rank, world, config, folder))


def test_a_run_on_other_text_or_of_another_model_is_refused_by_name(tmp_path: Path, text: str) -> None:
    config = config_of(text, "flat")
    run_ranks(2, train, config, str(tmp_path / "run"), 4)
    other = replace(config, data=replace(config.data, seed=7))
    for said in run_ranks(2, other_text, other, str(tmp_path / "run")):
        assert "data: the checkpoint is of a run on other samples" in said
        assert "checkpoint.resume=false" in said
    kept = replace(config, data=replace(config.data, val_fraction=0.5))
    for said in run_ranks(2, other_text, kept, str(tmp_path / "run")):
        assert "data: the checkpoint is of a run on other samples" in said
        assert "bytes of it to validate" in said
    heads = replace(config, model=replace(config.model, n_heads=4, n_kv_heads=2))  # of weights of the same shapes
    for said in run_ranks(2, other_text, heads, str(tmp_path / "run")):
        assert "model: the checkpoint is of another model: model.n_heads was 2, here 4, model.n_kv_heads was 1" in said
    wider = replace(config, model=replace(config.model, d_model=24))
    for said in run_ranks(2, other_text, wider, str(tmp_path / "run")):
        assert "CheckpointError: the checkpoint does not fit the model" in said
        assert "'embed.weight' has the shape (256, 16) in the checkpoint, expected (256, 24)." in said


def test_a_new_run_is_begun_where_that_is_asked_for_and_none_are_written_unless_asked_for(
    tmp_path: Path, text: str
) -> None:
    config = config_of(text, "flat", keep=1)
    run_ranks(1, train, config, str(tmp_path / "run"), 4)
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_00000004"]
    fresh = replace(config, checkpoint=replace(config.checkpoint, resume=False))
    ((losses, first, *_),) = run_ranks(1, train, fresh, str(tmp_path / "run"), 2)
    assert (first, sorted(losses)) == (0, [1, 2])
    run_ranks(1, train, replace(config, checkpoint=CheckpointConfig()), str(tmp_path / "none"), 2)
    assert not (tmp_path / "none").exists()


def told(rank: int, world: int, config: TrainConfig, folder: str) -> RunRecord:
    """What a run that goes on says of itself."""
    heard: list[Record] = []
    watcher = mock.Mock(write=heard.append)
    loop.train(config, Ranks(rank=rank, world=world, local_rank=rank, device=CPU), (watcher,), checkpoints=Path(folder))
    return next(record for record in heard if isinstance(record, RunRecord))


def test_what_changed_since_the_checkpoint_is_told_with_the_global_batch(tmp_path: Path, text: str) -> None:
    config = config_of(text, "flat")
    run_ranks(2, train, config, str(tmp_path / "run"), 4)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    (same, _) = run_ranks(2, told, config, str(tmp_path / "same"))
    assert (same.first_step, same.changes, same.tokens_per_step_before) == (4, (), same.tokens_per_step)
    other = replace(
        config,
        optim=replace(config.optim, lr=0.5, clip_grad_norm=None),
        train=replace(config.train, steps=9, batch_size=1),
    )
    (alone,) = run_ranks(1, told, other, str(tmp_path / "run"))
    assert alone.changes == (
        "optim.lr 0.02 -> 0.5",
        "optim.clip_grad_norm 0.5 -> none",
        "train.steps 8 -> 9",
        "train.batch_size 2 -> 1",
        "ranks 2 -> 1",
        "tokens per step 128 -> 32",
    )
    assert (alone.tokens_per_step_before, alone.tokens_per_step) == (128, 32)


def without_sizes(rank: int, world: int, config: TrainConfig, folder: str) -> RunRecord:
    """What is told where the checkpoint is of a version that knew neither sizes nor `train.stop_signals`."""
    load = layerwise.Checkpoints.load

    def older(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        assert found is not None
        progress = {name: value for name, value in found.extra["progress"].items() if name not in SIZES}
        saved = json.loads(found.extra["config"])
        del saved["train"]["stop_signals"]
        return replace(found, extra={"progress": progress, "config": json.dumps(saved)})

    with mock.patch.object(layerwise.Checkpoints, "load", older):
        return told(rank, world, config, folder)


SIZES = ("world", "tokens_per_step")


def test_a_checkpoint_of_an_older_version_goes_on_and_tells_what_it_knows(tmp_path: Path, text: str) -> None:
    config = config_of(text, "flat")
    run_ranks(1, train, config, str(tmp_path / "run"), 4)
    other = replace(config, optim=replace(config.optim, lr=0.5))
    ((record),) = run_ranks(1, without_sizes, other, str(tmp_path / "run"))
    assert record.changes == ("optim.lr 0.02 -> 0.5",)
    assert record.tokens_per_step_before is None


def test_two_fresh_runs_have_equal_checkpoints(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With generators of their own on every rank, so that a model that draws repeats itself, and ranks draw apart."""
    config = config_of(text, "flat")
    for name in ("first", "second"):
        run_ranks(2, train_as_a_new_process, config, str(tmp_path / name), 4)
    first, second = (tmp_path / name / "step_00000004" for name in ("first", "second"))
    assert main(["ckpt", "diff", str(first), str(second)]) == OK, capsys.readouterr().out
    other = replace(config, train=replace(config.train, seed=1))
    states = [state for seeded in (config, other) for state in run_ranks(2, drawn, seeded)]
    assert len(set(states)) == 4


def train_as_a_new_process(rank: int, world: int, config: TrainConfig, folder: str, stop_after: int) -> None:
    """As in a process that was not forked: its generator begins anywhere."""
    torch.seed()
    train(rank, world, config, folder, stop_after)


def drawn(rank: int, world: int, config: TrainConfig) -> float:
    """The first number that torch draws on a rank of a run."""
    loop.prepare(config, Ranks(rank=rank, world=world, local_rank=rank, device=CPU))
    return float(torch.rand((), dtype=torch.float64))

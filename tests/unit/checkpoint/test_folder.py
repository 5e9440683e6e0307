"""A folder of checkpoints: what was left behind by those who were killed goes with the next save, and what is of a run that was given
up is not taken for the last of this one."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.checkpoint import files, saving
from layerwise.checkpoint import folder as folders
from layerwise.checkpoint.disk import write_files
from layerwise.errors import CheckpointError
from tests.ranks import raised, run_ranks


def build() -> tuple[nn.Linear, layerwise.Optimizer]:
    model = nn.Linear(3, 2)
    return model, layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))


def train(model: nn.Module, optimizer: layerwise.Optimizer, steps: int = 1) -> Tensor:
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return next(model.parameters()).detach().clone()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "latest")


def test_what_was_not_finished_goes_and_nothing_else(tmp_path: Path) -> None:
    model, optimizer = build()
    for name in ("step_00000001.partial", "step_00000002.partial", "mine.partial", "step_1.partial", "step_00000001"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (tmp_path / "step_00000003.partial").touch()
    for keep in (3, None):
        layerwise.Checkpoints(tmp_path, keep=keep).save(model, optimizer, step=2 if keep else 4)
    assert names_in(tmp_path) == [
        "mine.partial",
        "step_00000001",
        "step_00000002",
        "step_00000003.partial",
        "step_00000004",
        "step_1.partial",
    ]


def go_back(rank: int, world: int, folder: str) -> tuple[list[bool], list[str]]:
    """Two checkpoints, back to the first, and on from there past the second: whether a run that is started anew finds what was
    trained last."""
    module = nn.Linear(3, 2)
    model = module if world == 1 else layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    checkpoints = layerwise.Checkpoints(folder, keep=2)
    for step in (100, 200):
        train(model, optimizer)
        checkpoints.save(model, optimizer, step=step)
    checkpoints.load(model, optimizer, step=100)
    found = []
    for number, step in enumerate((150, 200)):
        own = train(model, optimizer, 3)
        if rank == 0 and number == 0:
            with pytest.warns(UserWarning, match=r"went back before them, to step 100.*step_00000200.aside"):
                checkpoints.save(model, optimizer, step=step)
        else:
            checkpoints.save(model, optimizer, step=step)
        train(model, optimizer)
        layerwise.Checkpoints(folder).load(model, optimizer)
        found.append(torch.equal(next(model.parameters()).detach(), own))
        checkpoints.load(model, optimizer)
    return found, names_in(Path(folder))


@pytest.mark.parametrize("world", [1, 2])
def test_going_back_sets_aside_what_was_given_up(tmp_path: Path, world: int) -> None:
    for found, names in run_ranks(world, go_back, str(tmp_path)):
        assert found == [True, True]
        assert names == ["step_00000150", "step_00000200", "step_00000200.aside"]


def test_a_run_that_loads_nothing_does_not_take_over_checkpoints_of_another(tmp_path: Path) -> None:
    for turn in range(3):
        model, optimizer = build()
        own = train(model, optimizer, 2 + turn)
        checkpoints = layerwise.Checkpoints(tmp_path, keep=None)
        if turn:
            with pytest.warns(UserWarning, match="has loaded none of them"):
                checkpoints.save(model, optimizer, step=5)
        else:
            checkpoints.save(model, optimizer, step=5)
        checkpoints.save(model, optimizer, step=5)  # again: it is there
        train(model, optimizer)
        layerwise.Checkpoints(tmp_path).load(model, optimizer)
        assert torch.equal(model.weight.detach(), own)
    assert names_in(tmp_path) == ["step_00000005", "step_00000005.aside", "step_00000005.aside1"]


@pytest.mark.parametrize("step", [-1, True, 1.5, "x"])
def test_a_step_that_could_not_be_found_again_is_refused(tmp_path: Path, step: Any) -> None:
    model = layerwise.DataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"step must be a number of steps, 0 or more, got {step!r}."):
        layerwise.Checkpoints(tmp_path).save(model, step=step)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_the_same_wherever_the_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model, optimizer = build()
    saving = layerwise.save("one", model, optimizer, background=True)
    checkpoints = layerwise.Checkpoints("many")
    os.chdir("elsewhere")
    assert saving.wait() == tmp_path / "one"
    checkpoints.save(model, optimizer, step=3)
    assert (tmp_path / "one").is_dir()
    assert (tmp_path / "many" / "step_00000003").is_dir()


def saved(folder: Path, *steps: int, **more: Any) -> tuple[layerwise.Checkpoints, nn.Linear, layerwise.Optimizer]:
    """A run that has saved these steps."""
    model, optimizer = build()
    checkpoints = layerwise.Checkpoints(folder, **more)
    for step in steps:
        train(model, optimizer)
        checkpoints.save(model, optimizer, step=step)
    return checkpoints, model, optimizer


def test_a_second_run_leaves_alone_what_the_first_is_writing_and_has_written(tmp_path: Path) -> None:
    mine, model, optimizer = saved(tmp_path, 90, 100)
    unfinished = tmp_path / "step_00000110.partial"
    unfinished.mkdir()
    with pytest.warns(UserWarning, match="another run saves into .*: what it has written stays"):
        theirs, *rest = saved(tmp_path, 5, 6, keep=1)
    assert names_in(tmp_path) == ["step_00000006", "step_00000090", "step_00000100", unfinished.name]
    with pytest.raises(CheckpointError, match=r"step_00000110\.partial is there, and another run saves into"):
        theirs.save(*rest, step=110)
    assert unfinished.is_dir()
    # Once the other is gone, the folder is this run's.
    del theirs
    gc.collect()
    mine.save(model, optimizer, step=110)
    assert names_in(tmp_path) == ["step_00000090", "step_00000100", "step_00000110"]


def test_a_folder_that_went_away_in_the_middle_of_a_run_is_said(tmp_path: Path) -> None:
    checkpoints, model, optimizer = saved(tmp_path / "run", 1, 2)
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(
        UserWarning, match=r"run had checkpoints of steps 1, 2, and it is gone: .*mounted. Step 3 is saved"
    ):
        checkpoints.save(model, optimizer, step=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.save(model, optimizer, step=4)
    assert names_in(tmp_path / "run") == ["step_00000003", "step_00000004"]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.filterwarnings("ignore:saving .* in the background failed")
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_failed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    checkpoints, model, optimizer = saved(tmp_path, 1, background=background)
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        patch.setattr(files, "_write", full, raising=False)
        said = raised(lambda: (checkpoints.save(model, optimizer, step=2), checkpoints.wait()))
    assert said.startswith("OSError: [Errno 28] No space left on device")
    assert names_in(tmp_path) == ["step_00000001"]


def test_what_fails_after_a_checkpoint_has_its_name_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, model, optimizer = saved(tmp_path, 1, keep=1)

    def write(folder: Path, texts: Any) -> None:
        if folder == tmp_path:
            (folder / next(iter(texts))).touch()
            full()
        write_files(folder, texts)

    monkeypatch.setattr(saving, "write_files", write)
    monkeypatch.setattr(folders, "write_files", write)
    with pytest.warns(UserWarning, match="step_00000002 is saved; what else was to be done in its folder failed"):
        checkpoints.save(model, optimizer, step=2)
    assert names_in(tmp_path) == ["step_00000002"]
    assert layerwise.Checkpoints(tmp_path).load(model, optimizer, step=2) is not None


def save_without_room(rank: int, world: int, folder: str, free: int) -> str:
    model = layerwise.DataParallel(nn.Linear(64, 64))
    room = os.statvfs_result((4096, 1, 10**6, free, free, 0, 0, 0, 0, 255))
    with mock.patch.object(os, "statvfs", return_value=room):
        return raised(lambda: layerwise.save(Path(folder) / "one", model))


@pytest.mark.parametrize("world", [1, 2])
def test_room_is_looked_for_before_anything_is_written(tmp_path: Path, world: int) -> None:
    for rank, text in enumerate(run_ranks(world, save_without_room, str(tmp_path), 100)):
        assert text.startswith(
            "CheckpointError" if rank == 0 else "PlanMismatchError: rank 0 failed where others did not"
        )
        assert "has room for 100 B, and the checkpoint needs 16.2 KiB: expected room for one more than are kept" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("free", [0, 10**6])
def test_a_file_system_that_does_not_tell_how_much_room_it_has_is_written_to(tmp_path: Path, free: int) -> None:
    assert run_ranks(1, save_without_room, str(tmp_path), free) == ["nothing was raised"]
    assert names_in(tmp_path) == ["one"]

"""A folder of checkpoints: what was left behind by those who were killed goes with the next save, and what is of a run that was given
up is not taken for the last of this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from tests.ranks import run_ranks


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

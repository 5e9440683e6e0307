"""What is saved and loaded is the model that was named, all of it, or nothing."""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.comm import waiting
from layerwise.errors import CheckpointError
from layerwise.integrations.dcp import LoadPlanner, SavePlanner, TrainState
from tests.ranks import run_ranks


class Net(nn.Module):
    """Has an attribute that wrappers of ours have, too."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.engine(x))  # type: ignore[no-any-return]


def stepped(model: nn.Module) -> layerwise.Optimizer:
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("wrap", [lambda module: module, layerwise.DataParallel], ids=["plain", "DataParallel"])
def test_another_model_than_the_optimizer_steps_is_refused(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    module = Net()
    average, other = copy.deepcopy(module), Net()
    model = wrap(module)
    optimizer = stepped(model)
    layerwise.save(tmp_path / "own", model, optimizer)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for wrong in (average, other, module.last):
        with pytest.raises(ValueError, match="do not belong together"):
            layerwise.save(tmp_path / "wrong", wrong, optimizer)
        with pytest.raises(ValueError, match="do not belong together"):
            layerwise.load(tmp_path / "own", wrong, optimizer)
    assert not (tmp_path / "wrong").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(ValueError, match=r"'1.weight' of it would not be in the checkpoint"):
        layerwise.save(tmp_path / "wrong", nn.Sequential(module, nn.Linear(3, 3)), optimizer)
    with pytest.raises(ValueError, match="it lacks some of its params"):
        layerwise.save(tmp_path / "wrong", module.last, optimizer)
    with pytest.raises(TypeError, match="model is a list: expected the module"):
        layerwise.save(tmp_path / "wrong", [model], optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer is a torch.optim.adamw.AdamW: expected the layerwise.Optimizer"):
        layerwise.save(tmp_path / "wrong", model, torch.optim.AdamW(module.parameters()))  # type: ignore[arg-type]


def saved_within(rank: int, world: int, folder: str) -> bool:
    """What stands around a model makes it no other."""
    module = Net()
    ddp = DistributedDataParallel(module)
    optimizer = stepped(ddp)
    for number, model in enumerate((ddp, module, nn.ModuleDict({"net": ddp}), torch.compile(module))):
        layerwise.save(Path(folder, str(number)), model, optimizer)
        layerwise.load(Path(folder, str(number)), model, optimizer)
    return True


def test_a_model_within_what_stands_around_it_is_the_same(tmp_path: Path) -> None:
    assert run_ranks(2, saved_within, str(tmp_path)) == [True, True]


class Around(NamedTuple):
    """What frameworks have around an optimizer."""

    optimizer: layerwise.Optimizer


def test_an_optimizer_within_what_a_framework_has_around_it_is_the_same(tmp_path: Path) -> None:
    model = Net()
    optimizer = stepped(model)
    around: Any = Around(optimizer)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layerwise.save(tmp_path / "one", model, around)
    taken = TrainState(model, around)
    dcp.save({"train": taken}, checkpoint_id=tmp_path / "two", planner=SavePlanner())
    for load in (
        lambda: layerwise.load(tmp_path / "one", model, around),
        lambda: dcp.load({"train": taken}, checkpoint_id=tmp_path / "two", planner=LoadPlanner()),
    ):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.last.weight, own["last.weight"])
        optimizer.zero_grad()
        load()
        assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
        assert optimizer.engine.count.steps == 1


class Counting(nn.Linear):
    calls = 0

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_state_of_a_module_that_is_left_out_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(4, 4))
    optimizer = stepped(model)
    with pytest.warns(UserWarning, match=r"get_extra_state\(\) of '1' is not in the checkpoint"):
        layerwise.save(tmp_path / "one", model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = Net()
        layerwise.save(tmp_path / "two", plain, stepped(plain))


def test_what_is_beside_a_model_is_refused_by_its_place(tmp_path: Path) -> None:
    model = Net()
    optimizer = stepped(model)
    with pytest.raises(TypeError, match=r"extra.mask is a tensor of layout torch.sparse_coo"):
        layerwise.save(tmp_path / "one", model, optimizer, extra={"mask": torch.eye(3).to_sparse()})
    layerwise.save(tmp_path / "one", model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(CheckpointError, match="no extra 'scheduler': it has none at all"):
        layerwise.load(tmp_path / "one", model, optimizer, extra={"scheduler": scheduler})


def save_alone_first(rank: int, world: int, folder: str) -> list[str]:
    """One rank is in `save` long before the other."""
    waiting.PATIENCE_S = 0.2
    model = layerwise.DataParallel(Net())
    optimizer = stepped(model)
    dist.barrier()
    said: list[str] = []
    own, waiting.warn = waiting.warn, said.append  # type: ignore[assignment]
    if rank == 1:
        while not Path(folder, "said").exists():
            time.sleep(0.01)
        waiting.PATIENCE_S = 60.0
    else:
        waiting.warn = lambda text: (said.append(text), Path(folder, "said").touch())  # type: ignore[assignment, func-returns-value]
    layerwise.save(Path(folder, "one"), model, optimizer)
    waiting.warn = own
    return said


def test_a_rank_that_saves_alone_says_whom_it_waits_for(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_alone_first, str(tmp_path))
    assert "rank 0 has waited" in first[0]
    assert "as after 'if rank == 0:'" in first[0]
    assert f"({__file__}:" in first[0]
    assert second == []


def test_a_whole_state_of_a_plain_module_goes_anywhere() -> None:
    """That of a single process is one that ranks with parts of it take, as it is the other way round."""
    torch.manual_seed(0)
    plain = Net()
    wrapped = layerwise.DataParallel(copy.deepcopy(plain))
    optimizer, other = stepped(plain), stepped(wrapped)
    stepped_again = io.BytesIO()
    optimizer.consolidate_state_dict()
    torch.save(optimizer.state_dict(), stepped_again)
    stepped_again.seek(0)
    other.load_state_dict(torch.load(stepped_again))
    other.consolidate_state_dict()
    optimizer.load_state_dict(other.state_dict())
    ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert isinstance(ours, dict)
    assert isinstance(theirs, dict)
    for key, entry in ours.items():
        for name in set(entry) - {"step"}:
            assert torch.equal(entry[name].reshape(-1), theirs[key][name].reshape(-1))
    part = {name: value for name, value in other.state_dict()["layerwise"].items() if name != "whole"}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="in another wrapper, of another dtype or with another rule"):
        other.load_state_dict({**optimizer.state_dict(), "layerwise": part})


def test_arguments_of_another_type_are_named(tmp_path: Path) -> None:
    model = Net()
    optimizer = stepped(model)
    wrong: Any = [1]
    with pytest.raises(TypeError, match=r"extra must be a dict of what belongs to the checkpoint, by name, got \[1\]"):
        layerwise.save(tmp_path / "one", model, optimizer, extra=wrong)
    assert not list(tmp_path.iterdir())
    layerwise.save(tmp_path / "one", model, optimizer)
    with pytest.raises(TypeError, match=r"extra must be a dict of what belongs to the checkpoint, by name, got \[1\]"):
        layerwise.load(tmp_path / "one", model, optimizer, extra=wrong)
    with pytest.raises(TypeError, match=r"rename must be a dict from old names to new ones, got \[1\]"):
        layerwise.load(tmp_path / "one", model, optimizer, rename=wrong)
    with pytest.raises(TypeError, match=r"model is a list: expected a module"):
        layerwise.load(tmp_path / "one", wrong)
    with pytest.raises(TypeError, match=r"quantize\(\) takes a module, got \[1\]"):
        layerwise.quantize(wrong)
    with pytest.raises(ValueError, match=r"to must be the number of one of 1 ranks, from 0 on, got 5"):
        optimizer.consolidate_state_dict(to=5)


def test_all_public_names_are_listed() -> None:
    assert set(layerwise.__all__) <= set(dir(layerwise))

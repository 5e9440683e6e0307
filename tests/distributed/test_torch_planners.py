"""torch.distributed.checkpoint itself saves and loads flat shards, with our planners, and what it wrote loads as any other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import layerwise
from layerwise.integrations.dcp import LoadPlanner, SavePlanner, TrainState
from tests.ranks import run_ranks
from tests.worlds import Case, deliver, gradient, hash_tensors

RULES: dict[str, Any] = {"matrix": layerwise.NorMuon(lr=0.02), "other": layerwise.AdamW(lr=0.003)}


def steps(model: layerwise.DataParallel, optimizer: layerwise.Optimizer, numbers: range) -> None:
    for step in numbers:
        trained = {name: param for name, param in model.module.named_parameters() if param.requires_grad}
        deliver(model, {name: gradient(name, param.shape, 0, step, 0) for name, param in trained.items()}, sync=True)
        optimizer.step()
        optimizer.zero_grad()


def build(layout: str, dtype: torch.dtype) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    model = layerwise.DataParallel(Case(dtype=dtype).build(), layout=layout)
    return model, layerwise.Optimizer(model, **RULES)


def first(rank: int, world: int, layout: str, dtype: torch.dtype, path: str) -> str:
    model, optimizer = build(layout, dtype)
    steps(model, optimizer, range(3))
    state = TrainState(model, optimizer)
    dcp.save({"train": state, "note": {"epoch": 7}}, checkpoint_id=path, planner=SavePlanner())
    steps(model, optimizer, range(3, 6))
    return hash_tensors(model.module.parameters())


def second(rank: int, world: int, layout: str, dtype: torch.dtype, path: str) -> tuple[str, int]:
    model, optimizer = build(layout, dtype)
    with torch.no_grad():
        for param in model.module.parameters():
            param.add_(1.0)
    note = {"epoch": 0}
    state = TrainState(model, optimizer)
    loaded = {"train": state, "note": note}
    dcp.load(loaded, checkpoint_id=path, planner=LoadPlanner())
    assert optimizer.engine.count.steps == 3
    steps(model, optimizer, range(3, 6))
    return hash_tensors(model.module.parameters()), loaded["note"]["epoch"]


@pytest.mark.parametrize(
    ("world", "layout", "other", "to"),
    [
        (3, "flat", 2, "padded"),
        pytest.param(2, "compact", 3, "flat", marks=pytest.mark.slow),
        pytest.param(2, "padded", 4, "replicated", marks=pytest.mark.slow),
    ],
)
def test_torchs_own_save_and_load_go_on_to_the_bit(
    tmp_path: Path, world: int, layout: str, other: int, to: str
) -> None:
    straight = run_ranks(world, first, layout, torch.bfloat16, str(tmp_path / "ck"))
    for found, epoch in run_ranks(other, second, to, torch.bfloat16, str(tmp_path / "ck")):
        assert found == straight[0]
        assert epoch == 7


def scaled(rank: int, world: int, path: str) -> list[list[float]]:
    """The loss scale of a run with a step that overflowed, and that of another which has loaded it."""
    warnings.filterwarnings("ignore", "step 3 was skipped")
    runs = []
    for _ in range(2):
        model = layerwise.DataParallel(nn.Linear(4, 4, dtype=torch.float16))
        runs.append((model, layerwise.Optimizer(model, **RULES, loss_scale=layerwise.LossScale(hysteresis=1))))
    model, optimizer = runs[0]
    for step in range(6):
        loss = model(torch.ones(2, 4, dtype=torch.float16)).float().mean() * (torch.inf if step == 2 else 1.0)
        optimizer.scale_loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [TrainState(*run) for run in runs]
    dcp.save({"train": states[0]}, checkpoint_id=path, planner=SavePlanner())
    dcp.load({"train": states[1]}, checkpoint_id=path, planner=LoadPlanner())
    scalers = [optimizer.stepper.scaler for _, optimizer in runs]
    return [[*scaler.state_dict().values()] for scaler in scalers if scaler is not None]


def test_the_loss_scale_goes_with_it(tmp_path: Path) -> None:
    for found in run_ranks(2, scaled, str(tmp_path / "ck")):
        assert found == [[2.0**15, 3, 0]] * 2


# ------------------------------------------------------------------------------------------ weights into any module


def save_weights(rank: int, world: int, path: str) -> str:
    model, optimizer = build("flat", torch.float32)
    steps(model, optimizer, range(2))
    layerwise.save(path, model, optimizer)
    return hash_tensors(model.module.state_dict().values())


def into_a_cut_module(rank: int, world: int, path: str) -> str:
    module = Case().build()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    scalars = {param for param in module.parameters() if not param.ndim}  # which fully_shard() does not take
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)), ignored_params=scalars)
    before = torch.get_rng_state()
    layerwise.load(path, module)
    assert torch.equal(before, torch.get_rng_state())
    return hash_tensors(
        getattr(tensor, "full_tensor", lambda own=tensor: own)() for tensor in module.state_dict().values()
    )


def test_weights_go_into_a_plain_module_and_into_one_that_torch_has_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "ck")
    (saved, _) = run_ranks(2, save_weights, path)
    assert run_ranks(3, into_a_cut_module, path) == [saved] * 3
    module = Case().build()
    layerwise.load(path, module)
    assert hash_tensors(module.state_dict().values()) == saved


def test_a_module_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(1, save_weights, str(tmp_path / "ck"))
    other = nn.Linear(3, 4)
    before = hash_tensors(other.state_dict().values())
    with pytest.raises(RuntimeError, match="'weight' is missing in the checkpoint") as error:
        layerwise.load(tmp_path / "ck", other)
    assert "is in the checkpoint, and the model has no such param" in str(error.value)
    assert hash_tensors(other.state_dict().values()) == before

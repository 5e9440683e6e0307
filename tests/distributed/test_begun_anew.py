"""State that begins anew counts its steps from there: params that a checkpoint did not have, and those that were reset, are updated as
torch's AdamW updates params whose state is new, however they lie and however they are saved again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import layerwise
from layerwise.integrations.dcp import LoadPlanner, SavePlanner, TrainState
from tests.marks import sampled
from tests.ranks import run_ranks

OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
NEW = ("1.weight", "2.bias")
"""State of these begins anew, in the middle of a bucket."""
STEPS = (30, 3, 4)
"""Before the first checkpoint, after it, and after another one."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 7))


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step * 100 + len(name) + ord(name[0]))
    return torch.randn(shape, generator=generator)


def expected() -> dict[str, Tensor]:
    """What torch's own has: its state is gone in the middle, and with it the steps that it counts."""
    module = build()
    params = dict(module.named_parameters())
    optimizer = torch.optim.AdamW(params.values(), **OPTIONS)
    for step in range(sum(STEPS)):
        if step == STEPS[0]:
            for name in NEW:
                del optimizer.state[params[name]]
        for name, param in params.items():
            param.grad = gradient(name, param.shape, step)
        optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def made(way: str, world: int) -> tuple[nn.Module, dict[str, nn.Parameter], layerwise.Optimizer]:
    module = build()
    rules = [layerwise.RouteRule(pattern="*", to="other")]
    model: nn.Module = module
    more: dict[str, Any] = {}
    if way == "sharded":
        fully_shard(module)
        more["rules"] = rules
    else:
        model = layerwise.DataParallel(module, layout=way, rules=rules)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(**OPTIONS), **more)
    return model, dict(module.named_parameters()), optimizer


def feed(params: dict[str, nn.Parameter], optimizer: layerwise.Optimizer, steps: range) -> None:
    for step in steps:
        whole = {name: gradient(name, param.shape, step) for name, param in params.items()}
        for name, param in params.items():
            if isinstance(param, DTensor):
                param.grad = distribute_tensor(whole[name], param.device_mesh, param.placements)
        if not any(isinstance(param, DTensor) for param in params.values()):
            sum((param * whole[name]).sum() for name, param in params.items()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


def by_file(way: str, model: nn.Module, optimizer: layerwise.Optimizer, path: Path, *, save: bool) -> None:
    if save:
        layerwise.save(path, model, optimizer)
    else:
        layerwise.load(path, model, optimizer)


def by_torch(way: str, model: nn.Module, optimizer: layerwise.Optimizer, path: Path, *, save: bool) -> None:
    state = {"train": TrainState(model, optimizer)}
    if save:
        dcp.save(state, checkpoint_id=path, planner=SavePlanner())
    else:
        dcp.load(state, checkpoint_id=path, planner=LoadPlanner())


def by_state_dict(way: str, model: nn.Module, optimizer: layerwise.Optimizer, path: Path, *, save: bool) -> None:
    """On every rank its own part, beside the weights."""
    file = path.with_name(f"{path.name}.{torch.distributed.get_rank()}")
    if save:
        torch.save([model.state_dict(), optimizer.state_dict(part=True)], file)
    else:
        weights, state = torch.load(file, weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)


Through = Callable[..., None]


def go_on(rank: int, world: int, folder: str, way: str, through: Through) -> dict[str, Tensor]:
    first, second = STEPS[0], STEPS[0] + STEPS[1]
    model, params, optimizer = made(way, world)
    feed(params, optimizer, range(first))
    layerwise.save(Path(folder, "first"), model, optimizer)
    model, params, optimizer = made(way, world)
    layerwise.load(Path(folder, "first"), model, optimizer, reset=NEW)
    feed(params, optimizer, range(first, second))
    through(way, model, optimizer, Path(folder, "second"), save=True)
    model, params, optimizer = made(way, world)
    through(way, model, optimizer, Path(folder, "second"), save=False)
    feed(params, optimizer, range(second, sum(STEPS)))
    if isinstance(model, layerwise.DataParallel):
        model.ensure()
    return {
        name: param.full_tensor().detach() if isinstance(param, DTensor) else param.detach().clone()
        for name, param in params.items()
    }


@pytest.mark.parametrize("through", [by_file, by_torch, by_state_dict])
@pytest.mark.parametrize("way", sampled(["flat", "padded", "compact", "replicated", "sharded"], "flat"))
@pytest.mark.parametrize("world", sampled([1, 2, 3], 2))
def test_state_that_begins_anew_counts_from_there(tmp_path: Path, world: int, way: str, through: Through) -> None:
    wanted = expected()
    for found in run_ranks(world, go_on, str(tmp_path), way, through):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=2e-7)


def test_what_a_checkpoint_did_not_have_begins_with_it(tmp_path: Path) -> None:
    """A new head on a trained body: an update of its bias has the size of the learning rate, as any first one has."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(**OPTIONS))
    for _ in range(20):
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
    layerwise.save(tmp_path / "body", model, optimizer)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    other = layerwise.AdamW(**{**OPTIONS, "weight_decay": 0.0})
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=other)
    layerwise.load(tmp_path / "body", model, optimizer, missing=["1.*"])
    for _ in range(3):
        before = model[1].bias.detach().clone()
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        torch.testing.assert_close((before - model[1].bias.detach()), torch.full((3,), 0.01), rtol=1e-4, atol=0)
    assert float(optimizer.state[model[1].bias]["step"]) == 3
    assert float(optimizer.state[model[0].bias]["step"]) == optimizer.stats.step == 23

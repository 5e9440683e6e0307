"""A sharded model that is changed under its optimizer, or put together in ways that make no sense: followed where torch's optimizers
would follow, refused by name on every rank where they would go wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import layerwise
from tests.distributed.fsdp2 import (
    HIDDEN,
    WIDTH,
    Model,
    assert_close,
    batch,
    built,
    cut,
    expected,
    fill,
    loss_of,
    mine,
    optimizer_of,
    whole,
)
from tests.marks import sampled
from tests.ranks import raised, run_ranks


def one_step(model: nn.Module, optimizer: layerwise.Optimizer, rank: int, world: int, step: int = 0) -> None:
    loss_of(model, *mine(rank, world, step)).backward()
    optimizer.step()
    optimizer.zero_grad()


def moved(model: Model) -> None:
    model.to(torch.bfloat16)


def emptied(model: Model) -> None:
    model.to_empty(device="cpu")


def replaced(model: Model) -> None:
    old = model.blocks[0].up.weight
    model.blocks[0].up.weight = nn.Parameter(old.detach().clone())


def frozen(model: Model) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def added(model: Model) -> None:
    model.blocks[0].extra = nn.Parameter(torch.zeros(3))


CHANGES: dict[str, tuple[Callable[[Model], None], str]] = {
    "to": (moved, "was moved"),
    "to_empty": (emptied, "was moved"),
    "replaced": (replaced, "param 'blocks.0.up.weight' was replaced after construction"),
    "frozen": (frozen, "param 'blocks.0.up.weight' was frozen after construction"),
    "added": (added, "param 'blocks.0.extra' was added after construction"),
}


def changed(rank: int, world: int, name: str, on: str) -> str:
    """What a step says after a change, on all ranks or on the last."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    one_step(model, optimizer, rank, world)
    loss_of(model, *mine(rank, world, 1)).backward()
    if on == "all" or rank == world - 1:
        CHANGES[name][0](model)
    return raised(optimizer.step)


@pytest.mark.parametrize(
    ("name", "on"),
    sampled([(name, on) for name in CHANGES for on in ("all", "last")], ("to", "last"), ("replaced", "all"), ("added", "last")),
)
def test_a_change_that_cannot_be_followed_is_refused_on_every_rank(name: str, on: str) -> None:
    for text in run_ranks(2, changed, name, on):
        assert CHANGES[name][1] in text


def written(model: Model, values: dict[str, Tensor]) -> None:
    fill(model, values)


def loaded(model: Model, values: dict[str, Tensor]) -> None:
    own = model.state_dict()
    model.load_state_dict(
        {name: distribute_tensor(values[name], tensor.device_mesh, tensor.placements) for name, tensor in own.items()}
    )


def written_locally(model: Model, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            new = distribute_tensor(values[name], param.device_mesh, param.placements)
            param.to_local().copy_(new.to_local())


WRITERS = {"copy_": written, "load_state_dict": loaded, "to_local": written_locally}


def overwritten(rank: int, world: int, way: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A step whose learning rate is zero, after other weights were written: what the model has then, and what was written."""
    model = cut(built(dtype=dtype), world)
    optimizer = optimizer_of(model)
    one_step(model, optimizer, rank, world)
    values = {name: torch.arange(tensor.numel()).view(tensor.shape).to(dtype) for name, tensor in whole(model).items()}
    WRITERS[way](model, values)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    one_step(model, optimizer, rank, world, 1)
    return whole(model), values


@pytest.mark.parametrize(
    ("way", "dtype"),
    sampled(
        [(way, dtype) for way in WRITERS for dtype in (torch.float32, torch.bfloat16)],
        ("load_state_dict", torch.bfloat16),
        ("to_local", torch.bfloat16),
    ),
)
def test_values_that_the_user_writes_count(way: str, dtype: torch.dtype) -> None:
    for weights, values in run_ranks(2, overwritten, way, dtype):
        for name, tensor in values.items():
            assert torch.equal(weights[name], tensor), name


class Pair(nn.Module):
    """Two layers for tensor parallelism, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def pair(world: int) -> Pair:
    torch.manual_seed(2)
    model = Pair()
    mesh = init_device_mesh("cpu", (world,))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def backward_late(rank: int, world: int) -> str:
    model = pair(world)
    model.norm = nn.Identity()  # or a plain param would be the one that is found out
    optimizer = optimizer_of(model)
    first, second = (model(torch.ones(3, WIDTH)).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    return raised(second.backward)


def test_a_backward_through_weights_of_before_the_step_is_an_error() -> None:
    for text in run_ranks(2, backward_late):
        assert "modified by an inplace operation" in text

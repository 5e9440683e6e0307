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


def data_replaced(model: Model) -> None:
    old = model.blocks[0].up.weight
    old.data = old.data.clone()


def frozen(model: Model) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def added(model: Model) -> None:
    model.blocks[0].extra = nn.Parameter(torch.zeros(3))


CHANGES: dict[str, tuple[Callable[[Model], None], str]] = {
    "to": (moved, "was moved"),
    "to_empty": (emptied, "was moved"),
    "replaced": (replaced, "param 'blocks.0.up.weight' was replaced after construction"),
    "data": (data_replaced, "param 'blocks.0.up.weight' was moved"),
    "frozen": (frozen, "param 'blocks.0.up.weight' was frozen after construction"),
    "added": (added, "param 'blocks.0.extra' was added after construction"),
}


def changed(rank: int, world: int, name: str, on: str) -> list[str]:
    """What a step says after a change, on all ranks or on the last."""
    model = cut(built(), world)
    optimizer = optimizer_of(model)
    one_step(model, optimizer, rank, world)
    before = whole(model)
    loss_of(model, *mine(rank, world, 1)).backward()
    if on == "all" or rank == world - 1:
        CHANGES[name][0](model)
    return [raised(optimizer.step), repr(sorted(before))]


@pytest.mark.parametrize("on", ["all", "last"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_cannot_be_followed_is_refused_on_every_rank(name: str, on: str) -> None:
    for text, _ in run_ranks(2, changed, name, on):
        assert CHANGES[name][1] in text

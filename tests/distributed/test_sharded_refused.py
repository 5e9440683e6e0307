"""Models that torch has cut into DTensors are for the optimizer as they are: the wrapper refuses them in words, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerwise
from tests.ranks import raised, run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 10)


def whole(model: Model, world: int) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def blocks_and_root(model: Model, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def last_block_only(model: Model, world: int) -> None:
    fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (world,)))


def tensor_parallel(model: Model, world: int) -> None:
    plan = {"blocks.0.up": ColwiseParallel(), "blocks.0.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)


def one_frozen_param(model: Model, world: int) -> None:
    model.requires_grad_(True)
    for param in model.head.parameters():
        param.requires_grad_(False)
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"head": ColwiseParallel()})


CUTS: dict[str, tuple[Callable[[Model, int], None], str]] = {
    "fully_shard": (whole, "embedding.weight"),
    "fully_shard of blocks and root": (blocks_and_root, "embedding.weight"),
    "fully_shard of one block": (last_block_only, "blocks.1.up.weight"),
    "parallelize_module of one block": (tensor_parallel, "blocks.0.up.weight"),
    "parallelize_module of a frozen param": (one_frozen_param, "head.weight"),
}


def refusals(rank: int, world: int, name: str) -> str:
    """What the wrapper says of a cut model. Ranks go on after it: the optimizer takes the same model."""
    torch.manual_seed(1)
    model = Model()
    CUTS[name][0](model, world)
    said = raised(lambda: layerwise.DataParallel(model))
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    optimizer.step()
    assert optimizer.stats.missing
    return said


@pytest.mark.parametrize("name", CUTS)
def test_a_model_of_dtensors_is_refused_by_name(name: str) -> None:
    for text in run_ranks(2, refusals, name):
        assert text.startswith("TypeError: ")
        assert f"param '{CUTS[name][1]}' is a DTensor, cut by fully_shard() or parallelize_module()" in text
        assert "pass it to layerwise.Optimizer as it is" in text
        assert "mixed" not in text


def test_what_only_looks_sharded_is_none() -> None:
    """FSDP and DTensors are known by their types. Attributes of the same names, which others set too, say nothing."""

    class Looks(nn.Linear):
        def reshard(self) -> None:
            raise AssertionError("it was taken for a module of fully_shard()")

        unshard = reshard

    model = Looks(4, 6, bias=False)
    for name in ("device_mesh", "placements", "_local_tensor", "_is_sharded", "is_fsdp_param"):
        setattr(model.weight, name, "nobody's")
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    before = model.weight.detach().clone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.state[model.weight]["momentum"].shape == (6, 4)


def outside(rank: int, world: int) -> str:
    """A rank that is in no group that it names."""
    group = dist.new_group([0])
    model = nn.Linear(4, 4)
    rules: Any = {"matrix": layerwise.Muon(lr=0.1), "other": layerwise.AdamW(lr=0.1)}
    found = raised(lambda: layerwise.Optimizer(model, gradients="reduced", process_group=group, **rules))
    dist.barrier()
    return found


def test_a_rank_outside_of_the_process_group_is_told_so() -> None:
    first, second = run_ranks(2, outside)
    assert first == "nothing was raised"
    assert "TypeError: process_group must be a torch ProcessGroup that this rank is in" in second

"""Experts on meshes of their own beside a dense part on all ranks, in one optimizer: expert parallelism as users build it from
fully_shard, with other experts under the same names on every mesh.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import layerwise
from tests.distributed.fsdp2 import optimizer_of
from tests.marks import sampled
from tests.ranks import raised, run_ranks

EXPERTS, ROWS, COLUMNS = 4, 6, 5


class Experts(nn.Module):
    """A stack of weights, one of every expert; of its own ones where a rank has some only."""

    def __init__(self, number: int, *, named: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(number, ROWS, COLUMNS))
        self.named = named

    def param_domains(self) -> dict[str, str]:
        return {"weight": "expert"} if self.named else {}


class Model(nn.Module):
    def __init__(self, number: int, *, named: bool = True) -> None:
        super().__init__()
        self.dense = nn.Linear(5, 7)
        self.experts = Experts(number, named=named)


def values(name: str, shape: tuple[int, ...], step: int = 0) -> Tensor:
    """Small numbers, exact in fp32 and different everywhere."""
    numbers = torch.arange(torch.Size(shape).numel()) + 31 * len(name) + 7 * step
    return ((numbers * 37 % 64) / 16 - 2).view(shape)


def filled(model: Model, first: int, last: int) -> None:
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name == "experts.weight":
                param.copy_(values(name, (EXPERTS, ROWS, COLUMNS))[first:last])
            else:
                param.copy_(values(name, tuple(param.shape)))


def alone(rank: int, world: int) -> dict[str, Tensor]:
    model = Model(EXPERTS)
    filled(model, 0, EXPERTS)
    optimizer = optimizer_of(model)
    for step in range(3):
        for name, param in model.named_parameters():
            param.grad = values(name, tuple(param.shape), step + 1)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def experts_apart(world: int, dim: int, *, named: bool) -> tuple[Model, layerwise.Optimizer, int]:
    """Two groups of experts over pairs of ranks, cut along `dim`; the dense part over all four. And the first expert here."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ep", "fsdp"))
    mine = EXPERTS // 2
    first = mesh.get_local_rank("ep") * mine
    model = Model(mine, named=named)
    filled(model, first, first + mine)
    fully_shard(model.experts, mesh=mesh["fsdp"], shard_placement_fn=lambda param: Shard(dim))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, optimizer_of(model), first


def shared_out(rank: int, world: int, dim: int, named: bool) -> tuple[dict[str, Tensor], int, str]:
    model, optimizer, first = experts_apart(world, dim, named=named)
    mine, said = EXPERTS // 2, ""
    for step in range(3):
        for name, param in model.named_parameters():
            full = values(name, (EXPERTS, ROWS, COLUMNS) if "experts" in name else tuple(param.shape), step + 1)
            full = full[first : first + mine] if "experts" in name else full
            param.grad = distribute_tensor(full, param.device_mesh, param.placements)
        said = raised(optimizer.step)
        if said != "nothing was raised":
            break
    found = {
        name: param.detach().full_tensor() for name, param in model.named_parameters() if isinstance(param, DTensor)
    }
    return found, first, said


@pytest.mark.parametrize("dim", sampled([0, 1], 1))
def test_experts_on_meshes_of_their_own(dim: int) -> None:
    (wanted,) = run_ranks(1, alone)
    for weights, first, said in run_ranks(4, shared_out, dim, True):
        assert said == "nothing was raised"
        assert weights.keys() == wanted.keys()
        for name, tensor in weights.items():
            part = wanted[name][first : first + EXPERTS // 2] if "experts" in name else wanted[name]
            assert torch.equal(tensor, part), name


def test_experts_that_nobody_calls_so_are_taken_for_copies_that_differ() -> None:
    for _, _, said in run_ranks(4, shared_out, 0, False):
        assert said.startswith("StateError: param 'experts.weight' has other values on rank 2")

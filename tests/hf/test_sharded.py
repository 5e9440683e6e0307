"""Models of Hugging Face that fully_shard has cut step like whole ones, bit for bit: however their classes fuse, stack or turn
weights, shards do not line up with the matrices in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import layerwise
from tests.hf.models import MODELS, build
from tests.ranks import run_ranks

WORLD, STEPS = 3, 2


def gradient(number: int, step: int, shape: torch.Size) -> Tensor:
    """Exact in fp32, the same wherever it is made."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    return torch.randint(-8, 9, tuple(shape), generator=generator) / 8


def stepped(rank: int, world: int, names: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """Whole weights of models after some steps; cut where there are several ranks."""
    return {name: _stepped(name, world) for name in names}


def _stepped(name: str, world: int) -> dict[str, Tensor]:
    model = build(name, "cpu")
    if world > 1:
        scalars = {param for param in model.parameters() if param.ndim == 0}  # torch refuses to cut them
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=scalars)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.02))
    for step in range(STEPS):
        for number, param in enumerate(model.parameters()):
            grad = gradient(number, step, param.shape)
            is_cut = isinstance(param, DTensor)
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_cut else grad
        optimizer.step()
    return {fqn: _whole(param) for fqn, param in model.named_parameters()}


def _whole(param: nn.Parameter) -> Tensor:
    return param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()


@pytest.mark.slow
def test_cut_models_step_like_whole_ones() -> None:
    names = tuple(MODELS)
    (wanted,) = run_ranks(1, stepped, names)
    for found in run_ranks(WORLD, stepped, names):
        assert {name: weights.keys() for name, weights in found.items()} == {
            name: weights.keys() for name, weights in wanted.items()
        }
        assert [
            f"{name} {fqn}"
            for name, weights in wanted.items()
            for fqn, tensor in weights.items()
            if not torch.equal(found[name][fqn], tensor)
        ] == []

"""Models that fully_shard has cut, on a GPU: several gloo ranks share one card. Needs CUDA; CI has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import layerwise
from tests.distributed.fsdp2 import batch, built, loss_of, optimizer_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")

CUDA = torch.device("cuda", 0)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(rank: int, world: int, offload: bool) -> tuple[dict[str, Tensor], set[str], list[float]]:
    """This rank's weights after some steps, where params lay between them, and losses."""
    torch.cuda.set_device(0)
    model = built().to(CUDA)
    mesh = init_device_mesh("cuda", (world,))
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    optimizer = optimizer_of(model, clip_grad_norm=1.0)
    losses = []
    for step in range(4):
        tokens, targets = (part.chunk(world)[rank].to(CUDA) for part in batch(step))
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    devices = {param.device.type for param in model.parameters()}
    return {name: _part(param) for name, param in model.named_parameters()}, devices, losses


def _part(param: nn.Parameter) -> Tensor:
    """What this rank has of it. (full_tensor() of a DTensor on a card crashes in torch 2.11 with gloo.)"""
    assert isinstance(param, DTensor)
    return param.detach().to_local().cpu()


def test_offloaded_params_step_on_the_cpu_like_those_on_the_card() -> None:
    plain, offloaded = run_ranks(2, trained, False), run_ranks(2, trained, True)
    for (wanted, on_card, losses), (found, on_cpu, same_losses) in zip(plain, offloaded, strict=True):
        assert (on_card, on_cpu) == ({"cuda"}, {"cpu"})
        assert losses == pytest.approx(same_losses, rel=1e-3)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-3, rtol=0)


def alone_on_nccl(rank: int, world: int, offload: bool) -> bool:
    """One rank with NCCL, as everybody begins: params that offload keeps on the CPU need no group to step."""
    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    return bool(trained(0, 1, offload)[2])


@pytest.mark.parametrize("offload", [False, True])
def test_one_rank_of_nccl(offload: bool) -> None:
    assert run_ranks(1, alone_on_nccl, offload, meet=False) == [True]


def in_bf16(rank: int, world: int, compiled: bool) -> list[float]:
    torch.cuda.set_device(0)
    model = built().to(CUDA)
    mesh = init_device_mesh("cuda", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
        if compiled:
            block.compile()
    fully_shard(model, mesh=mesh, mp_policy=POLICY)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.02))
    losses = []
    tokens, targets = (part.chunk(world)[rank].to(CUDA) for part in batch(0))
    for _ in range(10):
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("compiled", [False, True])
def test_mixed_precision_on_the_card(compiled: bool) -> None:
    for losses in run_ranks(2, in_bf16, compiled):
        assert losses[-1] < losses[0] - 0.3

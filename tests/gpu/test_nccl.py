"""Several ranks of NCCL on one card: a host id for each rank makes NCCL take ranks for machines, which talk over loopback sockets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.test_cuda import shards_after_training
from tests.gpu.test_fsdp2 import trained
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")

ONE_CARD = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",
}


def meet(rank: int, world: int, file: str) -> None:
    """Join `world` ranks of NCCL, all of them on the first card."""
    os.environ.update(ONE_CARD, NCCL_HOSTID=f"rank{rank}")  # read when the first group is made
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=world)


def layout_on_nccl(rank: int, world: int, file: str, options: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    meet(rank, world, file)
    return shards_after_training(rank, world, options, torch.float32)


def fsdp2_on_nccl(rank: int, world: int, file: str) -> Any:
    meet(rank, world, file)
    return trained(rank, world, False)


@pytest.mark.parametrize("layout", ["flat", "padded", "compact"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_masters_momenta_and_weights_are_those_of_gloo_bitwise(world: int, layout: str, tmp_path: Path) -> None:
    # Gradients are small integers over a power of two: their sums are exact in any order.
    options = {"layout": layout}
    nccl = run_ranks(world, layout_on_nccl, str(tmp_path / "meet"), options, meet=False)
    gloo = run_ranks(world, shards_after_training, options, torch.float32)
    for ours, theirs in zip(nccl, gloo, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensors in theirs.items():
            assert ours[name].keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert torch.equal(ours[name][key].nan_to_num(nan=-7.0), tensor.nan_to_num(nan=-7.0)), (
                    f"{name} of {key}"
                )


def test_a_model_that_fully_shard_has_cut_learns_on_two_ranks_of_nccl_as_on_gloo(tmp_path: Path) -> None:
    nccl = run_ranks(2, fsdp2_on_nccl, str(tmp_path / "meet"), meet=False)
    gloo = run_ranks(2, trained, False)
    for (ours, _, losses), (theirs, _, wanted) in zip(nccl, gloo, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-3)
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, atol=1e-3, rtol=0)

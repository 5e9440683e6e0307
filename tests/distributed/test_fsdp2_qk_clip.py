"""QK-clip of attention whose query and key weights are cut over ranks, with heads that do not line up with shards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import layerwise
from tests.distributed.fsdp2 import assert_close, optimizer_of, whole
from tests.marks import sampled
from tests.ranks import raised, run_ranks

HEADS, HEAD_DIM, WIDTH = 3, 4, 10
LOGITS = 5e-4
"""A logit is a product of two weights, whose rounding it doubles in every step; without clipping weights differ by hundreds of
this."""


class Attention(nn.Module):
    def __init__(self, heads_here: range | None = None) -> None:
        """`heads_here`: which heads this rank computes, where it says so itself."""
        super().__init__()
        self.heads_here = heads_here
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD_DIM, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.heads_here is not None:
            largest = torch.full((HEADS,), -math.inf)
            largest[self.heads_here] = (q @ k.mT / math.sqrt(HEAD_DIM)).detach().amax((0, 2, 3))
            layerwise.record_logits(self, largest)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.grouped(
            query="q", key="k", n_heads=HEADS, head_dim=HEAD_DIM, records=self.heads_here is not None
        )


def run(rank: int, world: int, cut: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[int], str]:
    torch.manual_seed(5)
    model = Attention(range(rank, rank + 1) if cut == "tp, recorded" else None)
    with torch.no_grad():
        model.q.weight.mul_(4)
    model.to(dtype)
    if cut == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if cut.startswith("tp"):
        plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    optimizer = optimizer_of(model, qk_clip=layerwise.QKClip(threshold=0.5))
    x = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(6)).to(dtype)
    mine = x.chunk(world)[rank] if cut == "fsdp" else x
    clipped, said = [], ""
    for _ in range(3):
        said = raised(lambda: model(mine).float().square().mean().backward())
        said = said if said != "nothing was raised" else raised(optimizer.step)
        if said != "nothing was raised":
            break
        clipped.append(optimizer.stats.clipped_heads)
    return whole(model), clipped, said


@pytest.mark.parametrize("world", sampled([2, 3], 2))
def test_heads_that_lie_across_shards_are_scaled_whole(world: int) -> None:
    (wanted,) = run_ranks(1, run, "", torch.float32)
    assert min(wanted[1]) > 0  # or there is nothing to see
    for weights, clipped, said in run_ranks(world, run, "fsdp", torch.float32):
        assert said == "nothing was raised"
        assert clipped == wanted[1]
        assert_close(weights, wanted[0], atol=LOGITS)


def test_bf16_weights_are_those_of_clipped_masters() -> None:
    (wanted,) = run_ranks(1, run, "", torch.bfloat16)
    for weights, clipped, _ in run_ranks(2, run, "fsdp", torch.bfloat16):
        assert clipped == wanted[1]
        assert_close(weights, {name: tensor.float() for name, tensor in wanted[0].items()}, atol=0.05)


def test_tensor_parallel_attention_is_refused_with_what_to_do() -> None:
    for _, _, said in run_ranks(3, run, "tp", torch.float32):
        assert "expected one for each of the 3 heads" in said
        assert "call layerwise.record_logits() with -inf for the others" in said


def test_tensor_parallel_attention_that_says_which_heads_it_has() -> None:
    (wanted,) = run_ranks(1, run, "", torch.float32)
    for weights, clipped, said in run_ranks(3, run, "tp, recorded", torch.float32):
        assert said == "nothing was raised"
        assert clipped == wanted[1]
        assert_close(weights, wanted[0], atol=LOGITS)

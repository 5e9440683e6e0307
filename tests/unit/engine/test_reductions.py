from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.engine.reductions import reduction_of
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.storage import Reducer
from layerwise.memory.replicas import Replica
from layerwise.memory.storage import Storage
from layerwise.models.table import named_trainables, param_table, plain_dtype
from tests.ranks import run_ranks
from tests.worlds import shapes_module

SHAPES = [(8, 8), (4, 8), (3, 5)]


def replica_of(
    layout: str, reducer: Reducer, world: int, rank: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Replica:
    """The replica of the one bucket of matrices."""
    module = shapes_module(SHAPES)
    plan = make_plan(
        param_table(module),
        Options(layout=layout, reducer=reducer, grad_dtype=plain_dtype(dtype, "grad_dtype"), **options),
        world=world,
    )
    storage = Storage(plan, named_trainables(module), {"dense": rank})
    return storage.replicas[plan.bucket_of["layer0.weight"]]


def gradient_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers whose sum over ranks depends on the order: large ones that cancel, with small ones between them."""
    generator = torch.Generator().manual_seed(rank)
    large = torch.full((numel,), [2.0**30, 1.0, -(2.0**30), 3.0][rank])
    return (large + torch.randn(numel, generator=generator)).to(dtype)


def reduce_once(rank: int, world: int, layout: str, reducer: Reducer, dtype: torch.dtype) -> tuple[Tensor, int, int]:
    """This rank's shard of the sum, where it starts in the bucket, and the bytes that were sent."""
    replica = replica_of(layout, reducer, world, rank, dtype)
    communicator = Communicator(dist.group.WORLD)
    reduction = reduction_of(replica, plain_dtype(dtype, "grad_dtype"), communicator)
    assert reduction.dtype == dtype
    assert replica.grad is not None
    replica.grad.copy_(gradient_of(rank, replica.plan.numel, dtype))
    reduction.start(replica.grad, replica.grad_shard).wait()
    return replica.grad_shard.clone(), replica.plan.shards.start(rank), sum(communicator.sent_nbytes.values())


@pytest.mark.parametrize("layout", ["flat", "padded", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ordered_sum_is_taken_in_fp32_in_the_order_of_ranks(layout: str, dtype: torch.dtype) -> None:
    world = 4
    plan = replica_of(layout, "ordered", world, 0, dtype).plan
    expected = torch.zeros(plan.numel)
    for rank in range(world):
        expected = expected + gradient_of(rank, plan.numel, dtype).float()
    other_order = sum(gradient_of(rank, plan.numel, dtype).float() for rank in (0, 2, 1, 3))
    assert not torch.equal(expected, other_order)  # so that the order can be told
    for rank, (shard, start, sent) in enumerate(run_ranks(world, reduce_once, layout, "ordered", dtype)):
        assert shard.dtype == torch.float32
        assert torch.equal(shard, expected[start : start + shard.numel()])
        assert sent == (plan.numel - plan.shard_numel(rank)) * dtype.itemsize


def test_a_bf16_wire_does_not_mean_a_bf16_sum() -> None:
    """256 + 1 is 256 in bf16: a collective loses what an ordered sum keeps."""
    assert {value for shard in run_ranks(4, reduce_small, "ordered") for value in shard} == {259.0}
    assert 259.0 not in {value for shard in run_ranks(4, reduce_small, "collective") for value in shard}


def reduce_small(rank: int, world: int, reducer: Reducer) -> list[float]:
    replica = replica_of("flat", reducer, world, rank, torch.bfloat16)
    assert replica.grad is not None
    replica.grad.fill_(256.0 if rank == 0 else 1.0)
    reduction = reduction_of(replica, plain_dtype(torch.bfloat16, "x"), Communicator(dist.group.WORLD))
    return reduction.start(replica.grad, replica.grad_shard).wait().tolist()


@pytest.mark.parametrize("layout", ["compact", "replicated"])
def test_an_all_reduce_leaves_every_rank_its_shard_of_the_sum(layout: str) -> None:
    world = 2
    plan = replica_of(layout, "collective", world, 0).plan
    expected = gradient_of(0, plan.numel, torch.float32) + gradient_of(1, plan.numel, torch.float32)
    for shard, start, _ in run_ranks(world, reduce_once, layout, "collective", torch.float32):
        assert torch.equal(shard, expected[start : start + shard.numel()])


def reduce_apart(rank: int, world: int, layout: str, reducer: Reducer) -> tuple[list[float], bool]:
    """Into memory apart from the gradient's; whether the gradient's own shard was left alone where it may not change."""
    replica = replica_of(layout, reducer, world, rank)
    assert replica.grad is not None
    replica.grad.fill_(float(rank + 1))
    out = torch.full_like(replica.grad_shard, -1.0)
    reduction = reduction_of(replica, plain_dtype(torch.float32, "x"), Communicator(dist.group.WORLD))
    found = reduction.start(replica.grad, out).wait()
    return found.unique().tolist(), found.data_ptr() == out.data_ptr()


@pytest.mark.parametrize(
    ("layout", "reducer"),
    [("flat", "collective"), ("padded", "ordered"), ("compact", "collective"), ("replicated", "collective")],
)
def test_a_sum_lands_where_it_was_asked_for(layout: str, reducer: Reducer) -> None:
    assert run_ranks(2, reduce_apart, layout, reducer) == [([3.0], True)] * 2


def test_one_rank_reduces_by_every_kind_and_sends_nothing() -> None:
    for layout, reducer in (("flat", "collective"), ("compact", "collective"), ("flat", "ordered")):
        replica = replica_of(layout, reducer, 1, 0)  # type: ignore[arg-type]
        communicator = Communicator(None)
        assert replica.grad is not None
        replica.grad.fill_(2.5)
        reduction = reduction_of(replica, plain_dtype(torch.float32, "x"), communicator)
        assert reduction.start(replica.grad, replica.grad_shard).wait().unique().tolist() == [2.5]
        assert set(communicator.sent_nbytes.values()) == {0}

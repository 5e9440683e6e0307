"""The engine on a GPU: several gloo ranks share one card, since NCCL refuses that. Needs CUDA; CI has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import layerwise
from tests import seams
from tests.ranks import run_ranks
from tests.reference.oracle import Hyper, Oracle
from tests.worlds import Case, deliver, gradient, matrices_of, rules

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")

STEPS = 6


def shards_after_training(
    rank: int, world: int, options: dict[str, Any], dtype: torch.dtype, ns_dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """Train the zoo on the card; returns this rank's spans of momenta and masters, and its replicas."""
    torch.cuda.set_device(0)
    module = Case(dtype=dtype).build().cuda()
    model = seams.data_parallel(module, bucket_mib=0.001, check_collectives=True, **options)
    optimizer = layerwise.Optimizer(model, **rules(Hyper(ns_dtype=ns_dtype, clip=1.0)))
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    for step in range(STEPS):
        grads = {fqn: gradient(fqn, shape, rank, step, 0).to(dtype).cuda() for fqn, shape in shapes.items()}
        deliver(model, grads, sync=True)
        optimizer.step()
    found: dict[str, dict[str, Tensor]] = {"replica": {}, "master": {}, "momentum": {}, "exp_avg": {}}
    found["replica"] = {fqn: param.detach().cpu() for fqn, param in model.engine.storage.params.items()}
    for shard in model.engine.storage.shards:
        for span in shard.spans:
            key = f"{span.fqn} {span.start} {span.stop}"
            found["master"][key] = shard.master[span.part].cpu()
            for name, tensor in shard.state.items():
                found.setdefault(name, {})[key] = tensor[span.part].cpu()
    return found


def whole(results: list[dict[str, dict[str, Tensor]]], name: str, oracle: Oracle) -> dict[str, Tensor]:
    """Full flat tensors put together from all ranks' spans."""
    full = {fqn: torch.full((master.numel(),), torch.nan) for fqn, master in oracle.masters.items()}
    for result in results:
        for key, tensor in result.get(name, {}).items():
            fqn, start, stop = key.rsplit(" ", 2)
            full[fqn][int(start) : int(stop)] = tensor
    return full


def reference(world: int, dtype: torch.dtype) -> Oracle:
    module = Case(dtype=dtype).build()
    params = {fqn: p.detach().clone() for fqn, p in module.named_parameters() if p.requires_grad}
    oracle = Oracle(params, matrices_of(module), Hyper(ns_dtype=torch.float32, clip=1.0))
    for step in range(STEPS):
        oracle.step(
            [
                {fqn: gradient(fqn, p.shape, rank, step, 0).to(dtype) for fqn, p in params.items()}
                for rank in range(world)
            ]
        )
    return oracle


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_flat_and_replicated_agree_on_the_card_and_with_the_cpu_oracle(world: int, dtype: torch.dtype) -> None:
    oracle = reference(world, dtype)
    flat = run_ranks(world, shards_after_training, {"layout": "flat"}, dtype)
    replicated = run_ranks(world, shards_after_training, {"layout": "replicated"}, dtype)
    for name in ("momentum", "exp_avg", "exp_avg_sq"):
        ours, theirs = whole(flat, name, oracle), whole(replicated, name, oracle)
        for fqn in oracle.masters:
            # Element-wise kernels do the same for every element wherever it lies: bitwise.
            assert torch.equal(ours[fqn].nan_to_num(nan=-7.0), theirs[fqn].nan_to_num(nan=-7.0)), f"{name} of {fqn}"
    masters = whole(flat, "master", oracle)
    for fqn, expected in oracle.masters.items():
        # The CPU and the card multiply in another order; six fp32 steps stay this close.
        torch.testing.assert_close(masters[fqn], expected.reshape(-1), rtol=1e-4, atol=1e-4)
    for result in flat[1:]:
        assert all(torch.equal(result["replica"][fqn], flat[0]["replica"][fqn]) for fqn in oracle.masters)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="torch's products see the batch"
)
@pytest.mark.parametrize("world", [2, 3])
def test_with_our_own_products_homes_that_batch_differently_give_the_same_masters_bitwise(world: int) -> None:
    oracle = reference(world, torch.float32)
    shards = [
        run_ranks(world, shards_after_training, {"layout": layout}, torch.float32, torch.bfloat16)
        for layout in ("flat", "replicated", "compact")
    ]
    flat, *others = (whole(some, "master", oracle) for some in shards)
    for other in others:
        for fqn in oracle.masters:
            assert torch.equal(flat[fqn], other[fqn]), fqn


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "padded"},
        {"layout": "compact"},
        {"layout": "compact", "reducer": "ordered"},
        {"layout": "flat", "shard_grads": True},
        {"layout": "padded", "shard_grads": True, "reducer": "ordered"},
        {"layout": {"matrix": "compact", "other": "replicated"}},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
@pytest.mark.parametrize("world", [2, 3])
def test_every_layout_and_reducer_has_the_momenta_and_weights_of_flat_on_the_card(
    world: int, options: dict[str, Any]
) -> None:
    oracle = reference(world, torch.bfloat16)
    flat = run_ranks(world, shards_after_training, {"layout": "flat"}, torch.bfloat16)
    other = run_ranks(world, shards_after_training, options, torch.bfloat16)
    for name in ("momentum", "exp_avg", "exp_avg_sq"):
        ours, theirs = whole(flat, name, oracle), whole(other, name, oracle)
        for fqn in oracle.masters:
            assert torch.equal(ours[fqn].nan_to_num(nan=-7.0), theirs[fqn].nan_to_num(nan=-7.0)), f"{name} of {fqn}"
    ours, theirs = whole(flat, "master", oracle), whole(other, "master", oracle)
    for fqn in oracle.masters:
        # Homes batch other matrices together, and a batch's size may select another kernel.
        torch.testing.assert_close(theirs[fqn], ours[fqn], rtol=1e-5, atol=1e-5)
    for result in other[1:]:
        assert all(torch.equal(result["replica"][fqn], other[0]["replica"][fqn]) for fqn in oracle.masters)

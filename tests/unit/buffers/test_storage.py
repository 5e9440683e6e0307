from __future__ import annotations

import pytest
import torch
from torch import nn

from layerwise.buffers.bind import named_trainables, param_table
from layerwise.buffers.storage import Storage
from layerwise.errors import StateError
from layerwise.layout.plan import make_plan
from tests.worlds import Zoo


def storage_of(module: nn.Module, *, world: int = 1, rank: int = 0, layout: str = "flat") -> Storage:
    plan = make_plan(param_table(module), world=world, layout=layout, bucket_numel=300)
    return Storage(plan, named_trainables(module), {"dense": rank})


def zoo(dtype: torch.dtype = torch.float32) -> Zoo:
    torch.manual_seed(0)
    module = Zoo()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape))
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_keep_their_values_and_lie_in_the_replicas(dtype: torch.dtype) -> None:
    module, untouched = zoo(dtype), zoo(dtype)
    storage = storage_of(module)
    memory = {bucket.replica.untyped_storage().data_ptr() for bucket in storage.buckets}
    for (fqn, param), (_, before) in zip(module.named_parameters(), untouched.named_parameters(), strict=True):
        assert torch.equal(param, before), fqn
        assert (param.untyped_storage().data_ptr() in memory) == param.requires_grad, fqn


@pytest.mark.parametrize("world", [1, 3, 8])
def test_masters_of_all_ranks_together_are_the_params_in_fp32(world: int) -> None:
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rank in range(world):
        for bucket in storage_of(zoo(torch.bfloat16), world=world, rank=rank).buckets:
            for span in bucket.spans:
                part = bucket.master[span.shard_offset : span.shard_offset + span.numel]
                pieces.setdefault(span.fqn, []).append((span.start, part))
    for fqn, param in named_trainables(zoo(torch.bfloat16)).items():
        whole = torch.cat([part for _, part in sorted(pieces[fqn], key=lambda piece: piece[0])])
        assert torch.equal(whole, param.detach().float().reshape(-1)), fqn


def test_fp32_masters_are_the_replica_itself_and_low_precision_ones_are_not() -> None:
    for dtype, shared in ((torch.float32, True), (torch.bfloat16, False)):
        for bucket in storage_of(zoo(dtype), world=2).buckets:
            assert (bucket.master.data_ptr() == bucket.replica_shard.data_ptr()) == shared


def test_padding_is_zero() -> None:
    for bucket in storage_of(zoo(), world=3).buckets:
        used = torch.zeros(bucket.plan.numel, dtype=torch.bool)
        for placement in bucket.plan.placements:
            used[placement.offset : placement.offset + placement.numel] = True
        assert not bucket.replica[~used].any()
        assert not bucket.grad.any()


def test_replicated_shards_are_whole() -> None:
    for bucket in storage_of(zoo(), world=3, rank=2, layout="replicated").buckets:
        assert bucket.master.numel() == bucket.plan.numel
        assert sum(span.numel for span in bucket.spans) == sum(place.numel for place in bucket.plan.placements)


def test_bytes_count_aliases_once() -> None:
    module = nn.Linear(16, 16, bias=False)
    elements = 16 * 16
    assert storage_of(module).nbytes() == 2 * 4 * elements  # replica = master, grad = shard = work
    assert storage_of(nn.Linear(16, 16, bias=False).bfloat16()).nbytes() == (2 + 4 + 4) * elements


def test_a_param_that_left_its_buffer_is_named() -> None:
    module = zoo()
    storage = storage_of(module)
    storage.check_aliases()
    module.tall.weight.data = module.tall.weight.data.clone()
    with pytest.raises(StateError, match=r"param 'tall.weight' was moved out of its buffer"):
        storage.check_aliases()


def test_weights_changed_in_place_reach_the_masters_and_others_keep_their_fp32_bits() -> None:
    module = zoo(torch.bfloat16)
    storage = storage_of(module)
    for bucket in storage.buckets:
        bucket.master.mul_(1.0 + 2.0**-12)  # below bf16's resolution
    before = [bucket.master.clone() for bucket in storage.buckets]
    with torch.no_grad():
        module.tall.weight[0, 0] = 3.0
        module.norm.weight.copy_(module.norm.weight.clone())  # written, but with what was there
    storage.pull_changed_params()
    changed = sum(int((bucket.master != old).sum()) for bucket, old in zip(storage.buckets, before, strict=True))
    assert changed == 1

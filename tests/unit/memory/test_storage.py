from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerwise.config.layouts import LAYOUTS
from layerwise.dtypes import DType
from layerwise.errors import StateError
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.storage import GRAD_SLOTS
from layerwise.memory.replicas import GradRing
from layerwise.memory.storage import Storage
from layerwise.models.table import named_trainables, param_table, plain_dtype
from tests.worlds import Zoo

SHARDED = ("flat", "padded", "compact")


def storage_of(module: nn.Module, *, world: int = 1, rank: int = 0, layout: str = "flat", **options: Any) -> Storage:
    plan = make_plan(param_table(module), Options(layout=layout, bucket_numel=300, **options), world=world)
    return Storage(plan, named_trainables(module), {"dense": rank})


def zoo(dtype: torch.dtype = torch.float32) -> Zoo:
    torch.manual_seed(0)
    module = Zoo()
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape))
    return module.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_params_keep_their_values_and_lie_in_the_replicas(dtype: torch.dtype, layout: str) -> None:
    module, untouched = zoo(dtype), zoo(dtype)
    storage = storage_of(module, world=3, rank=1, layout=layout)
    replicas = [
        (replica.weights.data_ptr(), replica.weights.data_ptr() + replica.weights.nbytes)
        for replica in storage.replicas
    ]
    for (fqn, param), (_, before) in zip(module.named_parameters(), untouched.named_parameters(), strict=True):
        assert torch.equal(param, before), fqn
        inside = any(start <= param.data_ptr() and param.data_ptr() + param.nbytes <= stop for start, stop in replicas)
        assert inside == param.requires_grad, fqn
        assert param.untyped_storage().nbytes() == param.nbytes, fqn  # what saves it writes no more than it is


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.parametrize("world", [1, 3, 8])
def test_masters_of_all_ranks_together_are_the_params_in_fp32(world: int, layout: str) -> None:
    pieces: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rank in range(world):
        for shard in storage_of(zoo(torch.bfloat16), world=world, rank=rank, layout=layout).shards:
            for span in shard.spans:
                part = shard.master[span.shard_offset : span.shard_offset + span.numel]
                pieces.setdefault(span.fqn, []).append((span.start, part))
    for fqn, param in named_trainables(zoo(torch.bfloat16)).items():
        whole = torch.cat([part for _, part in sorted(pieces[fqn], key=lambda piece: piece[0])])
        assert torch.equal(whole, param.detach().float().reshape(-1)), fqn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_masters_are_the_replica_itself_and_low_precision_ones_are_not(layout: str) -> None:
    for dtype, shared in ((torch.float32, True), (torch.bfloat16, False)):
        for replica in storage_of(zoo(dtype), world=2, layout=layout).replicas:
            shard, part = replica.shard, replica.plan.shard_part(0)
            assert shard.is_apart == (not shared)
            if shard.master.numel():
                assert shard.weight.data_ptr() == replica.weights[part].data_ptr()
                assert (shard.master.data_ptr() == shard.weight.data_ptr()) == shared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_is_zero(layout: str) -> None:
    for replica in storage_of(zoo(), world=3, layout=layout).replicas:
        used = torch.zeros(replica.plan.numel, dtype=torch.bool)
        for placement in replica.plan.placements:
            used[placement.offset : placement.offset + placement.numel] = True
        assert not replica.weights[~used].any()
        assert replica.grad is not None
        assert not replica.grad.any()


def test_replicated_shards_are_whole() -> None:
    for replica in storage_of(zoo(), world=3, rank=2, layout="replicated").replicas:
        shard = replica.shard
        assert shard.master.numel() == replica.plan.numel
        assert sum(span.numel for span in shard.spans) == sum(place.numel for place in replica.plan.placements)


def test_bytes_count_aliases_once() -> None:
    module = nn.Linear(16, 16, bias=False)
    elements = 16 * 16
    assert storage_of(module).nbytes() == 2 * 4 * elements  # weights = master, grad = its shard = update
    assert storage_of(nn.Linear(16, 16, bias=False).bfloat16()).nbytes() == (2 + 4 + 4) * elements


ITEMSIZE = {torch.float32: 4, torch.bfloat16: 2}


@pytest.mark.parametrize("layout", SHARDED)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_bytes_are_those_of_full_params_and_gradients_and_of_this_ranks_shards(
    layout: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    for rank in range(3):
        grad_name = plain_dtype(grad_dtype, "grad_dtype")
        storage = storage_of(zoo(dtype), world=3, rank=rank, layout=layout, grad_dtype=grad_name)
        full = sum(replica.plan.numel for replica in storage.replicas)
        mine = sum(shard.plan.shard_numel(rank) for shard in storage.shards)
        shard = (0 if dtype == torch.float32 else 4) + (0 if grad_dtype == torch.float32 else 4)
        assert storage.nbytes() == full * (ITEMSIZE[dtype] + ITEMSIZE[grad_dtype]) + mine * shard


def test_an_ordered_sum_of_narrow_gradients_has_an_fp32_shard_of_its_own() -> None:
    options = {"reducer": "ordered", "grad_dtype": DType.BF16}
    for replica in storage_of(zoo(), world=2, **options).replicas:
        assert replica.grad is not None
        assert (replica.grad.dtype, replica.grad_shard.dtype) == (torch.bfloat16, torch.float32)
        assert replica.shard.update.data_ptr() == replica.grad_shard.data_ptr()


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_released_gradients_hold_nothing_but_shards_until_one_is_leased(layout: str) -> None:
    storage = storage_of(zoo(), world=4, rank=1, layout=layout, shard_grads=True)
    full = sum(replica.plan.numel for replica in storage.replicas)
    mine = sum(shard.plan.shard_numel(1) for shard in storage.shards)
    assert storage.nbytes() == 4 * (full + mine)
    replica = storage.replicas[0]
    assert replica.grad is None
    assert replica.ring is not None
    replica.grad = replica.ring.lease(replica.plan.numel)
    largest = max(plan.numel for plan in storage.plan.buffers[replica.plan.buffer].buckets)
    assert storage.nbytes() == 4 * (full + mine + largest)
    fqn = replica.plan.placements[0].fqn
    storage.grad_view(fqn).fill_(3.0)
    assert int((replica.grad == 3.0).sum()) == replica.plan.placements[0].numel


def test_buckets_of_a_buffer_share_one_ring_and_those_of_two_buffers_do_not() -> None:
    storage = storage_of(zoo(), world=2, shard_grads=True)
    rings = {
        buffer.index: {id(storage.replicas[b.index].ring) for b in buffer.buckets} for buffer in storage.plan.buffers
    }
    assert all(len(found) == 1 for found in rings.values())
    assert len(set.union(*rings.values())) == len(rings)


def ring_of(numel: int = 8) -> GradRing:
    return GradRing(numel, torch.float32, torch.device("cpu"))


def test_a_lease_is_zeros_whatever_the_slot_held() -> None:
    ring = ring_of()
    first = ring.lease(8)
    first.fill_(5.0)
    ring.release(first)
    again = ring.lease(6)
    assert again.data_ptr() == first.data_ptr()
    assert again.tolist() == [0.0] * 6


def test_leases_that_are_out_at_once_do_not_overlap() -> None:
    ring = ring_of()
    leases = [ring.lease(8) for _ in range(5)]
    for number, lease in enumerate(leases):
        lease.fill_(number)
    assert [lease.unique().tolist() for lease in leases] == [[float(number)] for number in range(5)]
    assert ring.peak == 5


def test_a_ring_grows_for_a_while_and_keeps_two_slots() -> None:
    ring = ring_of()
    assert ring.tensors == ()
    leases = [ring.lease(8) for _ in range(4)]
    assert len(ring.tensors) == 4
    for lease in leases:
        ring.release(lease)
    assert len(ring.tensors) == GRAD_SLOTS
    assert ring.peak == 4
    for _ in range(3):
        ring.release(ring.lease(8))
    assert len(ring.tensors) == GRAD_SLOTS


def test_a_slot_that_was_not_leased_cannot_be_given_back() -> None:
    ring = ring_of()
    lease = ring.lease(8)
    ring.release(lease)
    with pytest.raises(KeyError):
        ring.release(lease)


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
    for shard in storage.shards:
        shard.master.mul_(1.0 + 2.0**-12)  # below bf16's resolution
    before = [shard.master.clone() for shard in storage.shards]
    with torch.no_grad():
        module.tall.weight[0, 0] = 3.0
        module.norm.weight.copy_(module.norm.weight.clone())  # written, but with what was there
    storage.pull_changed_params()
    changed = sum(int((shard.master != old).sum()) for shard, old in zip(storage.shards, before, strict=True))
    assert changed == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_and_taking_weights_are_each_others_inverse_where_they_are_apart(dtype: torch.dtype) -> None:
    for shard in storage_of(zoo(dtype), world=2, rank=1).shards:
        before = shard.weight.clone()
        shard.master.add_(2.0**-20)
        moved = shard.master.clone()
        shard.round_master()
        assert torch.equal(shard.weight, moved.to(dtype))
        assert torch.equal(shard.master, moved)
        shard.weight.copy_(before)
        shard.begin_from(shard.weight)
        assert torch.equal(shard.master, before.float())


def test_spans_by_param_are_those_of_the_plan() -> None:
    storage = storage_of(zoo(), world=3, rank=1)
    for shard in storage.shards:
        assert shard.spans == shard.plan.spans(1)
        assert [span for spans in shard.spans_by_fqn.values() for span in spans] == list(shard.spans)
        for fqn, spans in shard.spans_by_fqn.items():
            assert tuple(spans) == tuple(shard.plan.spans_of(fqn, 1))


def own_storage(module: nn.Module) -> Storage:
    plan = make_plan(param_table(module), Options(memory="params"), world=1)
    return Storage(plan, named_trainables(module), {"dense": 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_buffers_a_shard_is_the_params_own_memory(dtype: torch.dtype) -> None:
    module, untouched = zoo(dtype), zoo(dtype)
    addresses = {fqn: param.data_ptr() for fqn, param in named_trainables(module).items()}
    storage = own_storage(module)
    assert storage.replicas == ()
    assert {fqn: param.data_ptr() for fqn, param in storage.params.items()} == addresses
    assert {fqn for shard in storage.shards for fqn in shard.plan.fqns} == set(addresses)
    for shard in storage.shards:
        (fqn,) = shard.plan.fqns
        param = storage.params[fqn]
        assert torch.equal(param, untouched.get_parameter(fqn)), fqn
        assert shard.weight.data_ptr() == param.data_ptr()
        assert torch.equal(shard.master.view(param.shape), param.float()), fqn
        assert (shard.master is shard.weight) == (dtype == torch.float32)
        assert shard.update.numel() == 0, "it comes with the gradient"
    masters = 0 if dtype == torch.float32 else 4
    numel = sum(param.numel() for param in storage.params.values())
    assert storage.nbytes() == numel * (ITEMSIZE[dtype] + masters)


def test_without_buffers_release_leaves_params_where_they_are() -> None:
    module = zoo()
    addresses = {fqn: param.data_ptr() for fqn, param in named_trainables(module).items()}
    own_storage(module).release()
    assert {fqn: param.data_ptr() for fqn, param in named_trainables(module).items()} == addresses


def test_without_buffers_a_param_that_was_moved_is_named() -> None:
    module = zoo()
    storage = own_storage(module)
    storage.check_aliases()
    module.tall.weight.data = module.tall.weight.data.clone()
    with pytest.raises(StateError, match=r"param 'tall.weight' was moved \(by"):
        storage.check_aliases()

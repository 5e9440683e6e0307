from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.engine.reducer import GradReducer
from layerwise.errors import StateError
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.schedule import CommOp
from layerwise.layout.storage import GRAD_SLOTS, Reducer
from layerwise.memory.replicas import GradRing
from layerwise.memory.storage import Storage
from layerwise.models.table import named_trainables, param_table
from tests.worlds import shapes_module

FQNS = [f"layer{index}.weight" for index in range(4)]


class Recording(Communicator):
    """One rank that notes what it was asked to reduce."""

    def __init__(self) -> None:
        super().__init__(None)
        self.launched: list[str] = []

    def reduce_scatter(self, op: CommOp, full: Tensor, out: Tensor) -> Handle:
        self.launched.append(op.label)
        return super().reduce_scatter(op, full, out)


@pytest.fixture
def parts() -> tuple[GradReducer, Recording, Storage]:
    """Four matrices and a norm, every param in a bucket of its own; the last layer is in bucket 1, after the norm."""
    module = shapes_module([(4, 4)] * 4)
    plan = make_plan(param_table(module), Options(layout="flat", bucket_numel=1), world=1)
    storage = Storage(plan, named_trainables(module), {"dense": 0})
    communicator = Recording()
    return GradReducer(storage, {"dense": communicator}, {}, overlap=True), communicator, storage


def all_gradients(reducer: GradReducer, storage: Storage, order: list[str], *, sync: bool = True) -> None:
    for fqn in order:
        reducer.write(fqn, torch.ones_like(storage.params[fqn]), sync=sync)


def in_plan_order(storage: Storage) -> list[str]:
    return [placement.fqn for bucket in storage.plan.buckets for placement in bucket.placements]


def test_nothing_is_launched_early_before_one_backward_was_seen(parts: tuple[GradReducer, Recording, Storage]) -> None:
    reducer, communicator, storage = parts
    all_gradients(reducer, storage, in_plan_order(storage))
    assert communicator.launched == []
    reducer.finish()
    assert communicator.launched == [shard.plan.label for shard in storage.shards]


def test_buckets_are_launched_in_plan_order_whatever_order_gradients_come_in(
    parts: tuple[GradReducer, Recording, Storage],
) -> None:
    reducer, communicator, storage = parts
    reducer.finish()
    reducer.reset()
    communicator.launched.clear()
    backwards = list(reversed(in_plan_order(storage)))
    all_gradients(reducer, storage, backwards[:-1])
    assert communicator.launched == []  # the first bucket is not full, so nobody overtakes it
    all_gradients(reducer, storage, backwards[-1:])
    assert communicator.launched == [shard.plan.label for shard in storage.shards]


def test_microbatches_that_do_not_sync_launch_nothing(parts: tuple[GradReducer, Recording, Storage]) -> None:
    reducer, communicator, storage = parts
    reducer.finish()
    reducer.reset()
    communicator.launched.clear()
    all_gradients(reducer, storage, in_plan_order(storage), sync=False)
    assert communicator.launched == []


def test_gradients_add_up_until_reset_and_the_first_one_after_it_replaces(
    parts: tuple[GradReducer, Recording, Storage],
) -> None:
    reducer, _, storage = parts
    for _ in range(3):
        all_gradients(reducer, storage, FQNS)
    assert {float(storage.grad_view(fqn).sum()) for fqn in FQNS} == {48.0}
    reducer.reset()
    all_gradients(reducer, storage, FQNS)
    assert {float(storage.grad_view(fqn).sum()) for fqn in FQNS} == {16.0}


def test_a_param_without_a_gradient_is_reported_and_reduced_as_zero(
    parts: tuple[GradReducer, Recording, Storage],
) -> None:
    reducer, _, storage = parts
    all_gradients(reducer, storage, in_plan_order(storage))
    reducer.finish()
    reducer.reset()
    all_gradients(reducer, storage, [fqn for fqn in in_plan_order(storage) if fqn != FQNS[2]])
    assert reducer.finish() == {FQNS[2]}
    assert float(storage.grad_view(FQNS[2]).abs().sum()) == 0.0


def test_a_gradient_after_its_bucket_was_reduced_is_marked_late_and_not_launched_alone(
    parts: tuple[GradReducer, Recording, Storage],
) -> None:
    reducer, communicator, storage = parts
    reducer.finish()
    reducer.reset()
    all_gradients(reducer, storage, in_plan_order(storage))
    communicator.launched.clear()
    all_gradients(reducer, storage, FQNS[:1])
    reducer.finish()
    assert communicator.launched == []
    assert reducer.late == {FQNS[0]}
    reducer.reduce_again(reducer.late)
    assert communicator.launched == [f"bucket {storage.plan.bucket_of[FQNS[0]]}"]
    assert not reducer.late


class Deferred:
    """Work of a collective that does nothing before it is waited for, as gloo's reduce-scatter."""

    def __init__(self, finish: Callable[[], object], *, says_ready: bool) -> None:
        self._finish = finish
        self._says_ready = says_ready

    def is_completed(self) -> bool:
        return self._says_ready

    def wait(self) -> None:
        self._finish()


class Twins(Communicator):
    """One of two ranks that always bring the same gradients: sums are twice what this one has."""

    def __init__(self, *, says_ready: bool = False) -> None:
        super().__init__(None)
        self.world = 2
        self.launched: list[str] = []
        self.says_ready = says_ready
        self.overwrites = False
        """Scribble over a full gradient once it was reduced: it may be anybody's by then."""

    def reduce_scatter(self, op: CommOp, full: Tensor, out: Tensor) -> Handle:
        self.launched.append(op.label)

        def finish() -> None:
            out.copy_(2 * full[: out.numel()])
            if self.overwrites and out.data_ptr() != full.data_ptr():
                full.fill_(torch.nan)

        return Handle(op.label, out, (full, out), (Deferred(finish, says_ready=self.says_ready),))


def released(
    *, layers: int = 6, overlap: bool = True, says_ready: bool = False, shard_grads: bool = True, chunks: int = 1
) -> tuple[GradReducer, Twins, Storage]:
    """Matrices of one size, each in a bucket of its own, whose full gradients are released once reduced."""
    modules = [shapes_module([(16, 16)] * layers) for _ in range(chunks)]
    plan = make_plan(param_table(*modules), Options(layout="flat", bucket_numel=1, shard_grads=shard_grads), world=2)
    storage = Storage(plan, named_trainables(*modules), {"dense": 0})
    twins = Twins(says_ready=says_ready)
    twins.overwrites = True
    return GradReducer(storage, {"dense": twins}, {}, overlap=overlap), twins, storage


def ring_of(storage: Storage, fqn: str = "layer0.weight") -> GradRing:
    ring = storage.replicas[storage.plan.bucket_of[fqn]].ring
    assert ring is not None
    return ring


def backward(
    reducer: GradReducer, storage: Storage, value: float, *, sync: bool, order: list[str] | None = None
) -> None:
    """A gradient of one value for every param, in the order of backward."""
    for fqn in order or in_plan_order(storage):
        reducer.write(fqn, torch.full(storage.params[fqn].shape, value), sync=sync)
    if not sync:
        reducer.end_round()


def sums(storage: Storage) -> set[float]:
    """What this rank's shards of reduced gradients hold, padding left out."""
    return {value for shard in storage.shards for span in shard.spans for value in shard.update[span.part].tolist()}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("says_ready", [True, False])
def test_released_rounds_add_up_to_what_all_microbatches_brought(overlap: bool, says_ready: bool) -> None:
    reducer, _, storage = released(overlap=overlap, says_ready=says_ready)
    for step in range(3):
        for value in (1.0, 2.0, 4.0):
            backward(reducer, storage, value + step, sync=False)
        backward(reducer, storage, 8.0 + step, sync=True)
        assert reducer.finish() == frozenset()
        assert sums(storage) == {2.0 * (15 + 4 * step)}
        reducer.reset()


def test_every_round_launches_every_bucket_in_plan_order() -> None:
    reducer, twins, storage = released()
    order = [shard.plan.label for shard in storage.shards]
    backwards = list(reversed(in_plan_order(storage)))
    backward(reducer, storage, 1.0, sync=False)
    assert twins.launched == order
    backward(reducer, storage, 1.0, sync=False, order=backwards)
    assert twins.launched == order * 2
    reducer.end_round()  # a block without a backward, as on a rank that ran out of data
    assert twins.launched == order * 3
    backward(reducer, storage, 1.0, sync=True)
    reducer.finish()
    assert twins.launched == order * 4
    assert sums(storage) == {6.0}


def train_released(*, says_ready: bool, microbatches: int, layers: int = 12) -> GradRing:
    """The ring of twelve matrices after three steps."""
    reducer, _, storage = released(layers=layers, says_ready=says_ready)
    for _ in range(3):
        for _ in range(microbatches - 1):
            backward(reducer, storage, 1.0, sync=False)
        backward(reducer, storage, 1.0, sync=True)
        reducer.finish()
        assert sums(storage) == {2.0 * microbatches}
        reducer.reset()
    ring = ring_of(storage)
    assert not ring._leased
    assert len(ring.tensors) <= GRAD_SLOTS
    return ring


@pytest.mark.parametrize("microbatches", [1, 4])
def test_with_many_buckets_two_full_gradients_are_all_that_is_ever_held(microbatches: int) -> None:
    """Where reductions are over by the time that the next bucket but one begins to fill."""
    assert train_released(says_ready=True, microbatches=microbatches).peak <= GRAD_SLOTS


def test_where_nobody_knows_when_a_reduction_is_over_all_of_one_backward_is_held_and_nothing_waits() -> None:
    """A peer may reduce a bucket only in its step(): to wait for it in the middle of backward may be to wait for ever."""
    assert train_released(says_ready=False, microbatches=1).peak == 12


def test_microbatches_do_not_pile_up_where_nobody_knows_when_a_reduction_is_over() -> None:
    assert train_released(says_ready=False, microbatches=4).peak <= 12


def test_gradients_in_the_wrong_order_get_more_slots_for_a_while_and_come_out_right() -> None:
    reducer, _, storage = released(layers=5)
    backward(reducer, storage, 1.0, sync=True, order=list(reversed(in_plan_order(storage))))
    reducer.finish()
    ring = ring_of(storage)
    assert ring.peak == 5
    assert len(ring.tensors) <= GRAD_SLOTS
    assert sums(storage) == {2.0}


def test_no_full_gradient_is_left_after_its_reduction() -> None:
    reducer, _, storage = released()
    backward(reducer, storage, 1.0, sync=True)
    reducer.finish()
    assert all(replica.grad is None for replica in storage.replicas)
    with pytest.raises(StateError, match=r"bucket \d+ has no gradient memory: it was released when it was reduced"):
        storage.grad_view("layer0.weight")


def test_a_gradient_that_comes_after_its_bucket_was_launched_joins_the_next_round() -> None:
    reducer, twins, storage = released(layers=2)
    backward(reducer, storage, 1.0, sync=False)
    for fqn in in_plan_order(storage):
        reducer.write(fqn, torch.ones_like(storage.params[fqn]), sync=False)
    reducer.write("layer0.weight", torch.full((16, 16), 32.0), sync=False)  # its bucket is on its way already
    assert reducer.late == {"layer0.weight"}
    reducer.end_round()
    assert not reducer.late
    backward(reducer, storage, 1.0, sync=True)
    reducer.finish()
    found = {span.fqn: set(shard.update[span.part].tolist()) for shard in storage.shards for span in shard.spans}
    assert found.pop("layer0.weight") == {2.0 * (3 + 32)}
    assert {value for values in found.values() for value in values} == {6.0}
    assert twins.launched == [shard.plan.label for shard in storage.shards] * 3


def test_a_gradient_that_comes_after_the_last_launch_is_reduced_again() -> None:
    reducer, twins, storage = released(layers=2)
    backward(reducer, storage, 1.0, sync=True)
    reducer.write("layer1.weight", torch.full((16, 16), 3.0), sync=True)
    reducer.finish()
    assert reducer.late == {"layer1.weight"}
    twins.launched.clear()
    reducer.reduce_again(reducer.late)
    assert twins.launched == [f"bucket {storage.plan.bucket_of['layer1.weight']}"]
    shard = storage.shards[storage.plan.bucket_of["layer1.weight"]]
    assert shard.update.unique().tolist() == [8.0]


def test_a_missing_gradient_is_zero_in_its_round_whatever_the_slot_held_before() -> None:
    reducer, _, storage = released(layers=3)
    everything = in_plan_order(storage)
    backward(reducer, storage, 7.0, sync=False)
    backward(reducer, storage, 1.0, sync=True, order=[fqn for fqn in everything if fqn != "layer1.weight"])
    assert reducer.finish() == frozenset()  # it had one in the first round
    shard = storage.shards[storage.plan.bucket_of["layer1.weight"]]
    assert shard.update.unique().tolist() == [14.0]
    reducer.reset()
    backward(reducer, storage, 1.0, sync=True, order=[fqn for fqn in everything if fqn != "layer1.weight"])
    assert reducer.finish() == {"layer1.weight"}
    assert shard.update.unique().tolist() == [0.0]


def test_reset_in_the_middle_of_a_round_gives_every_slot_back_and_starts_afresh() -> None:
    reducer, _, storage = released(layers=4)
    backward(reducer, storage, 5.0, sync=False)
    for fqn in in_plan_order(storage)[:3]:
        reducer.write(fqn, torch.ones_like(storage.params[fqn]), sync=True)
    reducer.reset()
    assert not ring_of(storage)._leased
    assert not reducer.has_gradients
    backward(reducer, storage, 1.0, sync=True)
    reducer.finish()
    assert sums(storage) == {2.0}


def test_the_end_of_a_block_means_nothing_where_full_gradients_are_kept() -> None:
    reducer, twins, storage = released(shard_grads=False)
    backward(reducer, storage, 1.0, sync=False)
    assert twins.launched == []
    assert all(replica.ring is None for replica in storage.replicas)
    backward(reducer, storage, 2.0, sync=True)
    reducer.finish()
    assert sums(storage) == {6.0}


def test_a_later_chunk_is_launched_at_once_and_the_first_bucket_by_bucket() -> None:
    reducer, twins, storage = released(layers=3, chunks=2, shard_grads=False)
    backward(reducer, storage, 1.0, sync=True)
    reducer.finish()
    reducer.reset()
    launches = []
    for fqn in in_plan_order(storage):
        twins.launched.clear()
        reducer.write(fqn, torch.ones_like(storage.params[fqn]), sync=True)
        launches.append(len(twins.launched))
    # The second chunk comes first in backward: its norm (two params) and its matrices, one group. Then the first chunk.
    later = len([bucket for bucket in storage.plan.buckets if storage.plan.buffers[bucket.buffer].key.chunk == 1])
    assert max(launches) == later
    assert sorted(launches, reverse=True)[1] == 1
    assert launches.index(later) < len(launches) // 2 + 1
    assert sum(launches) == len(storage.shards)


@pytest.mark.parametrize("reducer", ["collective", "ordered"])
def test_a_bucket_of_one_rank_loses_nothing_when_a_block_follows_a_synchronised_backward(reducer: Reducer) -> None:
    """Where a domain is one rank there is nothing to release, whatever is done elsewhere."""
    module = shapes_module([(8, 8)] * 2)
    plan = make_plan(
        param_table(module), Options(layout="flat", bucket_numel=1, reducer=reducer, shard_grads=True), world=1
    )
    storage = Storage(plan, named_trainables(module), {"dense": 0})
    parts = GradReducer(storage, {"dense": Communicator(None)}, {}, overlap=True)
    for value, sync in ((1.0, True), (2.0, False), (4.0, True)):
        backward(parts, storage, value, sync=sync)
    parts.finish()
    parts.reduce_again(parts.late)
    assert sums(storage) == {7.0}

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerwise.buffers.bind import named_trainables, param_table
from layerwise.buffers.storage import Storage
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.comm.reducer import GradReducer
from layerwise.layout.plan import make_plan
from layerwise.layout.schedule import CommOp
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
    storage = Storage(make_plan(param_table(module), world=1, bucket_numel=1), named_trainables(module), {"dense": 0})
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
    assert communicator.launched == [bucket.plan.label for bucket in storage.buckets]


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
    assert communicator.launched == [bucket.plan.label for bucket in storage.buckets]


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

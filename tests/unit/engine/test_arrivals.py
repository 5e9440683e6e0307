"""Which gradients are waited for before a bucket is reduced, and what becomes of those that come late."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.engine.arrivals import REMEMBERED, Expected
from layerwise.engine.reducer import GradReducer
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.schedule import CommOp
from layerwise.memory.storage import Storage
from layerwise.models.table import named_trainables, param_table
from tests.worlds import shapes_module


class Recording(Communicator):
    """One of two ranks that bring the same gradients, which notes what it was asked to reduce."""

    def __init__(self) -> None:
        super().__init__(None)
        self.world = 2
        self.launched: list[str] = []

    def reduce_scatter(self, op: CommOp, full: Tensor, out: Tensor) -> Handle:
        self.launched.append(op.label)
        out.copy_(2 * full[: out.numel()])
        return Handle(op.label, out)


class Run:
    """Six matrices, each in a bucket of its own, and backwards of any of them."""

    def __init__(self, *, shard_grads: bool = False) -> None:
        module = shapes_module([(16, 16)] * 6)
        plan = make_plan(param_table(module), Options(layout="flat", bucket_numel=1, shard_grads=shard_grads), world=2)
        self.storage = Storage(plan, named_trainables(module), {"dense": 0})
        self.communicator = Recording()
        self.reducer = GradReducer(self.storage, {"dense": self.communicator}, {}, overlap=True)
        self.order = [placement.fqn for bucket in plan.buckets for placement in bucket.placements]
        self.labels = [bucket.label for bucket in plan.buckets]

    def backward(self, *without: str, value: float = 1.0, sync: bool = True) -> int:
        """How many buckets were launched meanwhile."""
        before = len(self.communicator.launched)
        for fqn in self.order:
            if fqn not in without:
                self.reducer.write(fqn, torch.full(self.storage.params[fqn].shape, value), sync=sync)
        return len(self.communicator.launched) - before

    def finish(self) -> int:
        """How many buckets were launched now; all of them once, altogether, in plan order."""
        before = len(self.communicator.launched)
        self.reducer.finish()
        assert self.communicator.launched == self.labels
        found = len(self.communicator.launched) - before
        self.communicator.launched.clear()
        return found

    def step(self, *without: str) -> tuple[int, int, frozenset[str]]:
        """Buckets launched in backward, in step(), and what was late."""
        found = self.backward(*without), self.finish(), self.reducer.late
        if found[2]:
            self.reducer.reduce_again(found[2])
            self.communicator.launched.clear()
        self.reducer.reset()
        return found

    def comes_last(self, fqn: str) -> str:
        """From now on this param's gradient comes after all others."""
        self.order.remove(fqn)
        self.order.append(fqn)
        return fqn

    @property
    def all(self) -> int:
        return len(self.labels)

    def update_of(self, fqn: str) -> set[float]:
        shard = self.storage.shards[self.storage.plan.bucket_of[fqn]]
        return {value for span in shard.spans if span.fqn == fqn for value in shard.update[span.part].tolist()}


NONE: frozenset[str] = frozenset()


def test_a_param_that_no_backward_reaches_is_not_waited_for() -> None:
    run = Run()
    first = run.order[0]
    for _ in range(REMEMBERED):
        assert run.step(first) == (0, run.all, NONE)
    for _ in range(2):
        assert run.step(first) == (run.all, 0, NONE)


def test_what_is_not_expected_behind_all_others_is_left_to_the_step() -> None:
    """It is nobody's predecessor: to launch it early would gain nothing, and make it late if it came."""
    run = Run()
    last = run.order[-1]
    for _ in range(REMEMBERED):
        run.step(last)
    assert run.step(last) == (run.all - 1, 1, NONE)
    assert run.step() == (run.all - 1, 1, NONE)  # it comes for the first time, and is not late
    assert run.step() == (run.all, 0, NONE)


def test_after_rounds_of_the_last_layer_alone_the_rest_is_not_late() -> None:
    run = Run()
    for _ in range(REMEMBERED):
        run.step(*run.order[4:])
    launched, left, late = run.step()
    assert launched > 0
    assert left > 0
    assert late == NONE
    assert run.step() == (run.all, 0, NONE)


def test_a_param_that_comes_for_the_first_time_in_the_second_round_is_not_late() -> None:
    run = Run()
    branch = run.comes_last("layer3.weight")
    run.step(branch)
    assert run.step() == (run.all, 0, NONE)


def test_a_param_that_comes_every_other_time_is_never_late() -> None:
    run = Run()
    branch = "layer3.weight"
    run.step()
    before = run.storage.plan.bucket_of[branch]
    for _ in range(REMEMBERED):
        assert run.step(branch) == (before, run.all - before, NONE)  # what comes before it still overlaps
        assert run.step() == (run.all, 0, NONE)


def test_a_param_that_stays_away_is_waited_for_for_some_rounds_only() -> None:
    run = Run()
    branch = run.order[0]
    run.step()
    launched = [run.step(branch)[0] for _ in range(REMEMBERED + 1)]
    assert launched == [0] * (REMEMBERED - 1) + [0, run.all]


def test_a_param_that_comes_again_is_late_once_and_counts() -> None:
    run = Run()
    branch = run.comes_last("layer3.weight")
    for _ in range(REMEMBERED):
        run.step(branch)
    assert run.step() == (run.all, 0, frozenset({branch}))
    assert run.step() == (run.all, 0, NONE)


def test_what_was_late_is_in_the_sum() -> None:
    run = Run()
    branch = run.comes_last("layer5.weight")
    for _ in range(REMEMBERED):
        run.step(branch)
    run.backward(value=3.0)
    assert run.reducer.finish() == NONE
    assert run.reducer.late == {branch}
    run.reducer.reduce_again(run.reducer.late)
    assert {fqn: run.update_of(fqn) for fqn in run.order} == {fqn: {6.0} for fqn in run.order}


def test_a_round_that_brought_nothing_teaches_nothing() -> None:
    run = Run()
    run.finish()
    run.reducer.reset()
    assert run.step() == (run.all, 0, NONE)


def test_gradients_that_come_in_several_parts_are_waited_for() -> None:
    """Those of a pipeline's microbatches, or of a block that is checkpointed and used twice."""
    run = Run()
    for number in range(4):
        launched = [run.backward() for _ in range(3)]
        assert launched == ([0, 0, run.all] if number else [0, 0, 0])
        assert run.finish() == (0 if number else run.all)
        assert run.reducer.late == NONE
        run.reducer.reset()


def test_rounds_of_blocks_expect_what_came_in_any_of_them() -> None:
    run = Run(shard_grads=True)
    first = run.order[0]
    for number in range(REMEMBERED + 2):
        expected = 0 if number < REMEMBERED else run.all
        assert run.backward(first, sync=False) == expected
        run.reducer.end_round()
        assert run.communicator.launched == run.labels
        run.communicator.launched.clear()


def test_learning_forgets_by_rounds_and_takes_the_most() -> None:
    expected = Expected({"a": 0, "b": 1}, 2)
    assert not expected.is_learned
    assert expected.counts == {"a": 1, "b": 1}
    expected.learn({"a": 3, "b": 1})
    for _ in range(REMEMBERED - 1):
        expected.learn({"a": 2})
        assert expected.counts == {"a": 3, "b": 1}
        assert expected.params_by_bucket == [1, 1]
    expected.learn({"a": 2})
    assert expected.counts == {"a": 2}
    assert expected.params_by_bucket == [1, 0]


@pytest.mark.parametrize("shard_grads", [False, True])
def test_what_comes_late_takes_one_spare_per_bucket_however_often_it_comes(shard_grads: bool) -> None:
    run = Run(shard_grads=shard_grads)
    run.step()
    run.backward()
    for _ in range(6):
        run.backward(value=2.0)
    held = sum(spare.nbytes for spare in run.reducer._spares.values())
    assert held == sum(bucket.numel for bucket in run.storage.plan.buckets) * 4
    assert run.reducer.late == frozenset(run.order)
    run.reducer.finish()
    run.reducer.reduce_again(run.reducer.late)
    assert {value for fqn in run.order for value in run.update_of(fqn)} == {2.0 * (1 + 12)}
    assert not run.reducer._spares

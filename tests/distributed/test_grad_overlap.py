"""Reductions that overlap with backward: that they did, in every layout and with every reducer, whatever params are never used; and that ranks whose rounds
are shifted are told so.

Equal numbers cannot show it: what is reduced in `step()` comes out the same, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layerwise
from layerwise.comm.collectives import Communicator
from layerwise.engine.arrivals import REMEMBERED
from layerwise.layout.storage import GRAD_SLOTS
from layerwise.planner.report import column_of
from tests.marks import sampled
from tests.ranks import raised, run_ranks


class Tower(nn.Module):
    """Layers in a row, with params before or behind them that no forward reads."""

    def __init__(self, *, unused: str = "", checkpointing: bool = False) -> None:
        super().__init__()
        if unused == "start":
            self.before = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.norm = nn.LayerNorm(16)
        if unused == "end":
            self.behind = nn.Linear(16, 16)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(2 if self.checkpointing else 1):
                x = x + torch.tanh(checkpoint(layer, x, use_reentrant=True) if self.checkpointing else layer(x))
        return self.norm(x)


@contextmanager
def launches_noted() -> Iterator[list[str]]:
    """The labels of all buckets whose reduction is launched."""
    found: list[str] = []

    def noting(name: str) -> Any:
        real: Callable[..., Any] = getattr(Communicator, name)

        def noted(self: Communicator, op: Any, *args: Any) -> Any:
            if op.phase == "reduce":
                found.append(op.label)
            return real(self, op, *args)

        return mock.patch.object(Communicator, name, noted)

    with noting("reduce_scatter"), noting("all_reduce"), noting("all_to_all"):
        yield found


class Way(NamedTuple):
    layout: str
    reducer: str = "collective"
    unused: str = ""
    shard_grads: bool = False
    checkpointing: bool = False
    microbatches: int = 1
    blocks: int = 0


def built(way: Way) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    torch.manual_seed(3)
    model = layerwise.DataParallel(
        Tower(unused=way.unused, checkpointing=way.checkpointing),
        layout=way.layout,
        reducer=way.reducer,  # type: ignore[arg-type]
        shard_grads=way.shard_grads,
        bucket_mib=0.0005,
    )
    return model, layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.01), other=layerwise.AdamW(lr=0.01))


def launches(rank: int, world: int, ways: list[Way]) -> list[tuple[int, list[tuple[int, int]]]]:
    """Of each way the number of buckets, and of every step how many were launched in the last backward and how many in step()."""
    found = []
    with launches_noted() as noted:
        for way in ways:
            model, optimizer = built(way)
            steps = []
            for step in range(REMEMBERED + 3):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(rank + 10 * step)).requires_grad_()
                for _ in range(way.blocks):
                    with model.no_sync():
                        model(x).square().sum().backward()
                noted.clear()
                for _ in range(way.microbatches):
                    model(x).square().sum().backward()
                in_backward = len(noted)
                optimizer.step()
                steps.append((in_backward, len(noted) - in_backward))
            found.append((len(model.plan.buckets), steps))
            model.unwrap()
    return found


WAYS = [
    Way(layout, reducer, unused)
    for layout in ("flat", "padded", "compact", "replicated")
    for reducer in ("collective", "ordered")
    for unused in ("", "end")
    if layout != "replicated" or reducer == "collective"
]
MORE = [
    Way("flat", unused="start"),
    Way("flat", unused="end", checkpointing=True),
    Way("flat", unused="end", microbatches=3),
    Way("flat", unused="end", blocks=2),
    Way("flat", "ordered", unused="end", shard_grads=True),
    Way("padded", unused="end", shard_grads=True, blocks=2),
]


@pytest.mark.parametrize("world", sampled([1, 2]))
def test_all_buckets_are_launched_in_backward_once_one_was_seen(world: int) -> None:
    ways = [*WAYS, *MORE]
    for results in run_ranks(world, launches, ways):
        for way, (buckets, steps) in zip(ways, results, strict=True):
            assert buckets >= (2 if way.layout == "padded" else 7), way
            first, *later = steps
            if not way.shard_grads:
                assert first == (0, buckets), way
            if way.unused:  # for some rounds it is waited for
                later = later[REMEMBERED:]
            # Behind all others nobody waits for a bucket that nobody fills; the bias lies among others.
            left = 1 if way.unused == "start" else 0
            assert len(later) > 1
            assert set(later) == {(buckets - left, left)}, way


# ------------------------------------------------------------------------------------------------ rounds that are shifted


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * rank + number))
    result: Tensor = model(x).square().sum()
    return result


def walk(rank: int, world: int, actions: list[list[str]], layout: str) -> list[str]:
    """What rank r got from `actions[r]`, once two steps were taken by all."""
    model, optimizer = built(Way(layout))
    for number in range(2):
        loss_of(model, rank, number).backward()
        optimizer.step()
    does: dict[str, Callable[[], Any]] = {
        "backward": lambda: loss_of(model, rank, 7).backward(),
        "norm": lambda: model.clip_grad_norm_(1.0),
        "zero": optimizer.zero_grad,
        "forget": model.zero_grad,
        "step": optimizer.step,
    }
    return [raised(does[name]) for name in actions[rank]]


NOTHING = "nothing was raised"


@pytest.mark.parametrize("layout", sampled(["flat", "compact"], "flat"))
@pytest.mark.parametrize("forget", sampled(["zero", "forget"], "zero"))
def test_a_rank_that_drops_a_backward_alone_is_named_on_all(layout: str, forget: str) -> None:
    again = ["backward", forget, "backward", "step"]
    one, other = run_ranks(2, walk, [again, ["backward", "step"]], layout, pg_timeout_s=40.0)
    assert one[:2] == [NOTHING, one[1]]
    assert one[1].startswith("StateError: zero_grad() dropped gradients that were being reduced, while other ranks"), (
        one
    )
    assert other[1].startswith("PlanMismatchError: rank 0 failed where others did not: StateError: zero_grad()"), other


def test_a_rank_that_has_not_begun_the_backward_that_others_drop_is_named_at_its_step() -> None:
    """It failed in forward; the others finish their round with its next one."""
    one, other = run_ranks(2, walk, [["zero", "backward", "step"], ["backward", "zero"]], "flat", pg_timeout_s=40.0)
    assert one[:2] == [NOTHING, NOTHING]
    assert "rank 1 failed where others did not: StateError: zero_grad() dropped" in one[2]
    assert other[1].startswith("StateError: zero_grad() dropped gradients")


def test_a_rank_that_drops_what_it_measured_alone_is_named() -> None:
    walks = [["backward", "norm", "zero"], ["backward", "norm", "step"]]
    one, other = run_ranks(2, walk, walks, "flat", pg_timeout_s=40.0)
    assert one[2].startswith("StateError: zero_grad() dropped gradients")
    assert "rank 0 failed where others did not" in other[2]


@pytest.mark.parametrize(
    "walks",
    [
        [["backward", "zero", "backward", "step", "zero", "zero"]] * 2,
        [["backward", "norm", "zero", "backward", "step"], ["backward", "norm", "forget", "backward", "step"]],
        [
            ["zero", "backward", "step", "zero", "backward", "step"],
            ["zero"] * 3 + ["backward", "step", "backward", "step"],
        ],
        [["backward", "zero", "zero", "forget", "backward", "step"], ["backward", "zero", "backward", "step"]],
        [["backward", "backward", "step"], ["backward", "step"]],
    ],
)
def test_whatever_all_ranks_drop_alike_is_no_error(walks: list[list[str]]) -> None:
    for found in run_ranks(2, walk, walks, "flat"):
        assert set(found) == {NOTHING}


def test_after_the_error_ranks_are_together_again() -> None:
    after = ["backward", "step"]
    walks = [["backward", "zero", *after, *after], ["backward", "step", *after, *after]]
    for found in run_ranks(2, walk, walks, "flat", pg_timeout_s=40.0):
        assert found[1] != NOTHING
        assert found[2:] == [NOTHING] * 4


# ------------------------------------------------------------------------------------------------ gradients that are leased


def leased(rank: int, world: int, way: Way) -> tuple[int, int, int]:
    """Bytes of full gradients: as planned where the wire keeps up, at most, and those that were really there at once."""
    model, optimizer = built(way)
    for number in range(3):
        loss_of(model, rank, number).backward()
        optimizer.step()
    found = usual = 0
    for buffer in model.plan.buffers:
        ring = model.engine.storage.replicas[buffer.buckets[0].index].ring
        assert ring is not None
        slot = max(bucket.numel for bucket in buffer.buckets) * 4
        usual += min(GRAD_SLOTS, len(buffer.buckets)) * slot
        found += ring.peak * slot
    column = column_of(model.plan)
    return usual, usual + column.at_most_nbytes - column.memory.total, found


@pytest.mark.parametrize("reducer", sampled(["collective", "ordered"], "collective"))
def test_no_more_full_gradients_are_leased_than_the_plan_has_at_most(reducer: str) -> None:
    for usual, at_most, found in run_ranks(2, leased, Way("flat", reducer, shard_grads=True)):
        assert usual < at_most
        assert found <= at_most
        # gloo does not know that a reduce-scatter is over before it was waited for.
        assert reducer == "ordered" or found == at_most

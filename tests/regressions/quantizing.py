"""Weights that are kept as codes: what masters begin with, what codes are made of, where it is staged, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import layerwise
from layerwise.engine.publisher import Publisher
from layerwise.engine.reducer import GradReducer
from layerwise.kernels.stored import Stored
from layerwise.layout.buckets import BucketPlan
from layerwise.memory.staged import KeptCodes, StagedReplica
from layerwise.models import quantizing
from tests import quantizing as scene
from tests.quantizing import Way, on_and_off
from tests.ranks import raised
from tests.regressions.cases import Case, Mistake, in_place_of

STEPS = 3
NOT_OF_MASTER = "are not those of its master"


# ------------------------------------------------------------------------------------------------ beginnings


def masters_begin_with_values(rank: int, world: int) -> list[str]:
    """Masters were born from quantised weights: noise of eight bits from the first step on, and a loss that lagged behind.

    Here a quantised param keeps the values that it was made of until a master was taken from them, and there is no other
    way to a master: what codes stand for is never asked.
    """
    return on_and_off(rank, world, [Way(layout) for layout in ("flat", "compact")], STEPS)


def dequantised(rank: int) -> Any:
    def take(self: Stored, fqn: str) -> Tensor:
        self.given = None
        return self.read()

    return mock.patch.object(Stored, "take_given", take)


def values_are_released(rank: int, world: int) -> list[str]:
    """The values that masters began with stayed in memory wherever a rank owned nothing of a param.

    Here every rank takes them from every param when it lays out its buckets, whoever owns it.
    """
    return on_and_off(rank, world, [Way(layout) for layout in ("compact", "padded")], 1)


def kept_everywhere(rank: int) -> Any:
    def take(self: Stored, fqn: str) -> Tensor:
        if self.given is None:
            raise AssertionError(f"{fqn} has no values.")
        return self.given

    def settle(real: Callable[..., None]) -> Callable[..., None]:
        def settle(self: KeptCodes, staged: Tensor, *, keep_values: bool) -> None:
            kept = self.stored.given
            real(self, staged, keep_values=keep_values)
            self.stored.given = kept

        return settle

    return _both(mock.patch.object(Stored, "take_given", take), in_place_of(KeptCodes, "settle", settle))


def kept_where_nothing_is_owned(rank: int) -> Any:
    def settle(real: Callable[..., None]) -> Callable[..., None]:
        def settle(self: StagedReplica) -> None:
            place = {placement.offset: placement.fqn for placement in self.plan.placements}
            values = [
                (param.stored, self.landing[param.part].view(param.stored.shape).clone())
                for param in self.kept
                if isinstance(param, KeptCodes) and place[param.part.start] not in self.shard.spans_by_fqn
            ]
            real(self)
            for stored, given in values:
                stored.given = given

        return settle

    return in_place_of(StagedReplica, "settle", settle)


# ------------------------------------------------------------------------------------------------ steps


def codes_are_written_once(rank: int, world: int) -> list[str]:
    """The inner step of the optimizer made codes of fp32 masters, which those of the gather then replaced: work for nothing,
    and other numbers in between.

    Here a step moves masters alone. Codes are made of what a gather brought, once, on every rank; writes are counted.
    """
    return on_and_off(rank, world, [Way(overlap=overlap) for overlap in (True, False)], STEPS)


def step_makes_codes(rank: int) -> Any:
    def begin(real: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Publisher) -> None:
            for replica in self._storage.replicas:
                for param in replica.kept if isinstance(replica, StagedReplica) else ():
                    if isinstance(param, KeptCodes):
                        param.stored.settle(param.stored.read())
            real(self)

        return begin

    return in_place_of(Publisher, "begin", begin)


def masters_are_staged(rank: int, world: int) -> list[str]:
    """New masters were never written to where gathers send from: old bytes travelled.

    Here the message of a bucket is its master, rounded into staging memory by whoever launches the gather.
    """
    return on_and_off(rank, world, [Way(layout) for layout in ("flat", "padded")], STEPS)


def _message(change: Callable[[StagedReplica, Tensor], None]) -> Any:
    def message(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def message(self: StagedReplica) -> Tensor:
            found = real(self)
            change(self, found)
            return found

        return message

    return in_place_of(StagedReplica, "message", message)


def old_masters(rank: int) -> Any:
    # Not by id: replicas of the second way may lie where those of the first did.
    kept = WeakKeyDictionary[StagedReplica, Tensor]()

    def change(replica: StagedReplica, message: Tensor) -> None:
        now = message.clone()
        message.copy_(kept.get(replica, torch.zeros_like(now)))
        kept[replica] = now

    return _message(change)


def staging_is_left_alone(rank: int, world: int) -> list[str]:
    """Staging memory was that of gradients, and was zeroed with them before the gather that had been put off: weights froze,
    in training, in evaluations and when a forward was run again.

    Here forgetting gradients touches no memory; what a gather has of it is its own until it has landed, and backward
    waits for that.
    """
    ways = [Way(evaluates=evaluates, accumulation=2) for evaluates in (False, True)]
    return on_and_off(rank, world, [*ways, Way("padded"), Way("compact")], STEPS)


def zeroed_with_gradients(rank: int) -> Any:
    def forget(real: Callable[..., None]) -> Callable[..., None]:
        def forget(self: GradReducer) -> None:
            real(self)
            for replica in self._storage.replicas:
                if replica.grad is not None:
                    replica.grad.zero_()

        return forget

    return in_place_of(GradReducer, "forget", forget)


def every_bucket_lands(rank: int, world: int) -> list[str]:
    """Which buckets a gather is for was asked of the first of a group, in three places.

    Here each bucket has a replica, which knows how it lands. Nobody filters.
    """
    return on_and_off(rank, world, [Way(experts=2), Way(overlap=False, experts=2)], STEPS)


def first_bucket_only(rank: int) -> Any:
    def settle(real: Callable[..., None]) -> Callable[..., None]:
        def settle(self: StagedReplica) -> None:
            if self.version and self.plan.index != 0:
                with mock.patch.object(self, "kept", ()):
                    real(self)
                return
            real(self)

        return settle

    return in_place_of(StagedReplica, "settle", settle)


def mixed_buckets(rank: int, world: int) -> list[str]:
    """Whether a bucket holds quantised params was asked of its first one: of a mixed bucket either kind came out wrong.

    Here a recipe belongs to a placement, and a bucket is staged if any of its params has one; the others have memory of
    their own.
    """
    return on_and_off(
        rank,
        world,
        [Way(layout, skip=("blocks.1.down.*", "blocks.0.up.*")) for layout in ("flat", "padded", "compact")],
        STEPS,
    )


def first_param_decides(rank: int) -> Any:
    return mock.patch.object(BucketPlan, "is_staged", property(lambda self: bool(self.placements[0].recipe)))


def last_param_decides(rank: int) -> Any:
    return mock.patch.object(BucketPlan, "is_staged", property(lambda self: bool(self.placements[-1].recipe)))


def owners_are_like_others(rank: int, world: int) -> list[str]:
    """Owners made codes of fp32 masters and all others of bf16: replicas differed.

    Here an owner makes codes of what it sent, as everybody else does.
    """
    return on_and_off(rank, world, [Way(layout) for layout in ("compact", "padded")], STEPS)


def owner_knows_better(rank: int) -> Any:
    def settle(real: Callable[..., None]) -> Callable[..., None]:
        def settle(self: StagedReplica) -> None:
            real(self)
            place = {placement.offset: placement.fqn for placement in self.plan.placements}
            for param in self.kept:
                for span in self.shard.spans_by_fqn.get(place[param.part.start], []):
                    whole = span.stop - span.start == param.part.stop - param.part.start
                    if whole and isinstance(param, KeptCodes) and self.version:
                        param.stored.settle(self.shard.master[span.part].view(param.stored.shape) * 1.001)

        return settle

    return in_place_of(StagedReplica, "settle", settle)


def no_layout_corrupts(rank: int, world: int) -> list[str]:
    """With padded buffers the gather sent the memory that staging shared with gradients, as it was, and nothing refused it:
    weights were overwritten with gradients.

    Here no layout has a way of its own to publish: what is gathered is what `message()` wrote.
    """
    return on_and_off(rank, world, [Way(layout) for layout in ("padded", "replicated")], STEPS)


def gradients_travel(rank: int) -> Any:
    def change(replica: StagedReplica, message: Tensor) -> None:
        message.fill_(0.125)  # as a gradient would be: any number that is no weight

    return _message(change)


# ------------------------------------------------------------------------------------------------ checks and guards


def comparisons_compare(rank: int, world: int) -> list[str]:
    """A test asked whether a tensor has a method that every tensor has, and so compared no quantised param; and its gathers
    were never put off.

    Here a comparison that compared nothing, and a run in which nothing was put off, are complaints.
    """
    return on_and_off(rank, world, [Way()], STEPS)


def nothing_is_compared(rank: int) -> Any:
    return in_place_of(scene, "coded_params", lambda real: lambda model: iter(()))


def nothing_is_put_off(rank: int) -> Any:
    def init(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: Publisher, *args: Any, **options: Any) -> None:
            real(self, *args, **{**options, "overlap": False})

        return init

    return in_place_of(Publisher, "__init__", init)


def what_cannot_work_is_refused(rank: int, world: int) -> list[str]:
    """Recipes and options that could not work were taken, and gathers sent old weights.

    Here they are refused by name when the module is quantised or wrapped.
    """
    cases: list[tuple[str, Callable[[], Any], str]] = [
        (
            "a weight of 33 columns",
            lambda: layerwise.quantize(nn.Linear(33, 64).bfloat16()),
            "expected multiples of 32",
        ),
        ("a weight in fp32", lambda: layerwise.quantize(nn.Linear(32, 64)), "expected torch.bfloat16"),
        ("fp4", lambda: layerwise.quantize(nn.Linear(32, 64).bfloat16(), "nvfp4"), "recipe must be one of mxfp8"),
        ("an embedding", lambda: layerwise.quantize(nn.Embedding(32, 64).bfloat16()), "has no weight to quantise"),
        ("a module twice", _twice, "quantised by mxfp8 already"),
        ("an unknown way to gather", _unknown_gather, "param_gather must be one of quantized, bf16"),
    ]
    return [f"{what} was taken: {said}" for what, act, words in cases if words not in (said := raised(act))]


def _twice() -> None:
    layerwise.quantize(layerwise.quantize(nn.Linear(32, 64).bfloat16()))


def _unknown_gather() -> None:
    layerwise.DataParallel(layerwise.quantize(nn.Linear(32, 64).bfloat16()), param_gather="fp8")  # type: ignore[arg-type]


def anything_goes(rank: int) -> Any:
    return in_place_of(quantizing, "_problem", lambda real: lambda *given: "")


def _both(one: Any, other: Any) -> Any:
    stack = ExitStack()
    stack.enter_context(one)
    stack.enter_context(other)
    return stack


CASES = (
    Case(
        name="R36",
        title="staging is left alone until it has landed",
        world=2,
        check=staging_is_left_alone,
        mistakes=(
            Mistake(
                what="staging is zeroed with gradients",
                put_in=zeroed_with_gradients,
                seen_as=f"step 0: codes .* {NOT_OF_MASTER}",
            ),
        ),
    ),
    Case(
        name="R33",
        title="masters begin with values, not with what codes stand for",
        world=2,
        check=masters_begin_with_values,
        mistakes=(
            Mistake(
                what="masters begin with what codes stand for",
                put_in=dequantised,
                seen_as=r"master of blocks.0.up.weight does not begin with what was given",
            ),
        ),
    ),
    Case(
        name="R34",
        title="codes are written once in a step",
        world=2,
        check=codes_are_written_once,
        mistakes=(
            Mistake(
                what="a step makes codes of its own", put_in=step_makes_codes, seen_as="was written 6 times in 3 steps"
            ),
        ),
    ),
    Case(
        name="R35",
        title="new masters are what is gathered",
        world=3,
        check=masters_are_staged,
        mistakes=(
            Mistake(
                what="masters of the step before are staged", put_in=old_masters, seen_as=f"step 0: .* {NOT_OF_MASTER}"
            ),
        ),
    ),
    Case(
        name="R37",
        title="every bucket lands as it is",
        world=2,
        check=every_bucket_lands,
        mistakes=(
            Mistake(
                what="only the first bucket's codes are made anew", put_in=first_bucket_only, seen_as=NOT_OF_MASTER
            ),
        ),
    ),
    Case(
        name="R38",
        title="what cannot work is refused by name",
        world=1,
        check=what_cannot_work_is_refused,
        mistakes=(
            Mistake(what="any weight is taken", put_in=anything_goes, seen_as="a weight of 33 columns was taken"),
        ),
    ),
    Case(
        name="R39",
        title="mixed buckets",
        world=3,
        check=mixed_buckets,
        mistakes=(
            Mistake(
                what="the first param of a bucket decides", put_in=first_param_decides, seen_as="is not kept as codes"
            ),
            Mistake(
                what="the last param of a bucket decides", put_in=last_param_decides, seen_as="is not kept as codes"
            ),
        ),
    ),
    Case(
        name="R40",
        title="comparisons compare",
        world=2,
        check=comparisons_compare,
        mistakes=(
            Mistake(
                what="no quantised param is compared", put_in=nothing_is_compared, seen_as="no codes were compared"
            ),
            Mistake(what="no gather is put off", put_in=nothing_is_put_off, seen_as="no gather was put off"),
        ),
    ),
    Case(
        name="R41",
        title="what masters began with is released",
        world=2,
        check=values_are_released,
        mistakes=(Mistake(what="values stay beside their codes", put_in=kept_everywhere, seen_as="was not released"),),
    ),
    Case(
        name="D5",
        title="owners make codes of what they sent",
        world=3,
        check=owners_are_like_others,
        mistakes=(
            Mistake(
                what="owners make codes of their masters",
                put_in=owner_knows_better,
                seen_as="replicas of bucket .* differ between ranks",
            ),
        ),
    ),
    Case(
        name="D6",
        title="no layout sends what is not its masters",
        world=3,
        check=no_layout_corrupts,
        mistakes=(
            Mistake(what="the memory of gradients travels as it is", put_in=gradients_travel, seen_as=NOT_OF_MASTER),
        ),
    ),
    Case(
        name="D11",
        title="released also where a rank owns nothing",
        world=4,
        check=values_are_released,
        mistakes=(
            Mistake(
                what="values stay where a rank owns nothing of a param",
                put_in=kept_where_nothing_is_owned,
                seen_as="was not released",
            ),
        ),
    ),
)

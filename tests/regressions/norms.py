"""Statistics of gradients and what is decided by them: every element counted once, by all ranks, for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import layerwise
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.engine import stats
from layerwise.engine.engine import Engine
from layerwise.engine.policy import StepPolicy
from layerwise.engine.stats import StatsPass
from layerwise.engine.step import Stepper
from layerwise.engine.step_plan import Live
from layerwise.layout.schedule import CommOp
from layerwise.routing.spec import DENSE, EXPERT
from tests import worlds
from tests.arrangements import Arrangement
from tests.reference.oracle import Hyper
from tests.regressions.cases import (
    Case,
    Mistake,
    arranged,
    collectives_noted,
    compared,
    differ_between_ranks,
    in_place_of,
)
from tests.worlds import deliver, gradient, hash_everything, hash_tensors, rules

# ------------------------------------------------------------------------------------------------ norm groups


def group_on_one_stage(rank: int, world: int) -> list[str]:
    """Whether a named norm group has members anywhere was asked over one set of ranks and its norm reduced over
    another: ranks issued different collectives.

    Here nobody asks. Names of norm groups are arguments, the same on all ranks, and one all-reduce of one vector
    carries everything, members or none.
    """
    with collectives_noted() as names:

        def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
            times = sum(name.startswith("stats") for name in names)
            names.clear()
            found = [] if times == 1 else [f"statistics took {times} collectives in a step"]
            return found + differ_between_ranks("norms", optimizer.stats.norms)

        arrangement = Arrangement(
            pp=2,
            experts=False,
            steps=2,
            hyper={"clip": 0.25},
            norm_groups={"head": "head.weight"},
            options={"check_collectives": True},
        )
        return arranged(rank, world, arrangement, also)


def existence_by_stage(rank: int) -> Any:
    def local(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: StatsPass, engine: Engine, group_of: dict[str, str], named: Any, *, zeros: bool) -> None:
            real(self, engine, group_of, [name for name in named if name in group_of.values()], zeros=zeros)

        return init

    return in_place_of(StatsPass, "__init__", local)


def norm_over_all_ranks(rank: int, world: int) -> list[str]:
    """The norm of a named group was reduced over the ranks of one model replica only: with data parallelism it differed
    between ranks and was too small, so shards of one param were clipped differently.

    Here norms of all groups are entries of one vector, which is reduced over all ranks at once.
    """
    hyper = {"clip": 0.1, "norm_groups": {"experts": "experts"}}

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        stats = optimizer.stats
        found = [] if stats.clip_coefficients["experts"] < 1 else ["in the scene nothing is clipped"]
        return found + differ_between_ranks("norms", stats.norms)

    return compared(rank, world, worlds.Case(hyper=hyper, steps=2), also)


def group_norm_stays_local(rank: int) -> Any:
    named = slice(0, 1)  # names are sorted: experts, matrix, other

    def partly(real: Callable[..., Handle]) -> Callable[..., Handle]:
        def all_reduce(self: Communicator, op: CommOp, tensor: Any) -> Handle:
            own = tensor[named].clone()
            handle = real(self, op, tensor)
            return handle.followed_by(lambda: tensor[named].copy_(own), tensor) if op.phase == "stats" else handle

        return all_reduce

    return in_place_of(Communicator, "all_reduce", partly)


# ------------------------------------------------------------------------------------------------ counted once


def counted_once(rank: int, world: int) -> list[str]:
    """Norms missed params or counted them twice, because copies were recognised by the wrong set of ranks: expert
    params by that of the dense ones.

    Here an element is counted by the rank that holds it, by the first rank of its own domain where all of them do, and
    by the first stage where several have a copy.
    """
    for arrangement in (
        Arrangement(ep=2, layouts=("replicated",), steps=2),
        Arrangement(pp=2, tied="embedding", steps=2),
    ):
        if found := arranged(rank, world, arrangement):
            return found
    return []


@contextmanager
def _while_counting(change: Callable[[Engine], Any]) -> Iterator[None]:
    """Change what the statistics pass sees of an engine, and nobody else."""

    def changed(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: StatsPass, engine: Engine, *rest: Any, **more: Any) -> None:
            with change(engine):
                real(self, engine, *rest, **more)

        return init

    with in_place_of(StatsPass, "__init__", changed):
        yield


def dense_ranks_for_experts(rank: int) -> Any:
    return _while_counting(lambda engine: mock.patch.dict(engine.storage.ranks, {EXPERT: engine.storage.ranks[DENSE]}))


def ties_on_every_stage(rank: int) -> Any:
    return mock.patch.object(stats, "_is_first_copy", return_value=True)


# ------------------------------------------------------------------------------------------------ skipping


def skip_together(rank: int, world: int) -> list[str]:
    """Whether to skip a step was decided inside a loop over the params that a rank owns. A rank that owned none went
    on, and waited for the others in a gather for ever.

    Here the decision is a function of reduced values and of nothing else.
    """
    case = worlds.Case(model="few", options={"check_collectives": True})
    model = worlds.wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, **rules(Hyper(), skip_above=1e3))
    params = model.engine.storage.params
    found, decisions = [], []
    for step, factor in enumerate((1.0, 1e6, 1.0)):
        before = hash_everything(optimizer)
        grads = {fqn: factor * gradient(fqn, param.shape, rank, step, 0) for fqn, param in params.items()}
        deliver(model, grads, sync=True)
        optimizer.step()
        optimizer.zero_grad()
        decisions.append(optimizer.stats.skipped)
        if optimizer.stats.skipped and hash_everything(optimizer) != before:
            found.append(f"rank {rank}: the skipped step {step} changed something")
    if decisions != [False, True, False]:
        found.append(f"rank {rank}: skipped {decisions}")
    replicas = {fqn: hash_tensors([param]) for fqn, param in params.items()}
    owners = [any(bucket.spans(other) for bucket in model.plan.buckets) for other in range(world)]
    found += ["in the scene every rank owns something"] if all(owners) else []
    return found + differ_between_ranks("replicas", replicas)


def owners_decide(rank: int) -> Any:
    def local(real: Callable[..., None]) -> Callable[..., None]:
        def step(self: Stepper, live: Live) -> None:
            owns = any(shard.spans for shard in self._engine.storage.shards)
            goes_on = mock.patch.object(StepPolicy, "skip_reason", return_value="")
            with nullcontext() if owns else goes_on:
                real(self, live)

        return step

    return in_place_of(Stepper, "step", local)


CASES = (
    Case(
        name="R20",
        title="a norm group that one stage has and another has not",
        world=4,
        check=group_on_one_stage,
        mistakes=(
            Mistake(
                what="each stage finds out for itself whether a norm group exists",
                put_in=existence_by_stage,
                seen_as="ContractError: .*numel differs",
            ),
        ),
    ),
    Case(
        name="R28",
        title="every gradient is counted once",
        world=4,
        check=counted_once,
        mistakes=(
            Mistake(
                what="copies of expert params are recognised by the ranks of dense ones",
                put_in=dense_ranks_for_experts,
                seen_as="grad norm .* against",
            ),
            Mistake(
                what="a tied weight is counted on both stages",
                put_in=ties_on_every_stage,
                seen_as="grad norm .* against",
            ),
        ),
    ),
    Case(
        name="D1",
        title="the norm of a named group is that of all ranks",
        world=3,
        check=norm_over_all_ranks,
        mistakes=(
            Mistake(
                what="the norm of a named group is reduced over part of the ranks",
                put_in=group_norm_stays_local,
                seen_as="norms differ between ranks: experts",
            ),
        ),
    ),
    Case(
        name="D2",
        title="ranks that own nothing skip with the others",
        world=4,
        check=skip_together,
        mistakes=(
            Mistake(
                what="a rank that owns nothing does not skip",
                put_in=owners_decide,
                seen_as="ContractError: .*label differs",
            ),
        ),
    ),
)

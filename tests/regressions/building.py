"""From a model to its plan: every way to build it, and one route for all that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import layerwise
from layerwise.comm.joining import Ranks
from layerwise.config.schema import DataConfig, ModelConfig, ParallelConfig, TrainConfig
from layerwise.engine.engine import plan_for
from layerwise.layout import storage
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan
from layerwise.optim import optimizer as optimizer_module
from layerwise.parallel.data_parallel import DataParallel
from layerwise.routing.rules import RouteRule
from layerwise.train.loop import prepare
from tests import arrangements, worlds
from tests.arrangements import Arrangement
from tests.regressions.cases import (
    Case,
    Mistake,
    arranged,
    in_place_of,
    key_of,
)

# ------------------------------------------------------------------------------------------------ ways to build


def every_way_to_build(rank: int, world: int) -> list[str]:
    """A second way to build a model forgot to apply the layout, and trained with another one.

    Here the layout is an argument of the one constructor that all ways end in, and it is in the plan: a module, a list
    of one, the planner and the trainer.
    """
    module = worlds.Case().build()
    with torch.device("meta"):
        planned = plan_for((worlds.Zoo(),), Options(layout="padded"), world=world)
    digests = {
        "planner": planned.digest,
        "module": DataParallel(module, layout="padded").plan.digest,
        "list": DataParallel([worlds.Case().build()], layout="padded").plan.digest,
    }
    found = [] if len(set(digests.values())) == 1 else [f"plans differ: {digests}"]
    config = TrainConfig(
        model=ModelConfig(d_model=16, n_layers=1, n_heads=1, n_kv_heads=1, seq_len=8),
        data=DataConfig(path=str(Path(__file__).parent.parent.parent / "README.md")),
        parallel=ParallelConfig(layout="replicated"),
    )
    run = prepare(config, Ranks(rank=rank, world=world, local_rank=rank, device=torch.device("cpu")))
    layouts = {buffer.key.layout for buffer in run.model.plan.buffers}
    return found + (
        [] if layouts == {"replicated"} else [f"the trainer was asked for 'replicated' and has {sorted(layouts)}"]
    )


def _forgets(when: Callable[[Any], bool]) -> Any:
    def forgetful(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: DataParallel, module: Any, *, layout: str = "flat", **more: Any) -> None:
            real(self, module, layout="flat" if when(module) else layout, **more)

        return init

    return in_place_of(DataParallel, "__init__", forgetful)


def list_forgets_layout(rank: int) -> Any:
    return _forgets(lambda module: isinstance(module, list))


def trainer_forgets_layout(rank: int) -> Any:
    return _forgets(lambda module: type(module).__name__ == "GPT")


# ------------------------------------------------------------------------------------------------ routes

EXCLUDED = "square.weight"


def excluded_matrices(rank: int, world: int) -> list[str]:
    """A matrix that the user had excluded from Muon was excluded in one place and not in another: it lay in a buffer of
    matrices, where nobody updated it.

    Here one route says both, which buffer a param lies in and which rule updates it.
    """

    def also(model: DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        rule_of = {fqn: group["rule"] for group in optimizer.param_groups for fqn in group["fqns"]}
        families = {
            p.fqn: key_of(model.plan, bucket).family for bucket in model.plan.buckets for p in bucket.placements
        }
        found = [] if rule_of[EXCLUDED] == "adamw" else [f"{EXCLUDED} is updated by {rule_of[EXCLUDED]}"]
        return found + [
            f"{fqn} lies in a buffer of family {family} and is updated by {rule_of[fqn]}"
            for fqn, family in families.items()
            if (family == "matrix") != (rule_of[fqn] == "muon")
        ]

    without = {name: blocks for name, blocks in arrangements._MATRICES.items() if name != EXCLUDED}
    with mock.patch.dict(arrangements._MATRICES, without, clear=True):
        options = {"rules": [RouteRule(pattern=EXCLUDED, to="other")]}
        return arranged(rank, world, Arrangement(layouts=("padded",), steps=2, options=options), also)


def buffers_do_not_know(rank: int) -> Any:
    def unruled(real: Callable[..., Any]) -> Callable[..., Any]:
        def members_of(table: Any, routes: dict[str, Any]) -> Any:
            return real(table, {**routes, EXCLUDED: replace(routes[EXCLUDED], family="matrix")})

        return members_of

    return in_place_of(storage, "members_of", unruled)


def optimizer_does_not_know(rank: int) -> Any:
    def unruled(real: Callable[..., Any]) -> Callable[..., Any]:
        def plan_groups(plan: Plan, **rules: Any) -> Any:
            routes = {**plan.routes, EXCLUDED: replace(plan.routes[EXCLUDED], family="matrix")}
            return real(replace(plan, routes=routes), **rules)

        return plan_groups

    return in_place_of(optimizer_module, "plan_groups", unruled)


CASES = (
    Case(
        name="R26",
        title="every way to build a model applies the layout",
        world=2,
        check=every_way_to_build,
        mistakes=(
            Mistake(
                what="a list of modules forgets the layout",
                put_in=list_forgets_layout,
                seen_as="plans differ",
            ),
            Mistake(
                what="the trainer forgets the layout",
                put_in=trainer_forgets_layout,
                seen_as="the trainer was asked for 'replicated'",
            ),
        ),
    ),
    Case(
        name="R27",
        title="a matrix that is excluded from Muon",
        world=2,
        check=excluded_matrices,
        mistakes=(
            Mistake(
                what="buffers do not know of the exclusion",
                put_in=buffers_do_not_know,
                seen_as="square.weight lies in a buffer of family matrix and is updated by adamw",
            ),
            Mistake(
                what="the optimizer does not know of the exclusion",
                put_in=optimizer_does_not_know,
                seen_as="master of square.weight",
            ),
        ),
    ),
)

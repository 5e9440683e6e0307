import itertools
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.ownership import owners_of
from layerwise.layout.plan import Plan, make_plan
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of
from tests.strategies import LIGHT, MANY, worlds

names = st.lists(st.text("abcxyz.", min_size=1, max_size=4), min_size=1, max_size=24, unique=True)
sizes = st.sampled_from([1, 2, 2, 2, 3, 64])
"""Few of them: most params have a twin in size."""


@st.composite
def matrices(draw: st.DrawFn, max_ties: int = 2) -> ParamTable:
    """Linear weights of few sizes in several dtypes; some have a copy on another pipeline stage."""
    params = [
        ParamSpec(
            fqn=name,
            shape=(draw(sizes), 2),
            dtype=draw(st.sampled_from([DType.BF16, DType.FP32])),
            module_kind=ModuleKind.LINEAR,
            module_type="Linear",
        )
        for name in draw(names)
    ]
    for number in range(draw(st.integers(0, min(max_ties, len(params))))):
        params[number] = replace(params[number], tie=f"tie {number}")
    return ParamTable(tuple(params))


def owners_in(plan: Plan) -> dict[str, int]:
    """The one rank that each param lies with."""
    found = {}
    for bucket in plan.buckets:
        for rank in range(bucket.world):
            found.update({span.fqn: rank for span in bucket.spans(rank)})
    return found


@MANY
@given(matrices(max_ties=0), worlds)
def test_params_by_size_then_name_are_dealt_to_the_last_rank_and_back(table: ParamTable, world: int) -> None:
    there_and_back = itertools.cycle([*range(world), *reversed(range(world))])
    by_size = sorted(table, key=lambda param: (param.numel, param.fqn))
    expected = {param.fqn: rank for param, rank in zip(by_size, there_and_back, strict=False)}
    assert owners_of(list(table), world) == expected


@MANY
@given(matrices(), worlds, st.randoms(use_true_random=False))
def test_owners_depend_on_neither_insertion_order_nor_ties_in_size(table: ParamTable, world: int, rng: Random) -> None:
    shuffled = rng.sample(table.params, len(table))
    assert owners_of(shuffled, world) == owners_of(list(table), world)


@LIGHT
@given(matrices(), st.integers(2, 9), st.randoms(use_true_random=False), st.sampled_from([1, 64, 10_000]))
def test_owners_in_a_plan_depend_on_neither_the_order_of_params_nor_on_buckets(
    table: ParamTable, world: int, rng: Random, bucket_numel: int
) -> None:
    shuffled = ParamTable(tuple(rng.sample(table.params, len(table))))
    plan = make_plan(table, Options(layout="compact", bucket_numel=bucket_numel), world=world)
    again = make_plan(shuffled, Options(layout="compact", bucket_numel=200), world=world)
    matrices_only = {fqn for fqn, route in plan.routes.items() if route.family == "matrix"}
    expected = owners_of([param for param in table if param.fqn in matrices_only], world)
    for found in (owners_in(plan), owners_in(again)):
        assert {fqn: rank for fqn, rank in found.items() if fqn in matrices_only} == expected


@MANY
@given(matrices(), matrices(), st.integers(1, 64))
def test_a_tied_param_has_the_same_owner_among_any_others_and_under_any_name(
    one: ParamTable, other: ParamTable, world: int
) -> None:
    copies = [
        ParamSpec(fqn=fqn, shape=(3, 5), module_kind=kind, tie="embedding")
        for fqn, kind in (("the embedding", ModuleKind.EMBEDDING), ("the head", ModuleKind.LINEAR))
    ]
    first = owners_of([*one, copies[0]], world)["the embedding"]
    second = owners_of([copies[1], *other], world)["the head"]
    assert first == second
    assert 0 <= first < world


@MANY
@given(matrices(), worlds)
def test_a_tied_param_takes_no_turn_in_the_deal(table: ParamTable, world: int) -> None:
    free = [param for param in table if not param.tie]
    found = owners_of(list(table), world)
    assert {param.fqn: found[param.fqn] for param in free} == owners_of(free, world)


def test_ties_spread_over_ranks() -> None:
    params = [ParamSpec(fqn=f"w{number}", shape=(1,), tie=f"tie {number}") for number in range(200)]
    counts = Counter(owners_of(params, 4).values())
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 90


@MANY
@given(matrices(max_ties=0), worlds)
def test_ranks_own_equally_many_params_and_nearly_equally_many_elements(table: ParamTable, world: int) -> None:
    owners = owners_of(list(table), world)
    counts = Counter(owners.values())
    assert max(counts.values()) - min(counts.get(rank, 0) for rank in range(world)) <= 1
    numels = [sum(param.numel for param in table if owners[param.fqn] == rank) for rank in range(world)]
    # Of two turns, there and back, a rank gets one step up and one step down: what is left is the last turn.
    assert max(numels) - min(numels) <= 2 * max(param.numel for param in table)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_params_of_one_size_are_dealt_by_name(world: int) -> None:
    table = table_of([(f"w{number}", (8, 8)) for number in (3, 1, 2, 0)])
    assert owners_of(list(table), world)["w0"] == 0
    assert owners_of(list(table), world)["w1"] == 1

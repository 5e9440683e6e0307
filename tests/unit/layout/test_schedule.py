import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.dtypes import DType
from layerwise.layout.exchange import exchange_for
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.schedule import pipelined, wire_nbytes
from layerwise.layout.work import WorkPlan
from layerwise.routing.spec import ParamTable, table_of
from tests.strategies import LIGHT, plans


def test_cohort_two_is_on_its_way_while_cohort_one_is_computed() -> None:
    assert list(pipelined(3)) == [
        ("exchange", 0),
        ("exchange", 1),
        ("return", 0),
        ("exchange", 2),
        ("return", 1),
        ("return", 2),
    ]
    assert list(pipelined(1)) == [("exchange", 0), ("return", 0)]
    assert list(pipelined(0)) == []


@given(st.integers(0, 40))
def test_every_cohort_goes_once_and_returns_once_after_it_went(num_cohorts: int) -> None:
    order = list(pipelined(num_cohorts))
    assert Counter(order) == Counter(
        (phase, cohort) for phase in ("exchange", "return") for cohort in range(num_cohorts)
    )
    assert all(order.index(("exchange", cohort)) < order.index(("return", cohort)) for cohort in range(num_cohorts))


@LIGHT
@given(st.one_of(plans("flat"), plans("replicated")))
def test_the_schedule_reduces_then_takes_stats_then_exchanges_then_publishes(plan: Plan) -> None:
    ops = plan.schedule(stats_numel=5).ops
    phases = [op.phase for op in ops]
    rank_of = {"reduce": 0, "tie": 1, "stats": 2, "exchange": 3, "return": 3, "publish": 4}
    assert [rank_of[phase] for phase in phases] == sorted(rank_of[phase] for phase in phases)
    assert [op.label for op in ops if op.phase == "reduce"] == [bucket.label for bucket in plan.buckets]
    assert [op.label for op in ops if op.phase == "publish"] == [
        bucket.label for bucket in plan.buckets if plan.layout == "flat"
    ]
    assert phases.count("stats") == 1
    exchanges = [(op.phase, op.label) for op in ops if op.phase in ("exchange", "return")]
    expected = [
        (phase, f"{work.domain} cohort {cohort}")
        for work in plan.works
        for phase, cohort in pipelined(work.num_cohorts)
        if moves(plan, work, cohort)
    ]
    assert exchanges == expected


def moves(plan: Plan, work: WorkPlan, cohort: int) -> bool:
    """Whether any rank sends any of a cohort, from the exchange tables."""
    buckets = {bucket.index: bucket for bucket in plan.buckets}
    return any(sum(exchange_for(work, buckets, cohort, rank).send_splits) for rank in range(work.world))


def recomputed_bytes(plan: Plan, rank: int, stats_numel: int) -> dict[str, int]:
    """Bytes that a rank sends, from params, shards and exchange tables, without the schedule."""
    total: Counter[str] = Counter()
    others = plan.world - 1
    for buffer in plan.buffers:
        for bucket in buffer.buckets:
            if plan.layout == "flat":
                total["reduce_scatter"] += others * bucket.shard_numel(0) * plan.grad_dtype.itemsize
                total["all_gather"] += others * bucket.shard_numel(0) * buffer.key.dtype.itemsize
            if bucket.tie:  # two stages: each sends half of its shard's sum and half of its result
                total["all_reduce"] += bucket.shard_numel(0) * 4
            if plan.layout != "flat":
                total["all_reduce"] += 2 * (bucket.numel * plan.grad_dtype.itemsize * others // plan.world)
    total["all_reduce"] += 2 * (stats_numel * 8 * others // plan.world)
    buckets = {bucket.index: bucket for bucket in plan.buckets}
    for work in plan.works:
        for cohort in range(work.num_cohorts):
            table = exchange_for(work, buckets, cohort, rank)
            total["all_to_all"] += 2 * (sum(table.send_splits) + sum(table.receive_splits))
    return dict(total)


@LIGHT
@given(st.one_of(plans("flat"), plans("replicated")))
def test_bytes_by_collective_equal_an_independent_count(plan: Plan) -> None:
    schedule = plan.schedule(stats_numel=7)
    for rank in range(plan.world):
        found = schedule.bytes_by_collective(rank)
        expected = recomputed_bytes(plan, rank, 7)
        assert {kind: nbytes for kind, nbytes in found.items() if nbytes} == {
            kind: nbytes for kind, nbytes in expected.items() if nbytes
        }


def test_bytes_of_a_hand_computed_plan() -> None:
    # Two (8, 16) bf16 matrices: one bucket of 256 elements over two ranks, each the owner and home of one matrix.
    plan = make_plan(table_of([("a", (8, 16)), ("b", (8, 16))]), world=2, layout="flat")
    assert plan.schedule(stats_numel=4).bytes_by_collective(0) == {
        "reduce_scatter": 128 * 4,
        "all_reduce": 2 * 4 * 8 // 2,
        "all_gather": 128 * 2,
    }


@LIGHT
@given(plans())
def test_a_world_of_one_sends_nothing(plan: Plan) -> None:
    untied = ParamTable(tuple(replace(param, tie="") for param in plan.table))
    alone = make_plan(untied, world=1, layout="flat", bucket_numel=300)
    assert set(alone.schedule(stats_numel=9).bytes_by_collective(0).values()) <= {0}


@LIGHT
@given(plans())
def test_the_wire_dtype_of_a_cohort_scales_its_bytes_only(plan: Plan) -> None:
    wide = {(work.domain, cohort): DType.FP32 for work in plan.works for cohort in range(work.num_cohorts)}
    bf16, fp32 = plan.schedule(stats_numel=3), plan.schedule(stats_numel=3, wire_dtypes=wide)
    for rank in range(plan.world):
        before, after = bf16.bytes_by_collective(rank), fp32.bytes_by_collective(rank)
        assert after.pop("all_to_all", 0) == 2 * before.pop("all_to_all", 0)
        assert after == before


@LIGHT
@given(plans())
def test_every_byte_sent_to_a_home_comes_back(plan: Plan) -> None:
    ops = plan.schedule(stats_numel=1).ops
    by_label = {(op.phase, op.label): op for op in ops}
    for (phase, label), op in by_label.items():
        if phase == "exchange":
            assert op.numel == sum(op.sent) == by_label["return", label].numel


def test_an_op_is_found_by_phase_and_label() -> None:
    schedule = make_plan(table_of([("a", (8, 16))]), world=2, layout="flat").schedule(stats_numel=4)
    stats, publish = schedule.find("stats", "stats"), schedule.find("publish", "bucket 0")
    assert stats is not None and stats.dtype is DType.FP64
    assert publish is not None and publish.kind == "all_gather"
    assert schedule.find("publish", "bucket 1") is None


@pytest.mark.parametrize(
    ("kind", "expected"), [("reduce_scatter", 75), ("all_gather", 75), ("all_reduce", 150), ("broadcast", 100)]
)
def test_wire_bytes_follow_the_bandwidth_optimal_algorithm(kind: str, expected: int) -> None:
    assert wire_nbytes(kind, 100, 4) == expected  # type: ignore[arg-type]
    assert wire_nbytes(kind, 100, 1) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["all_to_all", "uneven_all_gather"])
def test_where_ranks_send_different_amounts_there_is_no_total_to_count_from(kind: str) -> None:
    with pytest.raises(ValueError, match=f"ranks send different amounts in {kind}: each op lists them."):
        wire_nbytes(kind, 100, 4)  # type: ignore[arg-type]


def test_ops_are_the_same_on_every_rank_and_only_their_bytes_differ() -> None:
    plan = make_plan(table_of([(name, (24, 24)) for name in "abc"]), world=4, layout="flat")
    ops = plan.schedule(stats_numel=2).ops
    sent = {op.label: op.sent for op in ops if op.phase == "exchange"}
    assert list(sent) == ["dense cohort 0"]
    assert [op.nbytes(rank) for op in ops if op.phase == "exchange" for rank in range(4)] == [
        2 * numel for numel in itertools.chain(*sent.values())
    ]

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config.layouts import LAYOUTS
from layerwise.dtypes import DType
from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.exchange import exchange_for
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.schedule import staggered, wire_nbytes
from layerwise.layout.storage import REDUCERS, Reducer
from layerwise.layout.work import WorkPlan
from layerwise.routing.spec import ParamTable, table_of
from tests.strategies import LIGHT, plans, tables


def test_cohort_two_is_on_its_way_while_cohort_one_is_computed() -> None:
    assert list(staggered(3)) == [
        ("exchange", 0),
        ("exchange", 1),
        ("return", 0),
        ("exchange", 2),
        ("return", 1),
        ("return", 2),
    ]
    assert list(staggered(1)) == [("exchange", 0), ("return", 0)]
    assert list(staggered(0)) == []


@given(st.integers(0, 40))
def test_every_cohort_goes_once_and_returns_once_after_it_went(num_cohorts: int) -> None:
    order = list(staggered(num_cohorts))
    assert Counter(order) == Counter(
        (phase, cohort) for phase in ("exchange", "return") for cohort in range(num_cohorts)
    )
    assert all(order.index(("exchange", cohort)) < order.index(("return", cohort)) for cohort in range(num_cohorts))


@LIGHT
@given(plans())
def test_the_schedule_reduces_then_takes_stats_then_exchanges_then_publishes(plan: Plan) -> None:
    ops = plan.schedule(stats_numel=5).ops
    phases = [op.phase for op in ops]
    rank_of = {"reduce": 0, "tie": 1, "stats": 2, "exchange": 3, "return": 3, "publish": 4}
    assert [rank_of[phase] for phase in phases] == sorted(rank_of[phase] for phase in phases)
    assert [op.label for op in ops if op.phase == "reduce"] == [bucket.label for bucket in plan.buckets]
    assert [op.label for op in ops if op.phase == "tie"] == sorted(
        f"tie {bucket.tie!r}" for bucket in plan.buckets if bucket.tie
    )
    assert [op.label for op in ops if op.phase == "publish"] == [
        bucket.label for bucket in reversed(plan.buckets) if plan.options.layout != "replicated"
    ]
    assert phases.count("stats") == 1
    exchanges = [(op.phase, op.label) for op in ops if op.phase in ("exchange", "return")]
    expected = [
        (phase, f"{work.domain} cohort {cohort}")
        for work in plan.works
        for phase, cohort in staggered(work.num_cohorts)
        if moves(plan, work, cohort)[phase]
    ]
    assert exchanges == expected


def moves(plan: Plan, work: WorkPlan, cohort: int) -> dict[str, bool]:
    """Whether any rank sends any of a cohort, there and back, from the exchange tables."""
    shards = {shard.index: shard for shard in plan.shards}
    tables = [exchange_for(work, shards, cohort, rank) for rank in range(work.world)]
    there = any(sum(table.there.send_splits) for table in tables)
    back = any(sum(table.back.send_splits) for table in tables)
    assert back or not there  # what went somewhere comes back; where all have copies of all, it only comes back
    return {"exchange": there, "return": back}


@dataclass(frozen=True)
class Recount:
    """What one rank sends in a step, from params, spans and exchange tables, without the schedule.

    `ranks` is its number in every domain. Kinds of collectives are written down again, by layout and by what was asked
    for.
    """

    plan: Plan
    ranks: dict[str, int]
    stages: int = 2

    def bytes_by_collective(self, stats_numel: int) -> dict[str, int]:
        total: Counter[str] = Counter()
        for buffer in self.plan.buffers:
            for bucket in buffer.buckets:
                total.update(self.reduced(buffer, bucket))
                total.update(self.published(buffer, bucket))
                if bucket.tie:  # a ring over stages: each sends its shard of the sum, and of the result
                    mine = self.shard_numels(bucket)[self.ranks[bucket.domain]]
                    total["all_reduce"] += 2 * (mine * 4 * (self.stages - 1) // self.stages)
        total["all_reduce"] += 2 * (stats_numel * 8 * (self.plan.ranks - 1) // self.plan.ranks)
        shards = {shard.index: shard for shard in self.plan.shards}
        for work in self.plan.works:
            for cohort in range(work.num_cohorts):
                table = exchange_for(work, shards, cohort, self.ranks[work.domain])
                total["all_to_all"] += 2 * (sum(table.there.send_splits) + sum(table.back.send_splits))
        return {kind: nbytes for kind, nbytes in total.items() if nbytes}

    def shard_numels(self, bucket: BucketPlan) -> list[int]:
        """Elements that each rank of the domain holds, padding included."""
        edges = [bucket.shards.start(rank) for rank in range(bucket.world)]
        if self.plan.buffers[bucket.buffer].key.layout == "replicated":
            assert edges == [0] * bucket.world
            return [bucket.numel] * bucket.world
        return [stop - start for start, stop in itertools.pairwise([*edges, bucket.numel])]

    def reduced(self, buffer: BufferPlan, bucket: BucketPlan) -> dict[str, int]:
        world, size = bucket.world, self.plan.grad_dtype.itemsize
        if self.plan.options.reducer != "collective":
            return {"all_to_all": (bucket.numel - self.shard_numels(bucket)[self.ranks[bucket.domain]]) * size}
        if buffer.key.layout in ("compact", "replicated"):
            return {"all_reduce": 2 * (bucket.numel * size * (world - 1) // world)}
        return {"reduce_scatter": (world - 1) * (bucket.numel // world) * size}

    def published(self, buffer: BufferPlan, bucket: BucketPlan) -> dict[str, int]:
        world, size, numels = bucket.world, buffer.key.dtype.itemsize, self.shard_numels(bucket)
        if buffer.key.layout == "replicated" or world == 1:
            return {}
        if buffer.key.layout == "compact":
            successor = (self.ranks[bucket.domain] + 1) % world
            return {"uneven_all_gather": (sum(numels) - numels[successor]) * size}
        return {"all_gather": (world - 1) * numels[0] * size}


@LIGHT
@given(plans(), st.integers(0, 5))
def test_bytes_by_collective_equal_an_independent_count(plan: Plan, stats_numel: int) -> None:
    schedule = plan.schedule(stats_numel=stats_numel)
    for rank in range(plan.world):
        # Ranks with the same experts are those at the same place among the others.
        ranks = {domain: rank % world for domain, world in plan.world_by_domain.items()}
        found = schedule.bytes_by_collective(ranks)
        expected = Recount(plan, ranks).bytes_by_collective(stats_numel)
        assert {kind: nbytes for kind, nbytes in found.items() if nbytes} == expected


@LIGHT
@given(tables(), st.sampled_from([2, 3, 4]), st.sampled_from(LAYOUTS), st.integers(2, 4))
def test_stages_of_a_pipeline_count_in_the_stats_and_in_the_sums_of_ties(
    table: ParamTable, world: int, layout: str, stages: int
) -> None:
    ties = {param.tie: stages for param in table if param.tie}
    plan = make_plan(
        table,
        Options(layout=layout, bucket_numel=300, cohort_numel=100),
        world=world,
        ranks=stages * world,
        stages_by_tie=ties,
    )
    for rank in range(world):
        ranks = dict.fromkeys(plan.world_by_domain, rank)
        found = plan.schedule(stats_numel=6).bytes_by_collective(ranks)
        expected = Recount(plan, ranks, stages).bytes_by_collective(6)
        assert {kind: nbytes for kind, nbytes in found.items() if nbytes} == expected


@LIGHT
@given(plans(), st.integers(1, 4))
def test_rounds_repeat_the_reductions_and_nothing_else(plan: Plan, rounds: int) -> None:
    schedule = plan.schedule(stats_numel=3)
    ranks = dict.fromkeys(plan.world_by_domain, 0)
    once, often = schedule.bytes_by_collective(ranks), schedule.bytes_by_collective(ranks, rounds)
    reduced: Counter[str] = Counter()
    for op in schedule.ops:
        if op.phase == "reduce":
            reduced[op.kind] += op.nbytes(0)
    assert often == {kind: nbytes + (rounds - 1) * reduced[kind] for kind, nbytes in once.items()}


@LIGHT
@given(plans())
def test_every_op_names_its_domain_and_lists_one_amount_for_each_of_its_ranks(plan: Plan) -> None:
    for op in plan.schedule(stats_numel=3).ops:
        if op.phase == "stats":
            assert (op.domain, op.world, op.sent) == ("", plan.ranks, ())
            continue
        members = plan.world_by_domain[op.domain]
        assert op.world == (members if op.phase != "tie" else 2)
        assert len(op.sent) in ((members,) if op.kind in ("all_to_all", "uneven_all_gather") else (0, members))


STATS = 2 * 4 * 8 // 2
# Two (8, 16) bf16 matrices: one bucket of 256 elements over two ranks, each the owner and home of one matrix.
BY_HAND: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "flat": ({}, {"reduce_scatter": 128 * 4, "all_reduce": STATS, "all_gather": 128 * 2}),
    "padded": ({}, {"reduce_scatter": 128 * 4, "all_reduce": STATS, "all_gather": 128 * 2}),
    "compact": ({}, {"all_reduce": 256 * 4 + STATS, "uneven_all_gather": 128 * 2}),
    "replicated": ({}, {"all_reduce": 256 * 4 + STATS}),
    "flat, ordered": (
        {"reducer": "ordered"},
        {"all_to_all": 128 * 4, "all_reduce": STATS, "all_gather": 128 * 2},
    ),
    "compact, ordered in bf16": (
        {"reducer": "ordered", "grad_dtype": DType.BF16},
        {"all_to_all": 128 * 2, "all_reduce": STATS, "uneven_all_gather": 128 * 2},
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes_of_a_hand_computed_plan(name: str) -> None:
    options, expected = BY_HAND[name]
    table = table_of([("a", (8, 16)), ("b", (8, 16))])
    plan = make_plan(table, Options(layout=name.split(",")[0], **options), world=2)  # type: ignore[arg-type]
    assert plan.schedule(stats_numel=4).bytes_by_collective(0) == expected


def test_bytes_of_uneven_shards_are_all_but_the_successors() -> None:
    # Sizes 64, 128, 192 go to ranks 0, 1, 2: in a ring a rank never sends its successor what that one owns.
    plan = make_plan(table_of([("a", (4, 16)), ("b", (8, 16)), ("c", (12, 16))]), Options(layout="compact"), world=3)
    publish = plan.schedule(stats_numel=0).find("publish", "bucket 0")
    assert publish is not None
    assert [publish.nbytes(rank) for rank in range(3)] == [2 * (384 - 128), 2 * (384 - 192), 2 * (384 - 64)]


@LIGHT
@given(tables(), st.sampled_from(LAYOUTS), st.sampled_from(REDUCERS))
def test_a_world_of_one_sends_nothing(table: ParamTable, layout: str, reducer: Reducer) -> None:
    untied = ParamTable(tuple(replace(param, tie="") for param in table))
    alone = make_plan(untied, Options(layout=layout, reducer=reducer, bucket_numel=300), world=1)
    assert set(alone.schedule(stats_numel=9).bytes_by_collective(0).values()) <= {0}


@LIGHT
@given(plans())
def test_the_wire_dtype_of_a_cohort_scales_its_bytes_only(plan: Plan) -> None:
    wide = {(work.domain, cohort): DType.FP32 for work in plan.works for cohort in range(work.num_cohorts)}
    bf16, fp32 = plan.schedule(stats_numel=3), plan.schedule(stats_numel=3, wire_dtypes=wide)
    for rank in range(plan.world):
        ranks = {domain: rank % world for domain, world in plan.world_by_domain.items()}
        before, after = bf16.bytes_by_collective(ranks), fp32.bytes_by_collective(ranks)
        moved = sum(op.nbytes(ranks[op.domain]) for op in bf16.ops if op.phase in ("exchange", "return"))
        assert after == before | ({"all_to_all": before["all_to_all"] + moved} if moved else {})


@LIGHT
@given(plans())
def test_every_byte_sent_to_a_home_comes_back(plan: Plan) -> None:
    ops = plan.schedule(stats_numel=1).ops
    by_label = {(op.phase, op.label): op for op in ops}
    for (phase, label), op in by_label.items():
        if phase == "exchange":
            assert op.numel == sum(op.sent) == by_label["return", label].numel


def test_an_op_is_found_by_phase_and_label() -> None:
    schedule = make_plan(table_of([("a", (8, 16))]), Options(layout="flat"), world=2).schedule(stats_numel=4)
    stats, publish = schedule.find("stats", "stats"), schedule.find("publish", "bucket 0")
    assert stats is not None
    assert stats.dtype is DType.FP64
    assert publish is not None
    assert publish.kind == "all_gather"
    assert schedule.find("publish", "bucket 1") is None


@pytest.mark.parametrize(("kind", "expected"), [("reduce_scatter", 75), ("all_gather", 75), ("all_reduce", 150)])
def test_wire_bytes_follow_the_bandwidth_optimal_algorithm(kind: str, expected: int) -> None:
    assert wire_nbytes(kind, 100, 4) == expected  # type: ignore[arg-type]
    assert wire_nbytes(kind, 100, 1) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["all_to_all", "uneven_all_gather"])
def test_where_ranks_send_different_amounts_there_is_no_total_to_count_from(kind: str) -> None:
    with pytest.raises(ValueError, match=f"ranks send different amounts in {kind}: each op lists them."):
        wire_nbytes(kind, 100, 4)  # type: ignore[arg-type]


def test_ops_are_the_same_on_every_rank_and_only_their_bytes_differ() -> None:
    plan = make_plan(table_of([(name, (24, 24)) for name in "abc"]), Options(layout="flat"), world=4)
    ops = plan.schedule(stats_numel=2).ops
    sent = {op.label: op.sent for op in ops if op.phase == "exchange"}
    assert list(sent) == ["dense cohort 0"]
    assert [op.nbytes(rank) for op in ops if op.phase == "exchange" for rank in range(4)] == [
        2 * numel for numel in itertools.chain(*sent.values())
    ]

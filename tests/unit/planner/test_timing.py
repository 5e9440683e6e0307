"""Times of a plan: FLOPs and bytes over what the hardware does, by hand and added up slowly."""

from __future__ import annotations

import pytest

from benchmarks.layouts import figures
from layerwise.config.layouts import LAYOUTS
from layerwise.config.rules import AdamW, Muon
from layerwise.layout.cost import Hardware, NewtonSchulz
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.planner.presets import preset
from layerwise.planner.report import Setting, compare
from layerwise.planner.rules import Rules, schedule_for
from layerwise.planner.timing import numbers_of, sent_by_rank, traffic_of, work_of
from layerwise.routing.spec import table_of
from tests.worlds import MIXED

RULES = Rules()
UNIT = Hardware(ns_tflops=1e-9, link_gb_s=1e-6)
"""One FLOP and one byte a millisecond."""


def test_newton_schulz_by_hand() -> None:
    """Three equal matrices on two ranks. Five steps, each three products of 64 x 64 x 64, two FLOPs a multiply-add."""
    table = table_of([(f"{name}.weight", (64, 64)) for name in "abc"])
    plan = make_plan(table, Options(layout="flat", hardware=UNIT), world=2)
    work = work_of(plan, RULES)
    one = 5 * 3 * 2 * 64**3
    assert (work.ms, work.idle_ranks) == (pytest.approx(2 * one), 0)
    assert work.imbalance == pytest.approx(4 / 3)
    quick = make_plan(table, Options(layout="flat", hardware=Hardware(ns_tflops=2e-9)), world=2)
    assert work_of(quick, RULES).ms == pytest.approx(one)


def test_ranks_without_a_matrix_are_idle() -> None:
    plan = make_plan(table_of([("a.weight", (64, 64))]), Options(layout="flat", hardware=UNIT), world=8)
    work = work_of(plan, RULES)
    assert (work.idle_ranks, work.imbalance) == (7, 8.0)


def test_everybody_does_everything_where_nothing_is_sharded() -> None:
    plan = make_plan(preset("gpt2"), Options(layout="replicated", hardware=UNIT), world=8)
    alone = make_plan(preset("gpt2"), Options(layout="flat", hardware=UNIT), world=1)
    assert work_of(plan, RULES) == work_of(alone, RULES)


def test_an_elementwise_rule_orthogonalises_nothing() -> None:
    work = work_of(make_plan(preset("gpt2"), world=8), Rules(matrix=AdamW(lr=0.0)))
    assert (work.ms, work.imbalance, work.idle_ranks) == (0.0, 1.0, 0)


@pytest.mark.parametrize("rule", [Muon(lr=0.0), Muon(lr=0.0, steps=3)])
@pytest.mark.parametrize(("model", "experts"), [("gpt2", 1), ("qwen3-30b-a3b", 8)])
def test_the_plan_its_description_the_benchmark_and_the_comparison_have_one_imbalance(
    model: str, experts: int, rule: Muon
) -> None:
    table = preset(model, expert_parallel=experts)
    setting = Setting(world=64, rules=Rules(matrix=rule))
    compared = compare(table, setting, ["flat", "padded", "compact"])
    for column, layout in zip(compared.columns, ("flat", "padded", "compact"), strict=False):
        options = Options(layout=layout, cost=NewtonSchulz(steps=rule.steps))
        plan = make_plan(table, options, world=64)
        assert column.work.imbalance == plan.imbalance
        assert figures(plan)["imbalance"] == round(plan.imbalance, 4)
        last = plan.describe().splitlines()[-1]
        assert f"imbalance {plan.imbalance:.2f}" in last


def test_bytes_by_hand() -> None:
    """Two ranks, one matrix each, both where they are needed: half of the gradients in fp32, half of the params in bf16."""
    plan = make_plan(
        table_of([("a.weight", (64, 64)), ("b.weight", (64, 64))]), Options(layout="flat", hardware=UNIT), world=2
    )
    schedule = schedule_for(plan, RULES)
    traffic = traffic_of(plan, schedule)
    stats = (10 + 3 * 2) * 8
    assert traffic.nbytes_by_kind == {"reduce_scatter": 4096 * 4, "all_gather": 4096 * 2, "all_reduce": stats}
    assert traffic.ms_by_phase == pytest.approx({"reduce": 4096 * 4, "stats": stats, "publish": 4096 * 2})
    assert traffic.ms == pytest.approx(traffic.nbytes) == pytest.approx(4096 * 6 + stats)
    # One bucket is reduced when backward is over: there is nothing behind which to hide it.
    assert traffic.waited_ms == pytest.approx(traffic.ms)


def test_reductions_hide_behind_backward() -> None:
    shapes = [(f"{number}.weight", (64, 64)) for number in range(10)]
    elementwise = Rules(matrix=AdamW(lr=0.0))  # nothing is exchanged
    one, many = (
        traffic_of(plan, schedule_for(plan, elementwise))
        for plan in (
            make_plan(table_of(shapes), Options(layout="flat", bucket_numel=numel, hardware=UNIT), world=2)
            for numel in (10**9, 64 * 64)
        )
    )
    assert one.nbytes == many.nbytes
    assert one.waited_ms - many.waited_ms == pytest.approx(9 * 64 * 64 * 4 / 2)


def every_plan() -> list[Plan]:
    return [
        make_plan(
            preset(name, expert_parallel=experts),
            Options(layout=layout, hardware=UNIT),
            world=world,
            worlds={"expert": world // experts},
        )
        for name, experts, world in (("gpt2", 1, 6), ("qwen3-30b-a3b", 4, 12))
        for layout in (*LAYOUTS, MIXED["mixed others"])
    ]


def test_the_rank_that_sends_most_is_found() -> None:
    for plan in every_plan():
        schedule = schedule_for(plan, RULES)
        by_rank = []
        for rank in range(plan.world):
            total = 0
            for op in schedule.ops:
                size = plan.world_by_domain.get(op.domain, plan.world)
                total += op.nbytes(rank // (plan.world // size))
            by_rank.append(total)
        assert sent_by_rank(schedule.ops, plan.world) == by_rank
        traffic = traffic_of(plan, schedule)
        assert traffic.nbytes == max(by_rank) == by_rank[traffic.rank]
        assert sum(traffic.nbytes_by_kind.values()) == traffic.nbytes
        assert sum(traffic.ms_by_phase.values()) == pytest.approx(traffic.ms)
        assert 0 < traffic.waited_ms <= 1.0001 * traffic.ms


def test_neighbours_hold_different_experts() -> None:
    plan = make_plan(
        preset("qwen3-30b-a3b", expert_parallel=4),
        Options(layout="flat", hardware=UNIT),
        world=12,
        worlds={"expert": 3},
    )
    assert [numbers_of(plan, rank)["expert"] for rank in range(12)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert numbers_of(plan, 7)["dense"] == 7

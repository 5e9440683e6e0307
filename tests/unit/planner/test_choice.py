from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config.layouts import Layout
from layerwise.dtypes import DType
from layerwise.layout.cost import Hardware, newton_schulz_flops, resolve_method
from layerwise.layout.options import Options
from layerwise.layout.plan import compare_plans, make_plan
from layerwise.planner.choice import CANDIDATES, Choice, Score, best_layouts, pick, score
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of
from tests.strategies import LIGHT, MANY, divisors, tables


def scored(layout: str, ms: float, nbytes: int) -> Score:
    figures = {"wire_nbytes": 0, "exposed_nbytes": 0, "memory_nbytes": nbytes, "imbalance": 1.0}
    return Score(layout=layout, **figures, wire_ms=ms, ns_ms=0.0)  # type: ignore[arg-type]


PICKS: dict[str, tuple[list[Score], str, str]] = {
    "much quicker": ([scored("flat", 10, 100), scored("padded", 5, 100)], "padded", "the quickest: padded 5.0 ms"),
    "as quick, leaner": (
        [scored("flat", 10, 100), scored("compact", 10.1, 99)],
        "compact",
        "as quick as any and leanest: compact",
    ),
    "quicker by too little to tell": (
        [scored("flat", 10, 99), scored("padded", 9.9, 100)],
        "flat",
        "as quick as any and leanest: flat",
    ),
    "quicker, wasteful": (
        [scored("flat", 10, 100), scored("padded", 5, 111)],
        "flat",
        "the quickest that does not waste memory: flat",
    ),
    "quicker, a little larger": (
        [scored("flat", 10, 100), scored("padded", 5, 110)],
        "padded",
        "the quickest: padded",
    ),
    "equal in all": ([scored("flat", 10, 100), scored("padded", 10, 100)], "flat", "as quick as any and leanest: flat"),
    "alone": ([scored("flat", 10, 100)], "flat", "the quickest"),
}


@pytest.mark.parametrize("name", PICKS)
def test_quick_comes_first_then_lean_and_the_reason_says_which(name: str) -> None:
    scores, layout, reason = PICKS[name]
    chosen, why = pick(scores)
    assert chosen.layout == layout
    assert why.startswith(reason)
    assert all(other.describe() in why for other in scores if other is not chosen)


score_lists = st.lists(
    st.builds(scored, st.sampled_from(CANDIDATES), st.floats(0.1, 100), st.integers(1, 1000)),
    min_size=1,
    max_size=6,
)


@MANY
@given(score_lists)
def test_no_score_that_was_passed_over_is_both_lean_and_clearly_better(scores: list[Score]) -> None:
    chosen, _ = pick(scores)
    leanest = min(other.memory_nbytes for other in scores)
    assert chosen.memory_nbytes <= 1.1 * leanest
    for other in scores:
        if other.memory_nbytes <= 1.1 * leanest:
            assert chosen.total_ms <= 1.02 * other.total_ms
            assert other.total_ms > chosen.total_ms or other.memory_nbytes >= chosen.memory_nbytes


@LIGHT
@given(tables(), st.sampled_from([1, 2, 3, 4, 8]), st.data())
def test_every_domain_with_matrices_on_several_ranks_has_a_best_layout(
    table: ParamTable, world: int, data: st.DataObject
) -> None:
    experts = data.draw(st.sampled_from(divisors(world)))
    options = Options(bucket_numel=300, cohort_numel=200)
    plans = compare_plans(table, [*CANDIDATES, "replicated"], options, world=world, worlds={"expert": experts})
    domains = [work.domain for work in plans["flat"].works if work.world > 1]
    choices = best_layouts(plans)
    assert [choice.buffer for choice in choices] == [f"{domain}/matrix" for domain in domains]
    for choice in choices:
        assert [found.layout for found in choice.scores] == list(CANDIDATES)
        assert (choice.layout, choice.reason) == (pick(choice.scores)[0].layout, pick(choice.scores)[1])
    # What the choices name can be asked for: the library takes it as a layout.
    mapping = {choice.buffer: choice.layout for choice in choices}
    mixture = make_plan(table, replace(options, layout=mapping), world=world, worlds={"expert": experts})
    for buffer in mixture.buffers:
        assert buffer.key.layout == mapping.get(f"{buffer.key.domain}/{buffer.key.family}", "flat")


def test_one_candidate_alone_is_not_called_the_best() -> None:
    plans = compare_plans(table_of([("a.weight", (8, 8))]), ["flat", "replicated"], world=2)
    assert best_layouts(plans) == ()


matrix_tables = st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=12).map(
    lambda shapes: table_of([(f"w{number:02d}", shape) for number, shape in enumerate(shapes)])
)


@LIGHT
@given(
    matrix_tables,
    st.integers(2, 8),
    st.sampled_from(CANDIDATES),
    st.sampled_from([DType.FP32, DType.BF16]),
    st.sampled_from([DType.FP32, DType.BF16]),
)
def test_a_score_counts_bytes_flops_and_memory_of_the_rank_for_which_they_are_worst(
    table: ParamTable, world: int, layout: Layout, dtype: DType, grad_dtype: DType
) -> None:
    typed = ParamTable(tuple(replace(param, dtype=dtype) for param in table))
    plan = make_plan(
        typed,
        Options(
            layout=layout,
            bucket_numel=500,
            cohort_numel=100,
            grad_dtype=grad_dtype,
            hardware=Hardware(ns_tflops=2.0, link_gb_s=4.0),
        ),
        world=world,
    )
    found = score(layout, plan, "dense")
    schedule = plan.schedule(stats_numel=0)
    reduced = max(sum(op.nbytes(rank) for op in schedule.ops if op.phase == "reduce") for rank in range(world))
    rest = max(sum(op.nbytes(rank) for op in schedule.ops if op.phase != "reduce") for rank in range(world))
    assert found.wire_nbytes == reduced + rest
    # Backward makes a bucket's gradients in the time in which a reduce-scatter of them would take; what the wire has not
    # reduced when it ends is waited for.
    made = done = 0
    for bucket in plan.buckets:
        (op,) = (op for op in schedule.ops if op.phase == "reduce" and op.label == bucket.label)
        made += sum(placement.numel for placement in bucket.placements) * grad_dtype.itemsize * (world - 1) // world
        done = max(done, made) + max(op.nbytes(rank) for rank in range(world))
    assert found.exposed_nbytes == done - made
    assert found.wire_ms == pytest.approx((done - made + rest) / 4e9 * 1e3)

    (work,) = plan.works
    flops = [0] * world
    for item in work.items:
        rows, cols = item.matrix.rows, item.matrix.cols
        gram = resolve_method("auto", rows, cols) == "gram"
        for home in item.homes:
            flops[home] += newton_schulz_flops(rows, cols, 5, gram=gram)
    assert found.ns_ms == pytest.approx(max(flops) / 2e12 * 1e3)
    assert found.imbalance == pytest.approx(max(flops) * world / sum(flops))

    held = []
    for rank in range(world):
        everywhere = sum(bucket.numel * (dtype.itemsize + grad_dtype.itemsize) for bucket in plan.buckets)
        mine = sum(bucket.shard_numel(rank) for bucket in plan.buckets)
        master = 4 if dtype is DType.BF16 else 0  # fp32 params are their own masters
        widened = 4 if grad_dtype is DType.BF16 else 0  # the averaged gradient is fp32
        held.append(everywhere + mine * (master + widened + 4))
    assert found.memory_nbytes == max(held)


def test_matrices_that_every_rank_computes_count_on_every_rank() -> None:
    (work,) = make_plan(table_of([("a", (8, 8)), ("b", (8, 8))]), Options(layout="replicated"), world=3).works
    assert [list(item.homes) for item in work.items] == [[0, 1, 2]] * 2
    one = newton_schulz_flops(8, 8, 5, gram=False)
    assert work.loads == (2 * one,) * 3


def test_with_fast_links_and_slow_products_balance_decides() -> None:
    # Eight experts in one param: where params stay whole one rank of four computes all of them.
    experts = ParamSpec(
        fqn="e", shape=(8, 64, 64), dtype=DType.BF16, module_kind=ModuleKind.OTHER, module_type="Experts"
    )
    table = ParamTable((experts,))
    slow_products = Hardware(ns_tflops=0.001, link_gb_s=1000.0)
    slow_links = Hardware(ns_tflops=1000.0, link_gb_s=0.001)

    def best(hardware: Hardware) -> Choice:
        (choice,) = best_layouts(compare_plans(table, CANDIDATES, Options(hardware=hardware), world=4))
        return choice

    balanced = best(slow_products)
    assert balanced.layout == "flat"
    by_layout = {found.layout: found for found in balanced.scores}
    assert by_layout["flat"].imbalance == 1.0
    assert by_layout["compact"].imbalance == 4.0
    near = best(slow_links)
    assert near.layout in ("flat", "compact")
    assert {found.layout: found.wire_nbytes for found in near.scores} == {
        found.layout: found.wire_nbytes for found in balanced.scores
    }

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from layerwise.layout import work as work_module
from layerwise.layout.cost import NewtonSchulz
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.shards import ShardPlan
from layerwise.layout.storage import plan_storage
from layerwise.layout.work import WorkItem, WorkPlan, plan_work
from layerwise.routing.rules import route_params
from layerwise.routing.spec import ParamTable, table_of
from tests.strategies import LIGHT, MANY, Worked, plans, worked


def cost_of(work: WorkPlan) -> list[int]:
    return [work.cost.flops(item.matrix.rows, item.matrix.cols) for item in work.items]


def home_of(item: WorkItem) -> int:
    """The one home of a matrix."""
    (home,) = item.homes
    return home


def held_by_rank(plan: ShardPlan, item: WorkItem) -> dict[int, int]:
    """How much of a matrix each rank holds, as the shard plan says it."""
    return {rank: numel for first, stop, numel, step in plan.holders(item.matrix) for rank in range(first, stop, step)}


@LIGHT
@given(plans())
def test_every_matrix_has_one_home_or_all_ranks_where_all_hold_it(plan: Plan) -> None:
    expected = Counter(matrix.label for route in plan.routes.values() for matrix in route.matrices)
    assert Counter(item.matrix.label for work in plan.works for item in work.items) == expected
    assert set(expected.values()) <= {1}
    for work in plan.works:
        assert work.world == plan.world_by_domain[work.domain]
        everywhere = work.world == 1 or plan.options.layout == "replicated"
        for item in work.items:
            assert len(item.homes) == (work.world if everywhere else 1)
            assert set(item.homes) <= set(range(work.world))


@LIGHT
@given(plans("replicated"))
def test_a_matrix_that_every_rank_holds_is_at_home_everywhere_and_counts_on_each(plan: Plan) -> None:
    for work in plan.works:
        assert {tuple(item.homes) for item in work.items} == {tuple(range(work.world))}
        assert work.loads == (sum(cost_of(work)),) * work.world
        assert work.imbalance == 1.0


@LIGHT
@given(plans())
def test_loads_are_the_costs_of_what_each_rank_is_home_to(plan: Plan) -> None:
    for work in plan.works:
        loads = [0] * work.world
        for item, cost in zip(work.items, cost_of(work), strict=True):
            for rank in item.homes:
                loads[rank] += cost
        assert work.loads == tuple(loads)
        assert work.imbalance == pytest.approx(max(loads) * work.world / sum(loads))


@LIGHT
@given(worked())
def test_items_lie_where_the_storage_plan_put_them(case: Worked) -> None:
    for item in case.work.items:
        plan = case.by_index[item.shard]
        assert item.matrix.fqn in plan.fqns
        held = held_by_rank(plan, item)
        copies = plan.world if case.is_copied else 1
        assert sum(held.values()) == item.matrix.numel * copies
        assert set(held) <= set(plan.ranks_of(item.matrix)) <= set(range(plan.world))


@MANY
@given(st.lists(st.tuples(st.integers(2, 40), st.integers(2, 40)), min_size=1, max_size=30), st.integers(2, 12))
def test_the_busiest_rank_is_within_grahams_bound(shapes: list[tuple[int, int]], world: int) -> None:
    work = make_plan(
        table_of([(f"w{n}", shape) for n, shape in enumerate(shapes)]), Options(layout="flat"), world=world
    ).works[0]
    mean = Fraction(sum(work.loads), world)
    busiest = max(work.loads)
    # The last matrix of the busiest rank went to the least loaded one, which was at most at the mean of all others.
    smallest_there = min(
        cost for item, cost in zip(work.items, cost_of(work), strict=True) if work.loads[home_of(item)] == busiest
    )
    assert busiest <= mean + (1 - Fraction(1, world)) * smallest_there


def best_makespan(costs: list[int], world: int) -> int:
    """The smallest possible load of the busiest rank, by trying every assignment."""
    return min(
        max(sum(cost for cost, rank in zip(costs, homes, strict=True) if rank == busy) for busy in range(world))
        for homes in itertools.product(range(world), repeat=len(costs))
    )


@LIGHT
@given(st.lists(st.tuples(st.integers(2, 30), st.integers(2, 30)), min_size=1, max_size=6), st.integers(2, 3))
def test_the_busiest_rank_is_within_four_thirds_of_the_best_assignment(
    shapes: list[tuple[int, int]], world: int
) -> None:
    work = make_plan(
        table_of([(f"w{n}", shape) for n, shape in enumerate(shapes)]), Options(layout="flat"), world=world
    ).works[0]
    bound = Fraction(4, 3) - Fraction(1, 3 * world)
    assert max(work.loads) <= bound * best_makespan(cost_of(work), world)


def assigned(
    table: ParamTable, world: int, bucket_numel: int, *, redeal: bool, trade: bool = False
) -> tuple[WorkPlan, int]:
    """The work plan with or without dealing equals again and trading places, and the elements that move."""
    routes = route_params(table)
    buffers = plan_storage(table, routes, world_by_domain={"dense": world}, layout="flat", bucket_numel=bucket_numel)
    with pytest.MonkeyPatch.context() as patch:
        if not redeal:
            patch.setattr(work_module, "_nearest_of_equals", lambda shapes, home_by_key: None)
        if not trade:
            patch.setattr(work_module, "_nearest_ranks", lambda shapes, home_by_key, before: list(range(len(before))))
        buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
        work = plan_work(buckets, routes, domain="dense", world=world)
    by_index = {bucket.index: bucket for bucket in buckets}
    moved = 0
    for item in work.items:
        moved += item.matrix.numel - held_by_rank(by_index[item.shard], item).get(home_of(item), 0)
    return work, moved


equal_tables = st.builds(
    lambda shapes, names: table_of(list(zip(names, shapes, strict=False))),
    st.lists(st.sampled_from([(8, 24), (16, 16), (24, 24)]), min_size=1, max_size=6),
    st.permutations([f"{letter}.weight" for letter in "abcdef"]),
)
bucket_sizes = st.sampled_from([64, 256, 512, 1024])


@LIGHT
@given(equal_tables, st.integers(2, 6), bucket_sizes)
def test_dealing_equals_again_keeps_every_load(table: ParamTable, world: int, bucket_numel: int) -> None:
    plain, _ = assigned(table, world, bucket_numel, redeal=False)
    dealt, _ = assigned(table, world, bucket_numel, redeal=True)
    assert dealt.loads == plain.loads
    homes = [
        Counter((item.matrix.rows, item.matrix.cols, home_of(item)) for item in work.items) for work in (plain, dealt)
    ]
    assert homes[0] == homes[1]


@pytest.mark.parametrize("world", [2, 3, 8, 16])
@pytest.mark.parametrize("layers", [1, 4, 12])
def test_dealing_equals_again_moves_fewer_elements_of_a_transformer(world: int, layers: int) -> None:
    shapes = [("qkv", (96, 64)), ("out", (64, 64)), ("up", (256, 64)), ("down", (64, 256))]
    table = table_of([(f"blocks.{layer}.{name}.weight", shape) for layer in range(layers) for name, shape in shapes])
    _, plain = assigned(table, world, 50_000, redeal=False)
    _, dealt = assigned(table, world, 50_000, redeal=True)
    assert dealt <= plain
    if layers == 12:
        assert dealt < plain


@LIGHT
@example(table_of([("c.weight", (16, 16)), ("b.weight", (24, 24)), ("a.weight", (16, 16))]), 4, 512)
@given(equal_tables, st.integers(2, 6), bucket_sizes)
def test_dealing_equals_again_never_moves_more_elements(table: ParamTable, world: int, bucket_numel: int) -> None:
    _, plain = assigned(table, world, bucket_numel, redeal=False)
    _, dealt = assigned(table, world, bucket_numel, redeal=True)
    assert dealt <= plain


def test_two_matrices_that_lie_with_two_ranks_stay_there() -> None:
    """The larger one, which finds its home first, lies with the second rank."""
    table = table_of([("a.weight", (32, 24)), ("b.weight", (48, 16))])
    assert assigned(table, 2, 2**20, redeal=True)[1] == 2 * 768
    work, moved = assigned(table, 2, 2**20, redeal=True, trade=True)
    assert moved == 0
    assert {item.matrix.fqn: home_of(item) for item in work.items} == {"b.weight": 0, "a.weight": 1}


@LIGHT
@given(equal_tables, st.integers(2, 6), bucket_sizes)
def test_trading_places_keeps_loads_and_never_moves_more_elements(
    table: ParamTable, world: int, bucket_numel: int
) -> None:
    before, plain = assigned(table, world, bucket_numel, redeal=True)
    after, traded = assigned(table, world, bucket_numel, redeal=True, trade=True)
    assert traded <= plain
    assert sorted(after.loads) == sorted(before.loads)
    assert len({(home_of(old), home_of(new)) for old, new in zip(before.items, after.items, strict=True)}) == len(
        {home_of(item) for item in before.items}
    )


def test_ranks_with_different_loads_before_do_not_trade_places() -> None:
    """Matrix 0 lies with rank 1, matrix 1 with rank 2, matrix 2 with rank 0; each has its home one rank further down."""
    shapes = [{0: [(1, 2, 10, 1)], 1: [(2, 3, 10, 1)], 2: [(0, 1, 10, 1)]}]
    homes = {0: 0, 1: 1, 2: 2}
    assert work_module._nearest_ranks(shapes, homes, [0, 0, 0]) == [1, 2, 0]
    assert work_module._nearest_ranks(shapes, homes, [7, 0, 0]) == [0, 2, 1]
    assert work_module._nearest_ranks(shapes, homes, [7, 0, 7]) == [2, 1, 0]
    assert work_module._nearest_ranks(shapes, homes, [7, 0, 3]) == [0, 1, 2]


@pytest.mark.parametrize("world", [16, 64])
def test_trading_places_moves_fewer_elements_of_a_transformer(world: int) -> None:
    shapes = [("qkv", (96, 64)), ("out", (64, 64)), ("up", (256, 64)), ("down", (64, 256))]
    table = table_of([(f"blocks.{layer}.{name}.weight", shape) for layer in range(4) for name, shape in shapes])
    assert assigned(table, world, 50_000, redeal=True, trade=True)[1] < assigned(table, world, 50_000, redeal=True)[1]


@LIGHT
@given(worked())
def test_cohorts_are_consecutive_in_backward_order_where_something_may_move(case: Worked) -> None:
    cohorts = [item.cohort for item in case.work.items]
    if any(len(item.homes) < case.work.world for item in case.work.items):
        assert cohorts == sorted(cohorts)
    assert set(cohorts) == set(range(case.work.num_cohorts))
    shards = [item.shard for item in case.work.items]
    assert shards == sorted(shards)


@pytest.mark.parametrize("cohort_numel", [1, 16, 64, 1000])
def test_a_cohort_closes_when_each_rank_has_its_share_in_flight(cohort_numel: int) -> None:
    world, numel = 3, 64
    work = make_plan(
        table_of([(f"w{n}", (8, 8)) for n in range(20)]), Options(cohort_numel=cohort_numel), world=world
    ).works[0]
    per_cohort = -(-cohort_numel * world // numel)
    sizes = Counter(item.cohort for item in work.items)
    assert all(sizes[cohort] == per_cohort for cohort in range(work.num_cohorts - 1))


@pytest.mark.parametrize("layout", ["flat", "replicated"])
def test_where_nothing_moves_a_cohort_holds_all_matrices_of_a_shape_up_to_eight_times_its_size(layout: str) -> None:
    shapes = {"qkv": (24, 8), "out": (8, 8), "up": (32, 8), "down": (8, 32), "small": (4, 4)}
    table = table_of([(f"{layer}.{name}", shape) for layer in range(6) for name, shape in shapes.items()])
    found = make_plan(table, Options(layout=layout, cohort_numel=100), world=1).works[0]
    batches = Counter((item.cohort, item.matrix.rows, item.matrix.cols) for item in found.items)
    numels: Counter[int] = Counter()
    for (cohort, rows, cols), count in batches.items():
        numels[cohort] += rows * cols * count
    assert max(numels.values()) == 3 * 256  # several shapes in one cohort do not make it larger than the largest part
    # 6 x 192, 64, 256, 256 and 16 elements in parts of at most 800, equal ones: 2, 1, 2, 2 and 1 batches.
    assert sorted((rows, cols, count) for (_, rows, cols), count in batches.items()) == [
        (4, 4, 6),
        (8, 8, 6),
        (8, 32, 3),
        (8, 32, 3),
        (24, 8, 3),
        (24, 8, 3),
        (32, 8, 3),
        (32, 8, 3),
    ]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_one_matrix_keeps_one_rank_busy_and_the_imbalance_says_so(world: int) -> None:
    lonely = make_plan(table_of([("w", (8, 8))]), Options(layout="flat"), world=world).works[0]
    assert sum(1 for load in lonely.loads if load) == 1
    assert lonely.imbalance == world


@pytest.mark.parametrize("steps", [3, 5, 9])
def test_homes_are_balanced_by_the_form_and_steps_that_will_run(steps: int) -> None:
    """On two ranks with two shapes LPT finds the best split; loads are FLOPs of that rule."""
    cost = NewtonSchulz(steps=steps)
    shapes = [(64, 64), (32, 192), (32, 192), (48, 48)]
    table = table_of([(f"w{n}", shape) for n, shape in enumerate(shapes)])
    work = make_plan(table, Options(layout="flat", cost=cost), world=2).works[0]
    assert work.cost == cost
    assert sum(work.loads) == sum(cost.flops(*shape) for shape in shapes)
    assert max(work.loads) <= Fraction(7, 6) * best_makespan([cost.flops(*shape) for shape in shapes], 2)


def test_which_matrices_share_a_home_follows_from_the_form_that_will_run() -> None:
    """a and b take 60 and 101 in units of 64^3 FLOPs, c and d 30 each. In the standard form a would take 90 and share a home
    with c; by long * short^2 it would be the dearest."""
    table = table_of([("a", (64, 256)), ("b", (96, 96)), ("c", (64, 64)), ("d", (64, 64))])
    work = make_plan(table, Options(layout="flat"), world=2).works[0]
    shape_of = {param.fqn: param.shape for param in table}
    found = [sorted(shape_of[item.matrix.fqn] for item in work.items if home_of(item) == rank) for rank in range(2)]
    assert sorted(found) == sorted(sorted(shape_of[fqn] for fqn in fqns) for fqns in ("b", "acd"))


def test_what_some_ranks_repeat_counts_on_each_of_them() -> None:
    table = table_of([("a", (8, 8)), ("b", (8, 8)), ("c", (4, 8))])
    matrices = [route.matrices[0] for _, route in sorted(route_params(table).items())]
    one, other = NewtonSchulz().flops(8, 8), NewtonSchulz().flops(4, 8)
    homes = [(matrices[0], range(3)), (matrices[1], range(1, 3)), (matrices[2], range(1)), (matrices[2], None)]
    assert work_module.loads_of(homes, 3, NewtonSchulz()) == [one + other, 2 * one, 2 * one]

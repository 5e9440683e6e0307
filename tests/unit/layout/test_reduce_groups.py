import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.reduce_groups import reduce_groups
from layerwise.routing.spec import ParamTable, table_of
from tests.strategies import LIGHT, plans


def chunk_of(plan: Plan, bucket: BucketPlan) -> int:
    return plan.buffers[bucket.buffer].key.chunk


@LIGHT
@given(plans())
def test_every_bucket_is_launched_once(plan: Plan) -> None:
    launched = list(itertools.chain(*(group.buckets for group in plan.reduce_groups)))
    assert sorted(launched) == [bucket.index for bucket in plan.buckets]


@LIGHT
@given(plans())
def test_no_group_mixes_reducers_domains_or_chunks(plan: Plan) -> None:
    for group in plan.reduce_groups:
        members = [plan.buckets[index] for index in group.buckets]
        assert {bucket.reducer for bucket in members} == {group.reducer}
        assert {bucket.domain for bucket in members} == {group.domain}
        assert len({chunk_of(plan, bucket) for bucket in members}) == 1


@LIGHT
@given(plans())
def test_buckets_keep_their_order_and_a_group_waits_for_its_last_one_only(plan: Plan) -> None:
    for group in plan.reduce_groups:
        assert list(group.buckets) == sorted(group.buckets)
    last = [group.buckets[-1] for group in plan.reduce_groups]
    assert last == sorted(last)


@LIGHT
@given(plans())
def test_the_first_chunk_launches_bucket_by_bucket_and_later_ones_as_few_groups_as_may_be(plan: Plan) -> None:
    later: list[tuple[int, str, str]] = []
    for group in plan.reduce_groups:
        chunk = chunk_of(plan, plan.buckets[group.buckets[0]])
        if chunk == 0:
            assert len(group.buckets) == 1
        else:
            later.append((chunk, group.domain, group.reducer))
    # Two groups of one chunk differ in domain or in collective: otherwise they would be one.
    assert len(later) == len(set(later))


def test_a_later_chunk_whose_buckets_agree_is_one_group() -> None:
    table = table_of([(f"w{number}", (16, 16)) for number in range(6)])
    chunks = ParamTable(tuple(replace(param, chunk=number // 2) for number, param in enumerate(table)))
    plan = make_plan(chunks, Options(layout="flat", bucket_numel=1), world=2)
    assert len(plan.buckets) == 6
    by_chunk = [[chunk_of(plan, plan.buckets[index]) for index in group.buckets] for group in plan.reduce_groups]
    assert sorted(by_chunk) == [[0], [0], [1, 1], [2, 2]]


def test_compact_matrices_and_their_flat_neighbours_are_never_launched_together() -> None:
    params = [
        replace(param, chunk=1, shape=shape)
        for param, shape in zip(
            table_of([(name, (8, 8)) for name in "abcd"]), [(8, 8), (9,), (8, 8), (7,)], strict=True
        )
    ]
    plan = make_plan(ParamTable(tuple(params)), Options(layout="compact", bucket_numel=1), world=2)
    assert [(group.reducer, len(group.buckets)) for group in plan.reduce_groups] == [
        ("reduce_scatter", 2),
        ("all_reduce", 2),
    ]
    ordered = make_plan(
        ParamTable(tuple(params)), Options(layout="compact", bucket_numel=1, reducer="ordered"), world=2
    )
    assert [(group.reducer, len(group.buckets)) for group in ordered.reduce_groups] == [("ordered", 4)]


@LIGHT
@given(plans(), st.randoms(use_true_random=False))
def test_groups_do_not_depend_on_the_order_in_which_buffers_are_listed(plan: Plan, rng: object) -> None:
    shuffled: list[BufferPlan] = rng.sample(plan.buffers, len(plan.buffers))  # type: ignore[attr-defined]
    assert reduce_groups(shuffled) == reduce_groups(plan.buffers) == plan.reduce_groups

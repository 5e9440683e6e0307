import itertools
import math
from collections import defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from layerwise.dtypes import DType
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.storage import default_bucket_numel
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of
from tests.strategies import LIGHT, plans, tables, worlds


def intervals_by_param(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """What every shard of every bucket says it holds of each param."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for bucket in plan.buckets:
        for shard in range(bucket.num_shards):
            for span in bucket.spans(shard):
                found[span.fqn].append((span.start, span.stop))
    return found


@LIGHT
@given(st.one_of(plans("flat"), plans("replicated")))
def test_every_element_of_every_trainable_param_has_exactly_one_span(plan: Plan) -> None:
    found = intervals_by_param(plan)
    trainable = [param for param in plan.table if param.trainable and param.numel]
    assert set(found) == {param.fqn for param in trainable}
    for param in trainable:
        spans = sorted(found[param.fqn])
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), param.numel]


@LIGHT
@given(plans())
def test_spans_of_a_shard_lie_inside_it_and_apart(plan: Plan) -> None:
    for bucket in plan.buckets:
        for shard in range(bucket.num_shards):
            cursor = 0
            for span in bucket.spans(shard):
                assert span.shard_offset >= cursor
                assert span.numel > 0
                cursor = span.shard_offset + span.numel
            assert cursor <= bucket.shard_numel(shard)


@LIGHT
@given(plans())
def test_a_span_is_where_its_params_place_says_it_is(plan: Plan) -> None:
    for bucket in plan.buckets:
        offset_by_fqn = {placement.fqn: placement.offset for placement in bucket.placements}
        for shard in range(bucket.num_shards):
            for span in bucket.spans(shard):
                assert shard * bucket.shard_numel(shard) + span.shard_offset == offset_by_fqn[span.fqn] + span.start


@LIGHT
@given(st.one_of(plans("flat"), plans("replicated")))
def test_params_start_on_64_and_buckets_end_on_the_lcm_of_shards_and_128(plan: Plan) -> None:
    for buffer in plan.buffers:
        offset = 0
        for bucket in buffer.buckets:
            assert bucket.num_shards == (plan.world if plan.layout == "flat" else 1)
            assert bucket.offset == offset
            assert bucket.numel % math.lcm(bucket.num_shards, 128) == 0
            assert bucket.shard_numel(0) * bucket.num_shards == bucket.numel
            assert all(placement.offset % 64 == 0 for placement in bucket.placements)
            offset += bucket.numel
        assert buffer.numel == offset


@LIGHT
@given(plans())
def test_padding_is_at_most_64_per_param_and_one_divisor_per_bucket(plan: Plan) -> None:
    for buffer in plan.buffers:
        divisor = math.lcm(plan.world, 128)
        params = sum(len(bucket.placements) for bucket in buffer.buckets)
        assert 0 <= buffer.padding <= 64 * params + divisor * len(buffer.buckets)


@LIGHT
@given(plans())
def test_shards_holding_agrees_with_the_spans(plan: Plan) -> None:
    for bucket in plan.buckets:
        for placement in bucket.placements:
            for start, stop in itertools.pairwise([0, placement.numel // 3, placement.numel // 2, placement.numel]):
                holding = [
                    shard
                    for shard in range(bucket.num_shards)
                    if any(
                        s.fqn == placement.fqn and max(s.start, start) < min(s.stop, stop) for s in bucket.spans(shard)
                    )
                ]
                assert list(bucket.shards_holding(placement, start, stop)) == holding


@LIGHT
@given(plans())
def test_params_of_a_buffer_share_dtype_domain_and_family_and_lie_in_backward_order(plan: Plan) -> None:
    position = {param.fqn: number for number, param in enumerate(plan.table)}
    for buffer in plan.buffers:
        names = [placement.fqn for bucket in buffer.buckets for placement in bucket.placements]
        assert [position[name] for name in names] == sorted((position[name] for name in names), reverse=True)
        for name in names:
            param = plan.table.find(name)
            assert (param.domain, plan.routes[name].family, param.dtype) == (
                buffer.key.domain,
                buffer.key.family,
                buffer.key.dtype,
            )


@LIGHT
@given(plans())
def test_buckets_are_numbered_by_when_their_last_gradient_is_due(plan: Plan) -> None:
    due = {param.fqn: number for number, param in enumerate(reversed(plan.table.params))}
    last = [max(due[placement.fqn] for placement in bucket.placements) for bucket in plan.buckets]
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert last == sorted(last)


@LIGHT
@given(tables(), tables(max_params=4), worlds)
def test_a_param_tied_across_stages_is_alone_and_cut_the_same_whatever_its_neighbours(
    first: ParamTable, second: ParamTable, world: int
) -> None:
    tied = ParamSpec(
        fqn="embed.weight",
        shape=(37, 11),
        dtype=DType.BF16,
        module_kind=ModuleKind.EMBEDDING,
        module_type="Embedding",
        tie="embedding",
    )
    cuts = []
    # One stage has it first, the other last, as the embedding and the head of a pipeline.
    for params in ((tied, *first), (*second, tied)):
        plan = make_plan(ParamTable(params), world=world, layout="flat", bucket_numel=500)
        bucket = plan.buckets[plan.bucket_of["embed.weight"]]
        assert [placement.fqn for placement in bucket.placements] == ["embed.weight"]
        cuts.append([bucket.spans(shard) for shard in range(bucket.num_shards)])
    assert cuts[0] == cuts[1]


@LIGHT
@given(plans())
def test_no_two_params_share_a_bucket_when_one_is_tied_across_stages(plan: Plan) -> None:
    for bucket in plan.buckets:
        tied = [placement.fqn for placement in bucket.placements if plan.table.find(placement.fqn).tie]
        assert not tied or len(bucket.placements) == 1


@LIGHT
@given(buckets=st.integers(1, 12), few=st.sampled_from([1, 2, 4]), many=st.sampled_from([8, 16, 64]), world=worlds)
def test_the_number_of_buckets_follows_from_bytes_not_from_the_number_of_matrices(
    buckets: int, few: int, many: int, world: int
) -> None:
    bucket_numel = 64 * 64 * 64
    counts = []
    for per_bucket in (few, many):
        rows = 64 * 64 // per_bucket
        table = table_of([(f"w{number}", (rows, 64)) for number in range(buckets * per_bucket)])
        counts.append(len(make_plan(table, world=world, bucket_numel=bucket_numel).buckets))
    assert abs(counts[0] - counts[1]) <= 1
    assert abs(counts[0] - buckets) <= 1


@LIGHT
@given(plans())
def test_only_the_last_bucket_or_one_before_a_tied_param_is_below_the_bucket_size(plan: Plan) -> None:
    again = make_plan(plan.table, world=plan.world, layout="flat", bucket_numel=300)
    for buffer in again.buffers:
        for bucket, following in itertools.pairwise(buffer.buckets):
            last = bucket.placements[-1]
            full = last.offset + last.numel >= 300
            tied = any(again.table.find(p.fqn).tie for p in (bucket.placements[0], following.placements[0]))
            assert full or tied


def test_a_frozen_param_has_no_place() -> None:
    table = table_of([("a", (8, 8)), ("b", (8, 8))])
    frozen = ParamTable((table.params[0], replace(table.params[1], trainable=False)))
    assert dict(make_plan(frozen, world=2).bucket_of) == {"a": 0}


def test_every_rank_of_a_replicated_bucket_holds_shard_zero() -> None:
    (bucket,) = make_plan(table_of([("a", (8, 8))]), world=3, layout="replicated").buckets
    assert [bucket.shard_of(rank) for rank in range(3)] == [0, 0, 0]
    assert (bucket.reducer, bucket.publisher) == ("all_reduce", "none")


def test_every_rank_of_a_flat_bucket_holds_its_own_shard() -> None:
    (bucket,) = make_plan(table_of([("a", (8, 8))]), world=3, layout="flat").buckets
    assert [bucket.shard_of(rank) for rank in range(3)] == [0, 1, 2]
    assert (bucket.reducer, bucket.publisher) == ("reduce_scatter", "all_gather")


def test_the_default_bucket_grows_with_the_world_past_40_ranks() -> None:
    assert [default_bucket_numel(world) for world in (1, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]

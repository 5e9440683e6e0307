import itertools
import math
from collections import defaultdict
from dataclasses import replace
from operator import add
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config.layouts import LAYOUTS
from layerwise.dtypes import DType
from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.intervals import Copied, Equal
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.storage import default_bucket_numel
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable, table_of
from tests.strategies import LIGHT, SHARDED, plans, tables, worlds


def intervals_by_param(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """What every shard of every bucket says it holds of each param; copies count once."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for bucket in plan.buckets:
        for rank in first_holders(bucket):
            for span in bucket.spans(rank):
                found[span.fqn].append((span.start, span.stop))
    return found


def first_holders(bucket: BucketPlan) -> range:
    """The ranks that hold parts of a bucket of which nobody before them has a copy."""
    is_copied = isinstance(bucket.shards, Copied)
    assert [bucket.shards.copies(rank) for rank in range(bucket.world)] == [
        range(bucket.world) if is_copied else range(rank, rank + 1) for rank in range(bucket.world)
    ]
    return range(1 if is_copied else bucket.world)


def holders_of(plan: Plan) -> dict[str, list[int]]:
    """The ranks that hold something of each param, from the spans alone."""
    found: dict[str, list[int]] = defaultdict(list)
    for bucket in plan.buckets:
        for rank in range(bucket.world):
            for span in bucket.spans(rank):
                found[span.fqn].append(rank)
    return found


def buckets_of(plan: Plan) -> list[tuple[BufferPlan, BucketPlan]]:
    return [(buffer, bucket) for buffer in plan.buffers for bucket in buffer.buckets]


@LIGHT
@given(plans())
def test_every_element_of_every_trainable_param_has_exactly_one_owner(plan: Plan) -> None:
    found = intervals_by_param(plan)
    trainable = [param for param in plan.table if param.trainable and param.numel]
    assert set(found) == {param.fqn for param in trainable}
    for param in trainable:
        spans = sorted(found[param.fqn])
        assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), param.numel]


@LIGHT
@given(plans("padded", "compact"))
def test_no_param_of_matrices_crosses_a_shard_where_the_layout_keeps_them_whole(plan: Plan) -> None:
    holders = holders_of(plan)
    for buffer, bucket in buckets_of(plan):
        is_whole = buffer.key.family == "matrix"
        assert bucket.work == ("stay" if is_whole else "balance")
        for placement in bucket.placements if is_whole else ():
            assert len(holders[placement.fqn]) == (1 if placement.numel else 0)


@LIGHT
@given(plans("padded", "compact"))
def test_where_params_are_whole_the_rank_that_holds_a_matrix_is_its_home_and_nothing_moves(plan: Plan) -> None:
    holders = holders_of(plan)
    for work in plan.works:
        for item in work.items:
            assert list(item.homes) == holders[item.matrix.fqn]
    assert not any(op.phase in ("exchange", "return") for op in plan.schedule(stats_numel=1).ops)


@LIGHT
@given(plans())
def test_shards_of_a_bucket_follow_one_another_and_cover_it(plan: Plan) -> None:
    for buffer, bucket in buckets_of(plan):
        world = plan.world_by_domain[buffer.key.domain]
        is_copied = buffer.key.layout == "replicated"
        assert (bucket.world, bucket.shards.is_split) == (world, world > 1 and not is_copied)
        numels = [bucket.shard_numel(rank) for rank in range(world)]
        starts = [bucket.shards.start(rank) for rank in range(world)]
        assert starts == ([0] * world if is_copied else [0, *itertools.accumulate(numels)][:-1])
        assert min(numels) >= 0
        assert sum(numels) == bucket.numel * (world if is_copied else 1)
        assert bucket.shard_numels() == bucket.shards.numels() == tuple(numels)
        assert [bucket.shard_part(rank) for rank in range(world)] == [
            slice(start, start + numel) for start, numel in zip(starts, numels, strict=True)
        ]
        assert [bucket.shards.stop(rank) for rank in range(world)] == list(map(add, starts, numels))
        if buffer.key.layout != "compact":
            assert isinstance(bucket.shards, Copied if is_copied else Equal)
            assert len(set(numels)) == 1


@LIGHT
@given(plans("compact"))
def test_a_compact_bucket_has_no_padding_and_holds_one_owners_params_after_the_other(plan: Plan) -> None:
    for buffer, bucket in buckets_of(plan):
        if buffer.key.layout == "compact":
            ends = itertools.accumulate((placement.numel for placement in bucket.placements), initial=0)
            assert [*(placement.offset for placement in bucket.placements), bucket.numel] == list(ends)
            holding = [bucket.shards.ranks(at.offset, at.offset + at.numel) for at in bucket.placements]
            assert all(len(ranks) == 1 for ranks in holding if ranks)
            owners = [ranks.start for ranks in holding if ranks]
            assert owners == sorted(owners)
        assert buffer.padding == 0 or buffer.key.layout == "flat"


@LIGHT
@given(plans())
def test_spans_of_a_shard_lie_inside_it_and_apart(plan: Plan) -> None:
    for bucket in plan.buckets:
        for rank in range(bucket.world):
            cursor = 0
            for span in bucket.spans(rank):
                assert span.shard_offset >= cursor
                assert span.numel > 0
                assert span.part == slice(span.shard_offset, span.shard_offset + span.numel)
                cursor = span.shard_offset + span.numel
            assert cursor <= bucket.shard_numel(rank)


@LIGHT
@given(plans())
def test_a_span_is_where_its_params_place_says_it_is(plan: Plan) -> None:
    for bucket in plan.buckets:
        placement_by_fqn = {placement.fqn: placement for placement in bucket.placements}
        start = 0
        for rank in range(bucket.world):
            for span in bucket.spans(rank):
                placement = placement_by_fqn[span.fqn]
                assert span.block is None
                assert start + span.shard_offset == placement.offset + span.start
                assert tuple(bucket.spans_of(span.fqn, rank)) == (span,)
            absent = placement_by_fqn.keys() - {span.fqn for span in bucket.spans(rank)}
            assert not any(bucket.spans_of(fqn, rank) for fqn in absent)
            start += 0 if isinstance(bucket.shards, Copied) else bucket.shard_numel(rank)


@LIGHT
@given(plans())
def test_params_start_on_64_and_buckets_end_on_the_lcm_of_shards_and_128_but_for_compact(plan: Plan) -> None:
    for buffer in plan.buffers:
        offset = 0
        for bucket in buffer.buckets:
            assert bucket.offset == offset
            if buffer.key.layout != "compact":
                shards = 1 if buffer.key.layout == "replicated" else bucket.world
                assert bucket.numel % math.lcm(shards, 128) == 0
                assert all(placement.offset % 64 == 0 for placement in bucket.placements)
            if buffer.key.layout == "padded":
                assert bucket.shard_numel(0) % 64 == 0
            offset += bucket.numel
        assert buffer.numel == offset


@LIGHT
@given(plans("flat", "replicated"))
def test_padding_is_at_most_64_per_param_and_one_divisor_per_bucket(plan: Plan) -> None:
    for buffer in plan.buffers:
        divisor = math.lcm(plan.world, 128)
        params = sum(len(bucket.placements) for bucket in buffer.buckets)
        assert 0 <= buffer.padding <= 64 * params + divisor * len(buffer.buckets)


@LIGHT
@given(plans("padded"))
def test_padded_shards_are_as_long_as_the_fullest_of_them_and_no_longer(plan: Plan) -> None:
    for buffer, bucket in buckets_of(plan):
        if buffer.key.layout == "padded":
            fullest = max(
                max((span.part.stop for span in bucket.spans(rank)), default=0) for rank in range(bucket.world)
            )
            divisor = math.lcm(64, math.lcm(bucket.world, 128) // bucket.world)
            assert fullest <= bucket.shard_numel(0) < max(fullest, 1) + divisor


@LIGHT
@given(plans())
def test_who_holds_a_stretch_and_how_much_of_it_agrees_with_the_spans(plan: Plan) -> None:
    for bucket in plan.buckets:
        for placement in bucket.placements:
            for start, stop in itertools.pairwise([0, placement.numel // 3, placement.numel // 2, placement.numel]):
                numels = [
                    sum(
                        max(0, min(span.stop, stop) - max(span.start, start))
                        for span in bucket.spans(rank)
                        if span.fqn == placement.fqn
                    )
                    for rank in range(bucket.world)
                ]
                holding = [rank for rank, numel in enumerate(numels) if numel]
                ranks = bucket.shards.ranks(placement.offset + start, placement.offset + stop)
                assert list(ranks) == holding
                if start < stop:
                    held = bucket.shards.held(placement.offset + start, placement.offset + stop)
                    assert [
                        (rank, numel) for first, last, numel, step in held for rank in range(first, last, step)
                    ] == [(rank, numels[rank]) for rank in holding]


@LIGHT
@given(plans())
def test_params_of_a_buffer_share_what_its_key_says_and_its_buckets_lie_in_backward_order(plan: Plan) -> None:
    position = {param.fqn: number for number, param in enumerate(reversed(plan.table.params))}
    for buffer in plan.buffers:
        names = [placement.fqn for bucket in buffer.buckets for placement in bucket.placements]
        for name in names:
            param = plan.table.find(name)
            assert (param.domain, param.chunk, plan.routes[name].family, param.dtype) == (
                buffer.key.domain,
                buffer.key.chunk,
                buffer.key.family,
                buffer.key.dtype,
            )
        # Within a bucket a layout may order params as it likes: they are reduced together.
        by_bucket = [sorted(position[placement.fqn] for placement in bucket.placements) for bucket in buffer.buckets]
        assert list(itertools.chain(*by_bucket)) == sorted(position[name] for name in names)
        if buffer.key.layout in ("flat", "replicated"):
            assert [position[name] for name in names] == sorted(position[name] for name in names)


@LIGHT
@given(plans())
def test_only_matrices_get_the_layout_that_was_asked_for_and_the_rest_byte_level_shards(plan: Plan) -> None:
    beside = "replicated" if plan.options.layout == "replicated" else "flat"
    for buffer in plan.buffers:
        assert buffer.key.layout == (plan.options.layout if buffer.key.family == "matrix" else beside)


@LIGHT
@given(plans())
def test_every_buckets_collectives_follow_from_its_own_layout(plan: Plan) -> None:
    for buffer, bucket in buckets_of(plan):
        is_whole = buffer.key.layout in ("compact", "replicated")
        reduces = "all_reduce" if is_whole else "reduce_scatter"
        assert bucket.reducer == (reduces if plan.options.reducer == "collective" else plan.options.reducer)
        gathers = {"compact": "uneven_all_gather"}.get(buffer.key.layout, "all_gather")
        assert bucket.publisher == ("none" if buffer.key.layout == "replicated" else gathers)


@LIGHT
@given(plans())
def test_buckets_are_numbered_by_when_their_last_gradient_is_due(plan: Plan) -> None:
    due = {param.fqn: number for number, param in enumerate(reversed(plan.table.params))}
    last = [max(due[placement.fqn] for placement in bucket.placements) for bucket in plan.buckets]
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert last == sorted(last)


tied_params = st.builds(
    lambda kind, rows: ParamSpec(
        fqn="embed.weight",
        shape=(rows, 11),
        dtype=DType.BF16,
        module_kind=kind,
        module_type="Embedding" if kind is ModuleKind.EMBEDDING else "Linear",
        tie="embedding",
    ),
    st.sampled_from([ModuleKind.EMBEDDING, ModuleKind.LINEAR]),
    st.sampled_from([1, 37, 640]),
)


@LIGHT
@given(tied_params, tables(), tables(max_params=4), worlds, st.sampled_from(LAYOUTS))
def test_a_param_tied_across_stages_is_alone_and_cut_and_owned_the_same_whatever_its_neighbours(
    tied: ParamSpec, first: ParamTable, second: ParamTable, world: int, layout: str
) -> None:
    cuts = []
    # One stage has it first, the other last, as the embedding and the head of a pipeline.
    for params in ((tied, *first), (*second, tied)):
        plan = make_plan(ParamTable(params), Options(layout=layout, bucket_numel=500), world=world)
        bucket = plan.buckets[plan.bucket_of["embed.weight"]]
        assert [placement.fqn for placement in bucket.placements] == ["embed.weight"]
        assert bucket.tie == "embedding"
        cuts.append([bucket.numel, bucket.shards, [bucket.spans(rank) for rank in range(bucket.world)]])
    assert cuts[0] == cuts[1]


@LIGHT
@given(plans())
def test_no_two_params_share_a_bucket_when_one_is_tied_across_stages(plan: Plan) -> None:
    for bucket in plan.buckets:
        ties = [plan.table.find(placement.fqn).tie for placement in bucket.placements]
        assert len(ties) == 1 or not any(ties)
        assert bucket.tie == ties[0]


@LIGHT
@given(
    buckets=st.integers(1, 12),
    few=st.sampled_from([1, 2, 4]),
    many=st.sampled_from([8, 16, 64]),
    world=worlds,
    layout=st.sampled_from(["flat", "compact", "replicated"]),
)
def test_the_number_of_buckets_follows_from_bytes_not_from_the_number_of_matrices(
    buckets: int, few: int, many: int, world: int, layout: str
) -> None:
    bucket_numel = 64 * 64 * 64
    counts = []
    for per_bucket in (few, many):
        rows = 64 * 64 // per_bucket
        table = table_of([(f"w{number}", (rows, 64)) for number in range(buckets * per_bucket)])
        counts.append(len(make_plan(table, Options(layout=layout, bucket_numel=bucket_numel), world=world).buckets))
    assert abs(counts[0] - counts[1]) <= 1
    assert abs(counts[0] - buckets) <= 1


@LIGHT
@given(tables(), worlds, st.sampled_from(["flat", "compact", "replicated"]))
def test_only_the_last_bucket_or_one_beside_a_tied_param_is_below_the_bucket_size(
    table: ParamTable, world: int, layout: str
) -> None:
    plan = make_plan(table, Options(layout=layout, bucket_numel=300), world=world)
    for buffer in plan.buffers:
        for bucket, following in itertools.pairwise(buffer.buckets):
            last = bucket.placements[-1]
            full = last.offset + last.numel >= 300
            tied = any(plan.table.find(p.fqn).tie for p in (bucket.placements[0], following.placements[0]))
            assert full or tied


@LIGHT
@given(tables(), worlds, st.sampled_from(SHARDED), st.randoms(use_true_random=False))
def test_how_params_are_stored_does_not_depend_on_the_order_in_which_routes_and_worlds_were_found(
    table: ParamTable, world: int, layout: str, rng: Random
) -> None:
    plan = make_plan(table, Options(layout=layout, bucket_numel=300), world=world)
    worlds_found = dict(rng.sample([("expert", world), ("dense", world)], 2))
    again = make_plan(table, Options(layout=layout, bucket_numel=300), world=world, worlds=worlds_found)
    assert again.buffers == plan.buffers
    assert again.digest == plan.digest


def test_a_frozen_param_has_no_place() -> None:
    table = table_of([("a", (8, 8)), ("b", (8, 8))])
    frozen = ParamTable((table.params[0], replace(table.params[1], trainable=False)))
    assert dict(make_plan(frozen, world=2).bucket_of) == {"a": 0}


def test_every_rank_of_a_replicated_bucket_holds_all_of_it() -> None:
    (bucket,) = make_plan(table_of([("a", (8, 8))]), Options(layout="replicated"), world=3).buckets
    assert [bucket.shard_part(rank) for rank in range(3)] == [slice(0, 128)] * 3
    assert [bucket.copies(bucket.spans(rank)[0], rank) for rank in range(3)] == [range(3)] * 3
    assert (bucket.reducer, bucket.publisher) == ("all_reduce", "none")


def test_every_rank_of_a_flat_bucket_holds_its_own_shard() -> None:
    (bucket,) = make_plan(table_of([("a", (8, 8))]), Options(layout="flat"), world=3).buckets
    assert [bucket.shard_part(rank) for rank in range(3)] == [slice(0, 128), slice(128, 256), slice(256, 384)]
    assert [bucket.copies(span, rank) for rank in range(3) for span in bucket.spans(rank)] == [range(1)]
    assert (bucket.reducer, bucket.publisher) == ("reduce_scatter", "all_gather")


def test_the_default_bucket_grows_with_the_world_past_40_ranks() -> None:
    assert [default_bucket_numel(world) for world in (1, 40, 64)] == [40_000_000, 40_000_000, 64_000_000]


@pytest.mark.parametrize("layout", ["padded", "compact"])
def test_fewer_params_than_ranks_leave_shards_empty_and_nobody_without_a_place(layout: str) -> None:
    (bucket,) = make_plan(table_of([("a", (8, 16)), ("b", (4, 16))]), Options(layout=layout), world=5).buckets
    held = [sum(span.numel for span in bucket.spans(rank)) for rank in range(5)]
    assert sorted(held) == [0, 0, 0, 64, 128]
    assert bucket.numel == (5 * 128 if layout == "padded" else 192)

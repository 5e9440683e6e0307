import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.alignment import shard_divisor
from layerwise.layout.packing import PackedBucket, Packing, PackItem, megatron_cost, pack
from tests.reference import packing as oracle
from tests.strategies import LIGHT, MANY

PACKINGS: tuple[Packing, ...] = ("best", "reference", "reference-numel")


class Case(NamedTuple):
    """What `pack` is asked."""

    items: tuple[PackItem, ...]
    num_shards: int
    bucket_numel: int

    def packed(self, packing: Packing) -> tuple[PackedBucket, ...]:
        return pack(self.items, num_shards=self.num_shards, bucket_numel=self.bucket_numel, packing=packing)


@st.composite
def cases(draw: st.DrawFn, max_items: int = 24, lonely: bool = True) -> Case:
    """Few distinct sizes, as in a model, or all different; names that do not sort in backward order."""
    rng = Random(draw(st.integers(0, 2**20)))
    sizes = [rng.choice([0, 1, 64, 100, 128, 192, rng.randint(1, 2000)]) for _ in range(rng.randint(1, 5))]
    numels = [
        rng.choice(sizes) if rng.random() < 0.8 else rng.randint(0, 3000) for _ in range(rng.randint(1, max_items))
    ]
    names = [f"w{number}" for number in range(len(numels))]
    rng.shuffle(names)
    items = [
        PackItem(
            name,
            numel,
            cost=numel * rng.choice([1, 1, 8, rng.randint(1, 30)]),
            megatron_cost=numel * rng.choice([1, 1, 8, rng.randint(1, 30)]),
            alone=lonely and rng.random() < 0.08,
        )
        for name, numel in zip(names, numels, strict=True)
    ]
    return Case(tuple(items), draw(st.integers(1, 9)), draw(st.sampled_from([1, 64, 300, 1000, 5000, 10**6])))


packings = st.sampled_from(PACKINGS)


def total(buckets: Sequence[PackedBucket], num_shards: int) -> int:
    return num_shards * sum(bucket.shard_numel for bucket in buckets)


def loads(items: Sequence[PackItem], buckets: Sequence[PackedBucket], num_shards: int) -> list[int]:
    cost = {item.fqn: item.cost for item in items}
    found = [0] * num_shards
    for bucket in buckets:
        for place in bucket.places:
            found[place.shard] += cost[place.fqn]
    return found


def exposed(items: Sequence[PackItem], buckets: Sequence[PackedBucket], num_shards: int, wire_speed: float) -> float:
    """How long the wire is still busy when backward ends: it reduces `wire_speed` elements while backward makes one."""
    clock = wire_free = 0.0
    for bucket in buckets:
        clock += sum(place.numel for place in bucket.places)
        wire_free = max(clock, wire_free) + bucket.shard_numel * num_shards / wire_speed
    return wire_free - clock


@MANY
@given(cases(), packings)
def test_every_param_has_exactly_one_place(case: Case, packing: Packing) -> None:
    placed = [(place.fqn, place.numel) for bucket in case.packed(packing) for place in bucket.places]
    assert sorted(placed) == sorted((item.fqn, item.numel) for item in case.items)


@MANY
@given(cases(), packings)
def test_no_param_crosses_a_shard_or_another_param_and_all_start_on_64(case: Case, packing: Packing) -> None:
    for bucket in case.packed(packing):
        assert list(bucket.places) == sorted(bucket.places, key=lambda place: (place.shard, place.offset))
        end_by_shard = [0] * case.num_shards
        for place in bucket.places:
            assert 0 <= place.shard < case.num_shards
            assert place.offset % 64 == 0
            assert place.offset >= end_by_shard[place.shard]
            end_by_shard[place.shard] = place.offset + place.numel
        assert max(end_by_shard) <= bucket.shard_numel


@MANY
@given(cases(), packings)
def test_shards_are_no_longer_than_the_fullest_needs(case: Case, packing: Packing) -> None:
    divisor = shard_divisor(case.num_shards)
    assert divisor % 64 == 0
    assert divisor * case.num_shards % 128 == 0
    for bucket in case.packed(packing):
        fullest = max(place.offset + place.numel for place in bucket.places)
        assert bucket.shard_numel % divisor == 0
        assert bucket.shard_numel - max(1, fullest) < divisor


@MANY
@given(cases(), packings)
def test_buckets_are_consecutive_in_backward_order(case: Case, packing: Packing) -> None:
    position = {item.fqn: number for number, item in enumerate(case.items)}
    positions = [sorted(position[place.fqn] for place in bucket.places) for bucket in case.packed(packing)]
    assert list(itertools.chain(*positions)) == list(range(len(case.items)))


@MANY
@given(cases(), packings)
def test_a_param_tied_across_stages_is_alone_at_the_start_of_shard_0(case: Case, packing: Packing) -> None:
    lonely = {item.fqn: item.numel for item in case.items if item.alone}
    found = {}
    for bucket in case.packed(packing):
        for place in bucket.places:
            if place.fqn in lonely:
                assert len(bucket.places) == 1
                assert (place.shard, place.offset) == (0, 0)
                found[place.fqn] = bucket.shard_numel
    divisor = shard_divisor(case.num_shards)
    assert found == {fqn: math.ceil(max(1, numel) / divisor) * divisor for fqn, numel in lonely.items()}


@MANY
@given(cases(), packings)
def test_only_the_last_bucket_or_one_at_a_tied_param_is_below_the_bucket_size(case: Case, packing: Packing) -> None:
    lonely = {item.fqn for item in case.items if item.alone}
    buckets = case.packed(packing)
    for bucket, following in itertools.pairwise(buckets):
        if not lonely & {place.fqn for place in (*bucket.places, *following.places)}:
            assert sum(place.numel for place in bucket.places) >= case.bucket_numel


@MANY
@given(cases(), packings, st.randoms(use_true_random=False))
def test_the_order_of_equal_params_within_a_bucket_changes_nothing(case: Case, packing: Packing, rng: Random) -> None:
    buckets = case.packed(packing)
    shuffled, start = [], 0
    for bucket in buckets:
        members = case.items[start : start + len(bucket.places)]
        start += len(members)
        equals: dict[tuple[int, int, int], list[PackItem]] = {}
        for item in members:
            equals.setdefault((item.numel, item.cost, item.megatron_cost), []).append(item)
        for same in equals.values():
            rng.shuffle(same)
        shuffled += [equals[item.numel, item.cost, item.megatron_cost].pop() for item in members]
    assert case._replace(items=tuple(shuffled)).packed(packing) == buckets


@MANY
@given(cases(lonely=False), packings)
def test_names_decide_only_between_equals(case: Case, packing: Packing) -> None:
    renamed = case._replace(items=tuple(replace(item, fqn=f"x.{item.fqn}") for item in case.items))
    expected = [
        replace(bucket, places=tuple(replace(place, fqn=f"x.{place.fqn}") for place in bucket.places))
        for bucket in case.packed(packing)
    ]
    assert list(renamed.packed(packing)) == expected


@MANY
@given(cases(), st.sampled_from(["reference", "reference-numel"]))
def test_the_reference_is_what_looking_at_every_shard_finds(case: Case, packing: Packing) -> None:
    params = [oracle.Param(item.fqn, item.numel, item.megatron_cost, item.alone) for item in case.items]
    expected, _ = oracle.pack(params, case.num_shards, case.bucket_numel, by_cost=packing == "reference")
    found = case.packed(packing)
    assert [bucket.shard_numel for bucket in found] == [bucket.shard_numel for bucket in expected]
    for bucket, other in zip(found, expected, strict=True):
        assert {place.fqn: (place.shard, place.offset) for place in bucket.places} == other.at


@MANY
@given(cases())
def test_best_never_pads_more_than_the_reference_and_balances_no_worse_where_it_pads_as_much(case: Case) -> None:
    best, reference = case.packed("best"), case.packed("reference")
    figures = [
        (total(buckets, case.num_shards), max(loads(case.items, buckets, case.num_shards)))
        for buckets in (best, reference)
    ]
    assert figures[0] <= figures[1]


@MANY
@given(cases())
def test_best_never_leaves_more_to_reduce_after_backward_than_the_reference(case: Case) -> None:
    best, reference = case.packed("best"), case.packed("reference")
    for speed in (1, 2):
        assert exposed(case.items, best, case.num_shards, speed) <= exposed(
            case.items, reference, case.num_shards, speed
        )


@LIGHT
@given(cases(max_items=120, lonely=False))
def test_a_search_that_skips_cuts_still_pads_no_more_than_the_reference(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("layerwise.layout.cuts._MAX_PORTIONS", 20)
        assert total(case.packed("best"), case.num_shards) <= total(case.packed("reference"), case.num_shards)


def test_without_params_there_are_no_buckets() -> None:
    for packing in PACKINGS:
        assert pack([], num_shards=4, bucket_numel=64, packing=packing) == ()


def test_equal_params_on_as_many_ranks_are_not_padded() -> None:
    items = [PackItem(f"w{number}", 640, 640, 640) for number in range(12)]
    for packing in PACKINGS:
        buckets = pack(items, num_shards=4, bucket_numel=1, packing=packing)
        assert [bucket.shard_numel for bucket in buckets] == [640, 640, 640]


def test_the_reference_takes_in_a_param_that_seems_to_fit_and_grows_the_bucket() -> None:
    # The bucket is full before the last param. In backward order the shards have 2 + 2 + 7 and 6, so 3 seems to fit into
    # padding; packed by size they end with 7 + 2 + 2 and 6 + 3. 7 + 3 and 6 + 2 + 2 would have done.
    items = [PackItem(f"w{number}", 64 * size, 64 * size, 64 * size) for number, size in enumerate((2, 6, 2, 7, 3))]
    assert total(pack(items[:4], num_shards=2, bucket_numel=64, packing="reference"), 2) == 1152
    assert total(pack(items, num_shards=2, bucket_numel=64, packing="reference"), 2) == 1408
    assert total(pack(items, num_shards=2, bucket_numel=64, packing="best"), 2) == 1280


def test_a_cut_moved_by_one_param_pads_less() -> None:
    # The reference fills the second bucket before it closes it, 4 4 | 1 4 4 | 4; the best cuts are 4 4 | 1 4 | 4 4.
    items = [PackItem(f"w{number}", 64 * size, 64 * size, 64 * size) for number, size in enumerate((4, 4, 1, 4, 4, 4))]
    shards = {
        packing: [bucket.shard_numel // 64 for bucket in pack(items, num_shards=2, bucket_numel=64, packing=packing)]
        for packing in PACKINGS
    }
    assert shards == {"reference": [4, 5, 4], "reference-numel": [4, 5, 4], "best": [4, 4, 4]}


def test_the_reference_stays_where_it_pads_as_much_and_balances_better() -> None:
    # Two buckets with shards of 3 and 1 take as much as one with 4, but one deals the last param better: 9 + 2 and 4 + 3.
    numels_and_costs = [(128, 9), (64, 3), (192, 4), (64, 2)]
    items = [PackItem(f"w{number}", numel, cost, cost) for number, (numel, cost) in enumerate(numels_and_costs)]
    (best,) = pack(items, num_shards=2, bucket_numel=64, packing="best")
    assert best.shard_numel == 256
    assert sorted(loads(items, [best], 2)) == [7, 11]


def test_loads_persist_over_buckets() -> None:
    # Equal sizes, unequal costs, one bucket for each pair: dear ones alternate between the two ranks.
    costs = [10 if number % 2 else 1 for number in range(8)]
    items = [PackItem(f"w{number}", 64, cost, cost) for number, cost in enumerate(costs)]
    for packing in ("best", "reference"):
        buckets = pack(items, num_shards=2, bucket_numel=128, packing=packing)
        assert len(buckets) == 4
        assert loads(items, buckets, 2) == [22, 22]


def test_megatrons_cost_is_the_long_side_times_the_short_side_squared() -> None:
    assert megatron_cost(4096, 1024) == megatron_cost(1024, 4096) == 4096 * 1024 * 1024
    assert megatron_cost(3, 3) == 27


@MANY
@given(cases(), st.randoms(use_true_random=False))
def test_what_params_cost_changes_no_padding_of_the_references(case: Case, rng: Random) -> None:
    """They balance by Megatron's cost alone; ours finds cuts from the reference's, so their number stays too."""
    other = case._replace(items=tuple(replace(item, cost=rng.randint(0, 9999)) for item in case.items))
    assert other.packed("reference") == case.packed("reference")
    assert other.packed("reference-numel") == case.packed("reference-numel")

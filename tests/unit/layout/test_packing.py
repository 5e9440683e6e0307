import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.alignment import shard_divisor
from layerwise.layout.packing import PackedBucket, PackItem, megatron_cost, pack
from tests.reference import packing as oracle
from tests.strategies import MANY


class Case(NamedTuple):
    """What `pack` is asked."""

    items: tuple[PackItem, ...]
    num_shards: int
    bucket_numel: int

    def packed(self) -> tuple[PackedBucket, ...]:
        return pack(self.items, num_shards=self.num_shards, bucket_numel=self.bucket_numel)


@st.composite
def cases(draw: st.DrawFn, lonely: bool = True) -> Case:
    """Few distinct sizes, as in a model, or all different; names that do not sort in backward order."""
    rng = Random(draw(st.integers(0, 2**20)))
    sizes = [rng.choice([0, 1, 64, 100, 128, 192, rng.randint(1, 2000)]) for _ in range(rng.randint(1, 5))]
    numels = [rng.choice(sizes) if rng.random() < 0.8 else rng.randint(0, 3000) for _ in range(rng.randint(1, 24))]
    names = [f"w{number}" for number in range(len(numels))]
    rng.shuffle(names)
    items = [
        PackItem(
            name,
            numel,
            cost=numel * rng.choice([1, 1, 8, rng.randint(1, 30)]),
            alone=lonely and rng.random() < 0.08,
        )
        for name, numel in zip(names, numels, strict=True)
    ]
    return Case(tuple(items), draw(st.integers(1, 9)), draw(st.sampled_from([1, 64, 300, 1000, 5000, 10**6])))


def total(buckets: Sequence[PackedBucket], num_shards: int) -> int:
    return num_shards * sum(bucket.shard_numel for bucket in buckets)


def loads(items: Sequence[PackItem], buckets: Sequence[PackedBucket], num_shards: int) -> list[int]:
    cost = {item.fqn: item.cost for item in items}
    found = [0] * num_shards
    for bucket in buckets:
        for place in bucket.places:
            found[place.shard] += cost[place.fqn]
    return found


@MANY
@given(cases())
def test_every_param_has_exactly_one_place(case: Case) -> None:
    placed = [(place.fqn, place.numel) for bucket in case.packed() for place in bucket.places]
    assert sorted(placed) == sorted((item.fqn, item.numel) for item in case.items)


@MANY
@given(cases())
def test_no_param_crosses_a_shard_or_another_param_and_all_start_on_64(case: Case) -> None:
    for bucket in case.packed():
        assert list(bucket.places) == sorted(bucket.places, key=lambda place: (place.shard, place.offset))
        end_by_shard = [0] * case.num_shards
        for place in bucket.places:
            assert 0 <= place.shard < case.num_shards
            assert place.offset % 64 == 0
            assert place.offset >= end_by_shard[place.shard]
            end_by_shard[place.shard] = place.offset + place.numel
        assert max(end_by_shard) <= bucket.shard_numel


@MANY
@given(cases())
def test_shards_are_no_longer_than_the_fullest_needs(case: Case) -> None:
    divisor = shard_divisor(case.num_shards)
    assert divisor % 64 == 0
    assert divisor * case.num_shards % 128 == 0
    for bucket in case.packed():
        fullest = max(place.offset + place.numel for place in bucket.places)
        assert bucket.shard_numel % divisor == 0
        assert bucket.shard_numel - max(1, fullest) < divisor


@MANY
@given(cases())
def test_buckets_are_consecutive_in_backward_order(case: Case) -> None:
    position = {item.fqn: number for number, item in enumerate(case.items)}
    positions = [sorted(position[place.fqn] for place in bucket.places) for bucket in case.packed()]
    assert list(itertools.chain(*positions)) == list(range(len(case.items)))


@MANY
@given(cases())
def test_a_param_tied_across_stages_is_alone_at_the_start_of_shard_0(case: Case) -> None:
    lonely = {item.fqn: item.numel for item in case.items if item.alone}
    found = {}
    for bucket in case.packed():
        for place in bucket.places:
            if place.fqn in lonely:
                assert len(bucket.places) == 1
                assert (place.shard, place.offset) == (0, 0)
                found[place.fqn] = bucket.shard_numel
    divisor = shard_divisor(case.num_shards)
    assert found == {fqn: math.ceil(max(1, numel) / divisor) * divisor for fqn, numel in lonely.items()}


@MANY
@given(cases())
def test_only_the_last_bucket_or_one_at_a_tied_param_is_below_the_bucket_size(case: Case) -> None:
    lonely = {item.fqn for item in case.items if item.alone}
    buckets = case.packed()
    for bucket, following in itertools.pairwise(buckets):
        if not lonely & {place.fqn for place in (*bucket.places, *following.places)}:
            assert sum(place.numel for place in bucket.places) >= case.bucket_numel


@MANY
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_equal_params_within_a_bucket_changes_nothing(case: Case, rng: Random) -> None:
    buckets = case.packed()
    shuffled, start = [], 0
    for bucket in buckets:
        members = case.items[start : start + len(bucket.places)]
        start += len(members)
        equals: dict[tuple[int, int], list[PackItem]] = {}
        for item in members:
            equals.setdefault((item.numel, item.cost), []).append(item)
        for same in equals.values():
            rng.shuffle(same)
        shuffled += [equals[item.numel, item.cost].pop() for item in members]
    assert case._replace(items=tuple(shuffled)).packed() == buckets


@MANY
@given(cases(lonely=False))
def test_names_decide_only_between_equals(case: Case) -> None:
    renamed = case._replace(items=tuple(replace(item, fqn=f"x.{item.fqn}") for item in case.items))
    expected = [
        replace(bucket, places=tuple(replace(place, fqn=f"x.{place.fqn}") for place in bucket.places))
        for bucket in case.packed()
    ]
    assert list(renamed.packed()) == expected


@MANY
@given(cases())
def test_the_packing_is_what_looking_at_every_shard_finds(case: Case) -> None:
    params = [oracle.Param(item.fqn, item.numel, item.cost, item.alone) for item in case.items]
    expected, work = oracle.pack(params, case.num_shards, case.bucket_numel)
    found = case.packed()
    assert [bucket.shard_numel for bucket in found] == [bucket.shard_numel for bucket in expected]
    for bucket, other in zip(found, expected, strict=True):
        assert {place.fqn: (place.shard, place.offset) for place in bucket.places} == other.at
    assert loads(case.items, found, case.num_shards) == work


def test_without_params_there_are_no_buckets() -> None:
    assert pack([], num_shards=4, bucket_numel=64) == ()


def test_equal_params_on_as_many_ranks_are_not_padded() -> None:
    items = [PackItem(f"w{number}", 640, 640) for number in range(12)]
    assert [bucket.shard_numel for bucket in pack(items, num_shards=4, bucket_numel=1)] == [640, 640, 640]


def test_a_param_larger_than_a_bucket_makes_shards_as_long_as_it_and_others_fill_them() -> None:
    items = [PackItem("large", 1000, 1000), *(PackItem(f"w{number}", 64, 64) for number in range(3))]
    (bucket,) = pack(items, num_shards=2, bucket_numel=64)
    assert bucket.shard_numel == 1024
    assert {place.fqn: place.shard for place in bucket.places} == {"large": 0, "w0": 1, "w1": 1, "w2": 1}


def test_a_param_that_seems_to_fit_is_taken_in_and_grows_the_bucket() -> None:
    # The bucket is full before the last param. In backward order the shards have 2 + 2 + 7 and 6, so 3 seems to fit into
    # padding; packed by size they end with 7 + 2 + 2 and 6 + 3. 7 + 3 and 6 + 2 + 2 would have done.
    items = [PackItem(f"w{number}", 64 * size, 64 * size) for number, size in enumerate((2, 6, 2, 7, 3))]
    assert total(pack(items[:4], num_shards=2, bucket_numel=64), 2) == 1152
    assert total(pack(items, num_shards=2, bucket_numel=64), 2) == 1408


def test_no_shard_gets_more_than_1_3_of_the_mean_by_what_params_cost() -> None:
    # The cheap params are as large as the dear one. All of them on the other rank would balance costs and take 3 of 4.
    items = [PackItem("dear", 640, 100), *(PackItem(f"cheap{number}", 640, 1) for number in range(3))]
    (bucket,) = pack(items, num_shards=2, bucket_numel=10**6)
    assert bucket.shard_numel == 1280
    assert loads(items, [bucket], 2) == [101, 2]


def test_loads_persist_over_buckets() -> None:
    # Equal sizes, unequal costs, one bucket for each pair: dear ones alternate between the two ranks.
    costs = [10 if number % 2 else 1 for number in range(8)]
    items = [PackItem(f"w{number}", 64, cost) for number, cost in enumerate(costs)]
    buckets = pack(items, num_shards=2, bucket_numel=128)
    assert len(buckets) == 4
    assert loads(items, buckets, 2) == [22, 22]


def test_megatrons_cost_is_the_long_side_times_the_short_side_squared() -> None:
    assert megatron_cost(4096, 1024) == megatron_cost(1024, 4096) == 4096 * 1024 * 1024
    assert megatron_cost(3, 3) == 27

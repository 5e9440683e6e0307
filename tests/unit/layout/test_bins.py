import itertools
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.bins import Fitter, first_fit, longest_first, lower_bound
from tests.strategies import LIGHT, MANY

Sizes = tuple[tuple[int, ...], tuple[int, ...], int]


def drawn(rng: Random, most: int) -> Sizes:
    """Descending sizes, how many of each (some none), and shards."""
    sizes = tuple(sorted({rng.randint(1, 12) for _ in range(rng.randint(1, 4))}, reverse=True))
    counts = tuple(rng.choice([0, 1, 1, 2, 3, most]) for _ in sizes)
    return sizes, counts, rng.randint(1, 5)


def some(most: int) -> st.SearchStrategy[Sizes]:
    return st.integers(0, 2**16).map(lambda seed: drawn(Random(seed), most))


def spread(sizes: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
    return [size for size, count in zip(sizes, counts, strict=True) for _ in range(count)]


def smallest_shard(values: list[int], num_shards: int) -> int:
    """By trying everything."""
    return min(
        max(sum(v for v, s in zip(values, where, strict=True) if s == shard) for shard in range(num_shards))
        for where in itertools.product(range(num_shards), repeat=len(values))
    )


@MANY
@given(some(9), st.integers(1, 60))
def test_first_fit_by_counts_is_first_fit_one_by_one(case: Sizes, capacity: int) -> None:
    sizes, counts, num_shards = case
    ends: list[int] = []
    for value in spread(sizes, counts):
        shard = next((shard for shard, end in enumerate(ends) if end + value <= capacity), len(ends))
        ends[shard : shard + 1] = [(ends[shard] if shard < len(ends) else 0) + value]
    found = first_fit(sizes, counts, num_shards, capacity)
    if len(ends) > num_shards or max(ends, default=0) > capacity:
        assert found is None
        return
    assert found is not None
    filled = [sum(sizes[kind] * take for kind, take in pattern) for pattern, repeats in found for _ in range(repeats)]
    assert sorted(filled) == sorted(ends)
    for kind, count in enumerate(counts):
        assert sum(dict(pattern).get(kind, 0) * repeats for pattern, repeats in found) == count


@MANY
@given(some(9))
def test_longest_first_by_counts_is_longest_first_one_by_one(case: Sizes) -> None:
    sizes, counts, num_shards = case
    ends = [0] * num_shards
    for value in spread(sizes, counts):
        ends[ends.index(min(ends))] += value
    assert longest_first(sizes, counts, num_shards) == max(ends)


@LIGHT
@given(some(2).filter(lambda case: len(spread(*case[:2])) <= 6))
def test_the_shard_found_lies_between_the_bound_and_the_guarantee_of_first_fit(case: Sizes) -> None:
    sizes, counts, num_shards = case
    best = smallest_shard(spread(sizes, counts), num_shards)
    found = Fitter(sizes, num_shards, divisor=1).fit(counts, cap=10**6)
    assert found is not None
    assert lower_bound(sizes, counts, num_shards) <= best <= found
    assert found <= longest_first(sizes, counts, num_shards) or not any(counts)
    # First-fit-decreasing needs no more than 13/11 of the smallest capacity (Yue); an empty bucket has one element.
    assert found <= max(1, Fraction(13, 11) * best)


@MANY
@given(some(9), st.sampled_from([1, 2, 4]), st.lists(st.integers(1, 80), max_size=4))
def test_answers_do_not_contradict_each_other(case: Sizes, divisor: int, caps: list[int]) -> None:
    sizes, counts, num_shards = case
    fitter = Fitter(sizes, num_shards, divisor)
    answers = [(cap, fitter.fit(counts, cap)) for cap in (*caps, 10**6)]
    final = answers[-1][1]
    assert final is not None
    assert final % divisor == 0
    for cap, answer in answers:
        assert answer is None or (answer <= cap and answer == final)
        assert answer is not None or cap < final


@pytest.mark.parametrize(
    ("sizes", "counts", "num_shards", "expected"),
    [
        ((7, 2), (2, 0), 4, 7),  # the largest
        ((3,), (9,), 4, 9),  # pigeonholes: three of the nine share a shard
        ((4, 3), (4, 4), 4, 7),  # the mean
    ],
)
def test_the_lower_bound(sizes: tuple[int, ...], counts: tuple[int, ...], num_shards: int, expected: int) -> None:
    assert lower_bound(sizes, counts, num_shards) == expected

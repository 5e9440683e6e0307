import itertools
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.layout.bins import Fitter
from layerwise.layout.cuts import Cuttable, Portion, best_cuts, exposed_numel
from tests.strategies import LIGHT, MANY


class Counting(Fitter):
    """A shard length that follows from counts alone, however strange, so that all cuts can be tried."""

    def __init__(self, sizes: Sequence[int], num_shards: int) -> None:
        super().__init__(sizes, num_shards, 1)
        self.sizes, self.num_shards = sizes, num_shards

    def bound(self, counts: Sequence[int]) -> int:
        numel = sum(size * count for size, count in zip(self.sizes, counts, strict=True))
        largest = max(size for size, count in zip(self.sizes, counts, strict=True) if count)
        return max(largest, -(-numel // self.num_shards))

    def shard(self, counts: Sequence[int]) -> int:
        return self.bound(counts) + 64 * (sum(counts) % 3)

    def fit(self, counts: tuple[int, ...], cap: int) -> int | None:
        shard = self.shard(counts)
        return shard if shard <= cap else None


class Case(NamedTuple):
    params: Cuttable
    fitter: Counting
    known: list[Portion]

    def counts(self, start: int, stop: int) -> list[int]:
        kinds = self.params.kinds[start:stop]
        return [kinds.count(kind) for kind in range(len(self.params.sizes))]

    def portion(self, start: int, stop: int) -> Portion:
        return Portion(start, stop, self.fitter.shard(self.counts(start, stop)))

    def meets_the_rules(self, portions: Sequence[Portion]) -> bool:
        """Every param that must be alone is, and buckets that need not end early have their size."""
        params = self.params
        for portion in portions:
            alone = params.alone[portion.start : portion.stop]
            if any(alone):
                if len(alone) > 1:
                    return False
                continue
            last = portion.stop == len(params.numels) or params.alone[portion.stop]
            if not last and sum(params.numels[portion.start : portion.stop]) < params.bucket_numel:
                return False
        return True

    def all_cuts(self) -> list[list[Portion]]:
        inner = range(1, len(self.params.numels))
        found = []
        for number in range(len(self.params.numels)):
            for cuts in itertools.combinations(inner, number):
                borders = [0, *cuts, len(self.params.numels)]
                found.append([self.portion(*pair) for pair in itertools.pairwise(borders)])
        return [portions for portions in found if self.meets_the_rules(portions)]


def total(portions: Sequence[Portion]) -> int:
    return sum(portion.shard_numel for portion in portions)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = Random(draw(st.integers(0, 2**20)))
    sizes = sorted({64 * rng.randint(1, 20) for _ in range(rng.randint(1, 3))}, reverse=True)
    kinds = [rng.randrange(len(sizes)) for _ in range(rng.randint(1, 8))]
    num_shards = rng.randint(1, 4)
    params = Cuttable(
        numels=[sizes[kind] for kind in kinds],
        alone=[rng.random() < 0.1 for _ in kinds],
        kinds=kinds,
        sizes=sizes,
        num_shards=num_shards,
        bucket_numel=rng.choice([1, 20 * 64, 40 * 64]),
    )
    case = Case(params, Counting(sizes, num_shards), [])
    return case._replace(known=rng.choice(case.all_cuts()))


def exposed(case: Case, portions: Sequence[Portion], speed: int) -> int:
    """At the end of backward: what of each bucket, or of those after it, has had no time yet. The worst bucket counts."""
    numels, num_shards = case.params.numels, case.params.num_shards
    everything = speed * sum(numels)
    return max(
        speed * sum(numels[: portion.stop]) + num_shards * total(portions[number:]) - everything
        for number, portion in enumerate(portions)
    )


@MANY
@given(cases())
def test_what_is_exposed_is_what_the_worst_bucket_leaves(case: Case) -> None:
    for speed in (1, 2, 5):
        found = exposed_numel(case.params.numels, case.known, case.params.num_shards, speed)
        assert found == exposed(case, case.known, speed)


@settings(MANY, max_examples=400)
@given(cases())
def test_no_cuts_that_expose_as_little_pad_less(case: Case) -> None:
    allowed = [
        portions
        for portions in case.all_cuts()
        if all(exposed(case, portions, speed) <= exposed(case, case.known, speed) for speed in (1, 2))
    ]
    found = best_cuts(case.params, case.fitter, case.known)
    assert found in allowed
    least = min(total(portions) for portions in allowed)
    assert total(found) == least
    equals = [(exposed(case, portions, 1), -len(portions)) for portions in allowed if total(portions) == least]
    assert (exposed(case, found, 1), -len(found)) == min(equals)


@LIGHT
@given(cases())
def test_a_known_packing_is_not_lost_where_the_fitter_finds_none_as_good(case: Case) -> None:
    known = [
        Portion(portion.start, portion.stop, case.fitter.bound(case.counts(portion.start, portion.stop)))
        for portion in case.known
    ]
    assert total(best_cuts(case.params, case.fitter, known)) <= total(known)

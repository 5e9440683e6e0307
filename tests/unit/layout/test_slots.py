"""Places for passages: none overlaps another that is alive, and idle gradients are idle."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.slots import OWN, IdleRun, Slot, passage_nbytes, place_slots, usable
from layerwise.routing.spec import table_of

SIZES = st.lists(st.integers(0, 20).map(lambda number: 64 * number), max_size=8)


def alive_together(count: int) -> set[tuple[int, int]]:
    """Pairs of cohorts that are under way at the same time, by walking through the exchange one thing at a time."""
    under_way: set[int] = set()
    pairs: set[tuple[int, int]] = set()

    def set_out(cohort: int) -> None:
        under_way.add(cohort)
        pairs.update(combinations(sorted(under_way), 2))

    for cohort in range(count):
        if cohort == 0:
            set_out(0)
        if cohort + 1 < count:
            set_out(cohort + 1)
        under_way.discard(cohort - 1)  # its updates are taken home while this one's are on their way back
    return pairs


@given(st.lists(SIZES, max_size=3), st.lists(st.integers(0, 2000), max_size=3))
@settings(max_examples=300)
def test_passages_that_are_alive_together_have_places_of_their_own(
    domains: list[list[int]], regions: list[int]
) -> None:
    plan = place_slots(domains, regions)
    assert [len(slots) for slots in plan.slots] == [len(passages) for passages in domains]
    for passages, slots in zip(domains, plan.slots, strict=True):
        assert [slot.stop - slot.start for slot in slots] == passages
        for one, other in alive_together(len(slots)):
            assert not slots[one].overlaps(slots[other])
        for slot in slots:
            assert slot.start % 64 == 0
            assert slot.stop <= (plan.own_nbytes if slot.region == OWN else regions[slot.region])


@given(SIZES)
@settings(max_examples=200)
def test_memory_is_not_much_more_than_what_is_alive_at_once(passages: list[int]) -> None:
    own = place_slots([passages]).own_nbytes
    alive = max((sum(passages[max(0, last - 2) : last + 1]) for last in range(len(passages))), default=0)
    assert alive <= own <= 2 * alive


def test_equal_passages_go_round_in_three_places() -> None:
    (slots,) = place_slots([[64] * 7]).slots
    assert [slot.start for slot in slots] == [0, 64, 128, 0, 64, 128, 0]


def test_domains_use_the_same_places_one_after_the_other() -> None:
    assert place_slots([[64, 64], [192]]).own_nbytes == 192
    assert place_slots([]).own_nbytes == place_slots([[]]).own_nbytes == 0


def test_what_does_not_fit_into_gradients_has_memory_of_its_own() -> None:
    (slots,), own = place_slots([[64, 640, 64]], [100, 128])
    assert slots == (Slot(0, 0, 64), Slot(OWN, 0, 640), Slot(1, 0, 64))
    assert own == 640


@pytest.mark.parametrize("layout", ["flat", "padded", "compact", "replicated"])
@pytest.mark.parametrize("grad_dtype", [DType.FP32, DType.BF16])
def test_idle_runs_are_what_no_shard_of_this_rank_needs(layout: str, grad_dtype: DType) -> None:
    table = table_of([(f"{number}.weight", (20 + number, 16)) for number in range(6)])
    plan = make_plan(table, Options(layout=layout, bucket_numel=700, grad_dtype=grad_dtype), world=3)
    assert len(plan.buckets) > 1
    for rank in range(3):
        idle = [[False] * buffer.numel for buffer in plan.buffers]
        for run in plan.idle_runs({"dense": rank}):
            for place in range(run.start, run.stop):
                assert not idle[run.buffer][place]
                idle[run.buffer][place] = True
        for number, buffer in enumerate(plan.buffers):
            needed = [False] * buffer.numel
            for bucket in buffer.buckets:
                part = bucket.shard_part(rank)
                for place in range(bucket.offset + part.start, bucket.offset + part.stop):
                    needed[place] = grad_dtype is DType.FP32
            assert idle[number] == [not need for need in needed]


def test_runs_begin_where_a_slot_may() -> None:
    assert usable([IdleRun(0, 1, 100), IdleRun(1, 3, 5)], 4) == [IdleRun(0, 64, 400)]
    assert passage_nbytes(1, 65) == 64 + 128


def test_sharded_gradients_leave_none_to_lease() -> None:
    with pytest.raises(ValueError, match=r"staging='gradients' with shard_grads=True.*Use staging='slots'"):
        make_plan(
            table_of([("a.weight", (8, 8))]), Options(layout="flat", staging="gradients", shard_grads=True), world=2
        )

"""Places for passages: none overlaps another that is alive."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.layout.slots import passage_nbytes, place_slots

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


@given(st.lists(SIZES, max_size=3))
@settings(max_examples=300)
def test_passages_that_are_alive_together_have_places_of_their_own(domains: list[list[int]]) -> None:
    plan = place_slots(domains)
    assert [len(slots) for slots in plan.slots] == [len(passages) for passages in domains]
    for passages, slots in zip(domains, plan.slots, strict=True):
        assert [slot.stop - slot.start for slot in slots] == passages
        for one, other in alive_together(len(slots)):
            assert not slots[one].overlaps(slots[other])
        for slot in slots:
            assert slot.start % 64 == 0
            assert slot.stop <= plan.nbytes


@given(SIZES)
@settings(max_examples=200)
def test_memory_is_not_much_more_than_what_is_alive_at_once(passages: list[int]) -> None:
    nbytes = place_slots([passages]).nbytes
    alive = max((sum(passages[max(0, last - 2) : last + 1]) for last in range(len(passages))), default=0)
    assert alive <= nbytes <= 2 * alive


def test_equal_passages_go_round_in_three_places() -> None:
    (slots,) = place_slots([[64] * 7]).slots
    assert [slot.start for slot in slots] == [0, 64, 128, 0, 64, 128, 0]


def test_domains_use_the_same_places_one_after_the_other() -> None:
    assert place_slots([[64, 64], [192]]).nbytes == 192
    assert place_slots([]).nbytes == place_slots([[]]).nbytes == 0


def test_what_is_sent_and_what_is_received_begin_where_any_dtype_may() -> None:
    assert passage_nbytes(1, 65) == 64 + 128

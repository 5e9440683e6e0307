"""Slots: where the pieces of matrices lie while they travel.

A passage is one cohort's way to its homes and back: what a rank sends and what it receives lie in one slot, first there,
then back, until the updates are home. When cohort k + 1 sets out, k is arriving and k - 1 is on its way back, so three
passages are alive at most, and each is given a place that none of the other two has. The places are decided here, before
anything is allocated; that memory is all the staging an exchange ever needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from layerwise.routing.geometry import ceil_to

_ALIVE = 3
"""Passages that are alive at once."""

_ALIGNMENT = 64
"""Bytes: what is sent and what is received begin where any dtype and any copy kernel may begin."""


def passage_nbytes(sent: int, received: int) -> int:
    """Bytes of a slot that holds these."""
    return ceil_to(sent, _ALIGNMENT) + ceil_to(received, _ALIGNMENT)


class Slot(NamedTuple):
    """A place for one passage, in bytes."""

    start: int
    stop: int

    def overlaps(self, other: Slot) -> bool:
        return self.start < other.stop and other.start < self.stop


class SlotPlan(NamedTuple):
    """The slot of every passage, domain by domain, and the bytes of memory in which all of them lie."""

    slots: tuple[tuple[Slot, ...], ...]
    nbytes: int


def place_slots(passages: Iterable[Sequence[int]]) -> SlotPlan:
    """Places for the passages of each domain, from their bytes. Domains come one after the other and use the same places
    again."""
    placed = tuple(tuple(_places(domain)) for domain in passages)
    return SlotPlan(placed, max((slot.stop for domain in placed for slot in domain), default=0))


def _places(passages: Sequence[int]) -> list[Slot]:
    """The largest first, each at the lowest place that no other has while it is alive."""
    found: dict[int, Slot] = {}
    for number in sorted(range(len(passages)), key=lambda number: (-passages[number], number)):
        reach = range(number - _ALIVE + 1, number + _ALIVE)
        others = [found[other] for other in reach if other in found]
        found[number] = next(
            slot for slot in _starts(passages[number], others) if not any(slot.overlaps(other) for other in others)
        )
    return [found[number] for number in range(len(passages))]


def _starts(nbytes: int, others: Sequence[Slot]) -> Iterator[Slot]:
    """A slot of `nbytes` at the beginning, and one right behind each of the others, lowest first."""
    for start in sorted({0, *(slot.stop for slot in others)}):
        yield Slot(start, start + nbytes)

"""Slots: where the pieces of matrices lie while they travel.

A passage is one cohort's way to its homes and back: what a rank sends and what it receives lie in one slot, first there,
then back, until the updates are home. When cohort k + 1 sets out, k is arriving and k - 1 is on its way back, so three
passages are alive at most, and each is given a place that none of the other two has. The places are decided here, before
anything is allocated; that memory is all the staging an exchange ever needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from layerwise.layout.buckets import BufferPlan
from layerwise.routing.geometry import ceil_to

Staging = Literal["slots", "gradients"]
STAGINGS: tuple[Staging, ...] = ("slots", "gradients")
"""Where slots lie. slots: in memory of their own. gradients: in gradient memory that is idle during the exchange, as far
as it goes."""

OWN = -1
"""The region of memory that is for slots only."""

_ALIVE = 3
"""Passages that are alive at once."""

_ALIGNMENT = 64
"""Bytes: what is sent and what is received begin where any dtype and any copy kernel may begin."""


def passage_nbytes(sent: int, received: int) -> int:
    """Bytes of a slot that holds these."""
    return ceil_to(sent, _ALIGNMENT) + ceil_to(received, _ALIGNMENT)


class Slot(NamedTuple):
    """A place for one passage, in bytes."""

    region: int
    """`OWN`, or the number of an idle run of gradients."""
    start: int
    stop: int

    def overlaps(self, other: Slot) -> bool:
        return self.region == other.region and self.start < other.stop and other.start < self.stop


class SlotPlan(NamedTuple):
    """Where every passage of every domain lies, and how much memory of its own that takes."""

    slots: tuple[tuple[Slot, ...], ...]
    own_nbytes: int


def place_slots(passages: Iterable[Sequence[int]], regions: Sequence[int] = ()) -> SlotPlan:
    """Places for the passages of each domain, from their bytes: in regions of so many bytes where there is room, else in
    memory of their own. Domains come one after the other and use the same places again."""
    placed = tuple(tuple(_places(domain, regions)) for domain in passages)
    own = max((slot.stop for domain in placed for slot in domain if slot.region == OWN), default=0)
    return SlotPlan(placed, own)


def _places(passages: Sequence[int], regions: Sequence[int]) -> list[Slot]:
    """The largest first, each at the lowest place that no other has while it is alive."""
    found: dict[int, Slot] = {}
    for number in sorted(range(len(passages)), key=lambda number: (-passages[number], number)):
        reach = range(number - _ALIVE + 1, number + _ALIVE)
        others = [found[other] for other in reach if other in found]
        found[number] = next(
            slot
            for region, room in (*enumerate(regions), (OWN, None))
            for slot in _starts(region, passages[number], others)
            if (room is None or slot.stop <= room) and not any(slot.overlaps(other) for other in others)
        )
    return [found[number] for number in range(len(passages))]


def _starts(region: int, nbytes: int, others: Sequence[Slot]) -> Iterator[Slot]:
    """At the beginning of a region, or right behind somebody."""
    for start in sorted({0, *(slot.stop for slot in others if slot.region == region)}):
        yield Slot(region, start, start + nbytes)


class IdleRun(NamedTuple):
    """A stretch of a buffer's gradient memory that nobody needs between the reduction and the next backward."""

    buffer: int
    start: int
    stop: int


def idle_runs(buffers: Sequence[BufferPlan], ranks: Mapping[str, int], *, keeps_shards: bool) -> Iterator[IdleRun]:
    """What is idle of each buffer's full gradients on a rank that has these numbers in its domains: all but its own shards,
    or all where reduced shards are not kept in there."""
    for number, buffer in enumerate(buffers):
        start = 0
        for bucket in sorted(buffer.buckets, key=lambda bucket: bucket.offset):
            if keeps_shards:
                part = bucket.shard_part(ranks[buffer.key.domain])
                low, high = bucket.offset + part.start, bucket.offset + part.stop
                if low > start:
                    yield IdleRun(number, start, low)
                start = high
        if buffer.numel > start:
            yield IdleRun(number, start, buffer.numel)


def usable(runs: Iterable[IdleRun], itemsize: int) -> list[IdleRun]:
    """The same runs, each from where a slot may begin, in bytes of its buffer."""
    found = (IdleRun(run.buffer, ceil_to(run.start * itemsize, _ALIGNMENT), run.stop * itemsize) for run in runs)
    return [run for run in found if run.stop > run.start]

"""Slots: the staging memory of the exchange, a ring of a few equal pieces that passages lease in turn.

A passage is one all-to-all of one cohort, there or back: what a rank sends and what it receives lie in one slot until the
passage was waited for and unpacked. While cohort k is orthogonalised, k + 1 is on its way, k - 1 is coming back, and k
itself has not left its slot yet when k + 1 sets out: three slots are enough for any number of cohorts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from layerwise.layout.storage import BufferPlan
from layerwise.routing.geometry import ceil_to

Staging = Literal["slots", "gradients"]
STAGINGS: tuple[Staging, ...] = ("slots", "gradients")
"""Where slots lie. slots: in memory of their own. gradients: in gradient memory that is idle during the exchange, as far
as it goes."""

MOST_SLOTS = 3

_ALIGNMENT = 64
"""Bytes: what is sent and what is received begin where any dtype and any copy kernel may begin."""


def passage_nbytes(sent: int, received: int) -> int:
    """Bytes of a slot that holds these."""
    return ceil_to(sent, _ALIGNMENT) + ceil_to(received, _ALIGNMENT)


class SlotPlan(NamedTuple):
    """How many slots, and how large."""

    number: int
    nbytes: int


def slots_for(passages: Iterable[Sequence[int]]) -> SlotPlan:
    """The ring of one rank, from the bytes of each moving cohort's passage, domain by domain."""
    number = nbytes = 0
    for domain in passages:
        number = max(number, min(MOST_SLOTS, len(domain)))
        nbytes = max(nbytes, *domain, 0)
    return SlotPlan(number, nbytes)


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
                shard = bucket.shard_of(ranks[buffer.key.domain])
                low, high = (bucket.offset + bucket.shard_start(side) for side in (shard, shard + 1))
                if low > start:
                    yield IdleRun(number, start, low)
                start = high
        if buffer.numel > start:
            yield IdleRun(number, start, buffer.numel)


class Carved(NamedTuple):
    """A slot inside gradient memory."""

    buffer: int
    start: int
    """In elements."""


def carve(runs: Iterable[IdleRun], slots: SlotPlan, itemsize: int) -> tuple[Carved, ...]:
    """As many of the slots as fit into idle gradients, one after the other."""
    step = ceil_to(slots.nbytes, _ALIGNMENT) // itemsize
    found: list[Carved] = []
    for run in runs:
        start = ceil_to(run.start * itemsize, _ALIGNMENT) // itemsize
        while len(found) < slots.number and start + step <= run.stop:
            found.append(Carved(run.buffer, start))
            start += step
    return tuple(found)

"""Whole params in equal shards: the packing of the `padded` layout, which is that of Megatron-LM's main.

Params come in backward order and are cut into buckets. A bucket has one shard per rank, all of the same length, and every
param lies whole in one of them, so the rank that stores a matrix is the rank that orthogonalises it. The fullest shard
decides the length; the rest of the other shards is padding, which takes memory on every rank and travels in every step.

1. A bucket is full when it has `bucket_numel` elements and 0.9 of what shards as long as its largest param hold. It takes
   further params as long as they seem to fit into its padding.
2. Params of a bucket are dealt to shards greedily: the dearest first, equally dear ones by fqn, each to the rank with least
   to do over all buckets so far, as long as no shard gets more than 1.3 of the mean; else to the emptiest shard.
3. A weight that is tied across pipeline stages has a bucket of its own and lies in shard 0.

Dear is `megatron_cost`. tests/reference/packing.py is the slow form of these rules.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from layerwise.layout.alignment import PARAM_ALIGNMENT, shard_divisor
from layerwise.routing.geometry import ceil_to


@dataclass(frozen=True, slots=True)
class PackItem:
    """A param to pack."""

    fqn: str
    numel: int
    cost: int
    """The sum of `megatron_cost` over its matrices; of a param without matrices its elements, as Megatron-LM has it."""
    alone: bool = False
    """Tied across pipeline stages: in a bucket of its own and in shard 0, so that it lies in the same place on all of
    them."""


def megatron_cost(rows: int, cols: int) -> int:
    """What Megatron-LM takes a matrix to cost: long * short^2, whichever form will run."""
    short, long = min(rows, cols), max(rows, cols)
    return long * short * short


@dataclass(frozen=True, slots=True)
class Place:
    """A param's place: a shard and where it starts there, in elements."""

    fqn: str
    shard: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class PackedBucket:
    """A bucket's shards, all of one length, and what lies in them by shard and offset."""

    shard_numel: int
    places: tuple[Place, ...]


def pack(items: Sequence[PackItem], *, num_shards: int, bucket_numel: int) -> tuple[PackedBucket, ...]:
    """Buckets and places of params given in backward order.

    >>> (bucket,) = pack([PackItem("b", 64, 9), PackItem("a", 128, 9)], num_shards=2, bucket_numel=1)
    >>> bucket.shard_numel, [(place.fqn, place.shard, place.offset) for place in bucket.places]
    (128, [('a', 0, 0), ('b', 1, 0)])
    """
    loads = [0] * num_shards
    buckets = []
    for portion in _portions(items, num_shards, bucket_numel):
        shards = _dealt(portion, loads)
        loads = [load + sum(item.cost for item in members) for load, members in zip(loads, shards, strict=True)]
        buckets.append(_bucket(shards))
    return tuple(buckets)


_Shards = list[list[PackItem]]
"""The params of every shard of a bucket, in the order in which they lie there."""


def _bucket(shards: _Shards) -> PackedBucket:
    places, fullest = [], 1
    for shard, members in enumerate(shards):
        offset = 0
        for item in members:
            places.append(Place(item.fqn, shard, offset, item.numel))
            offset += ceil_to(item.numel, PARAM_ALIGNMENT)
        fullest = max(fullest, offset)
    return PackedBucket(ceil_to(fullest, shard_divisor(len(shards))), tuple(places))


class _Filling:
    """The shards of one bucket while they fill up. Loads are those of ranks and include earlier buckets."""

    def __init__(self, loads: Sequence[int]) -> None:
        self.shards: _Shards = [[] for _ in loads]
        self._loads = list(loads)
        self._ends = [0] * len(loads)
        # Heaps whose entries go stale: one is true while it says what `_loads` and `_ends` say.
        self._by_end = [(0, shard) for shard in range(len(loads))]
        self._by_load_at = {0: sorted((load, shard) for shard, load in enumerate(loads))}

    def put(self, item: PackItem, shard: int) -> None:
        """Add a param to a shard."""
        end = ceil_to(self._ends[shard], PARAM_ALIGNMENT) + item.numel
        self._ends[shard] = end
        self._loads[shard] += item.cost
        self.shards[shard].append(item)
        heapq.heappush(self._by_end, (end, shard))
        start = ceil_to(end, PARAM_ALIGNMENT)
        heapq.heappush(self._by_load_at.setdefault(start, []), (self._loads[shard], shard))

    def emptiest(self) -> int:
        """The shard with the least in it."""
        while self._by_end[0][0] != self._ends[self._by_end[0][1]]:
            heapq.heappop(self._by_end)
        return self._by_end[0][1]

    def least_loaded(self, numel: int, cap: int) -> int | None:
        """The shard of the rank with least to do, among those with room for so many elements under a cap."""
        best: tuple[int, int] | None = None
        for start in [start for start in self._by_load_at if start + numel <= cap]:
            heap = self._by_load_at[start]
            while heap and not self._is_true(start, *heap[0]):
                heapq.heappop(heap)
            if not heap:
                del self._by_load_at[start]
            elif best is None or heap[0] < best:
                best = heap[0]
        return None if best is None else best[1]

    def _is_true(self, start: int, load: int, shard: int) -> bool:
        return ceil_to(self._ends[shard], PARAM_ALIGNMENT) == start and self._loads[shard] == load


def _portions(items: Iterable[PackItem], num_shards: int, bucket_numel: int) -> Iterator[list[PackItem]]:
    """The params of every bucket. Whether a param fits into padding is asked of a rough packing in backward order."""
    divisor = shard_divisor(num_shards)
    portion: list[PackItem] = []
    numel, largest, rough_ends, last_end = 0, 0, [0] * num_shards, 0
    for item in items:
        is_full = numel >= max(bucket_numel, 9 * num_shards * largest // 10)
        start = ceil_to(rough_ends[0], PARAM_ALIGNMENT)
        fits = start + item.numel <= ceil_to(last_end, divisor)
        if portion and (item.alone or portion[0].alone or (is_full and not fits)):
            yield portion
            portion = []
            numel, largest, rough_ends, last_end, start = 0, 0, [0] * num_shards, 0, 0
        portion.append(item)
        numel += item.numel
        largest = max(largest, item.numel)
        heapq.heapreplace(rough_ends, start + item.numel)
        last_end = max(last_end, start + item.numel)
    if portion:
        yield portion


def _dealt(portion: Sequence[PackItem], loads: Sequence[int]) -> _Shards:
    """The params of a bucket by shard, on top of the loads that ranks have from earlier buckets."""
    if portion[0].alone:
        return [list(portion), *([] for _ in loads[1:])]
    filling = _Filling(loads)
    cap = 13 * sum(item.numel for item in portion) // (10 * len(loads))
    for item in sorted(portion, key=lambda item: (-item.cost, item.fqn)):
        shard = filling.least_loaded(item.numel, cap)
        filling.put(item, filling.emptiest() if shard is None else shard)
    return filling.shards

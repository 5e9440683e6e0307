"""Whole params in equal shards: the packing of the `padded` layout.

Params come in backward order. They are cut into buckets; a bucket has one shard per rank, all of the same length, and
every param lies whole in one of them, so the rank that stores a matrix is the rank that orthogonalises it. What the
fullest shard has and the others do not is padding: it takes memory on every rank and travels in every step.

`best` minimises, in this order and always in the same way on every rank:

1. padding, over all cuts into buckets (`layout/cuts.py`) and several packings of each (`layout/bins.py`). The bucket size
   is a soft minimum, and overlap is not traded away: buckets may be fewer than in `reference` only where less is left to
   reduce when backward ends;
2. the Newton-Schulz FLOPs of the busiest rank (`layout/cost.py`), with loads that persist over buckets;
3. what is left to reduce when backward ends, then buckets: the more, the better.

It is never worse than `reference` in 1, nor in 2 where 1 is equal. `reference` and `reference-numel` are the packings of
Megatron-LM today and before mid-2026, for comparison, and keep what those balance by: `megatron_cost`, and elements.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from layerwise.config.layouts import Packing
from layerwise.layout.alignment import PARAM_ALIGNMENT, shard_divisor
from layerwise.layout.bins import Fitter, first_fit
from layerwise.layout.cuts import Cuttable, Portion, best_cuts
from layerwise.routing.geometry import ceil_to


@dataclass(frozen=True, slots=True)
class PackItem:
    """A param to pack."""

    fqn: str
    numel: int
    cost: int
    """FLOPs of Newton-Schulz of all its matrices together: what `best` balances."""
    megatron_cost: int
    """What `reference` balances."""
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


def pack(
    items: Sequence[PackItem], *, num_shards: int, bucket_numel: int, packing: Packing
) -> tuple[PackedBucket, ...]:
    """Buckets and places of params given in backward order.

    >>> (bucket,) = pack([PackItem("b", 64, 9, 9), PackItem("a", 128, 9, 9)], num_shards=2, bucket_numel=1, packing="best")
    >>> bucket.shard_numel, [(place.fqn, place.shard, place.offset) for place in bucket.places]
    (128, [('a', 0, 0), ('b', 1, 0)])
    """
    match packing:
        case "best":
            drafts = _best(items, num_shards, bucket_numel)
        case "reference":
            drafts = _reference(items, num_shards, bucket_numel)
        case "reference-numel":
            drafts = _reference_numel(items, num_shards, bucket_numel)
    return tuple(_bucket(shards) for shards in drafts)


_Shards = list[list[PackItem]]
"""The params of every shard of a bucket, in the order in which they lie there."""


def _aligned(item: PackItem) -> int:
    return ceil_to(item.numel, PARAM_ALIGNMENT)


def _shard_numel(shards: _Shards) -> int:
    fullest = max(sum(map(_aligned, members)) for members in shards)
    return ceil_to(max(1, fullest), shard_divisor(len(shards)))


def _bucket(shards: _Shards) -> PackedBucket:
    places = []
    for shard, members in enumerate(shards):
        offset = 0
        for item in members:
            places.append(Place(item.fqn, shard, offset, item.numel))
            offset += _aligned(item)
    return PackedBucket(_shard_numel(shards), tuple(places))


_Cost = Callable[[PackItem], int]
_OURS: _Cost = attrgetter("cost")
_MEGATRONS: _Cost = attrgetter("megatron_cost")


def _costs(shards: _Shards, cost: _Cost) -> list[int]:
    return [sum(map(cost, members)) for members in shards]


def _plus(loads: Iterable[int], costs: Iterable[int]) -> list[int]:
    return [load + cost for load, cost in zip(loads, costs, strict=True)]


def _loads(drafts: Iterable[_Shards], num_shards: int, cost: _Cost) -> list[int]:
    """Newton-Schulz cost of every rank, over all buckets."""
    loads = [0] * num_shards
    for shards in drafts:
        loads = _plus(loads, _costs(shards, cost))
    return loads


def _dearest_first(items: Iterable[PackItem], cost: _Cost) -> list[PackItem]:
    return sorted(items, key=lambda item: (-cost(item), item.fqn))


def _by_numel(item: PackItem) -> tuple[int, str]:
    return -item.numel, item.fqn


class _Filling:
    """The shards of one bucket while they fill up. Loads are those of ranks and include earlier buckets."""

    def __init__(self, loads: Sequence[int], cost: _Cost) -> None:
        self._cost = cost
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
        self._loads[shard] += self._cost(item)
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


def _reference_portions(
    items: Iterable[PackItem], num_shards: int, bucket_numel: int, *, fill_up: bool
) -> Iterator[list[PackItem]]:
    """A bucket is full when it has its size and 0.9 of what shards as long as its largest param hold. With `fill_up` it
    goes on for as long as the next param seems to fit into padding, by a rough packing in backward order."""
    divisor = shard_divisor(num_shards)
    portion: list[PackItem] = []
    numel, largest, rough_ends, last_end = 0, 0, [0] * num_shards, 0
    for item in items:
        is_full = numel >= max(bucket_numel, 9 * num_shards * largest // 10)
        start = ceil_to(rough_ends[0], PARAM_ALIGNMENT)
        fits = fill_up and start + item.numel <= ceil_to(last_end, divisor)
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


def _reference_numel(items: Sequence[PackItem], num_shards: int, bucket_numel: int) -> list[_Shards]:
    """The largest first, each to the emptiest shard."""
    drafts = []
    for portion in _reference_portions(items, num_shards, bucket_numel, fill_up=False):
        filling = _Filling([0] * num_shards, _MEGATRONS)
        for item in sorted(portion, key=_by_numel):
            filling.put(item, filling.emptiest())
        drafts.append(filling.shards)
    return drafts


def _reference(items: Sequence[PackItem], num_shards: int, bucket_numel: int) -> list[_Shards]:
    """The dearest first, each to the rank with least to do over all buckets, as long as no shard gets more than 1.3 of
    the mean; then to the emptiest."""
    loads = [0] * num_shards
    drafts = []
    for portion in _reference_portions(items, num_shards, bucket_numel, fill_up=True):
        if portion[0].alone:
            drafts.append(_in_first_shard(portion, num_shards))
        else:
            filling = _Filling(loads, _MEGATRONS)
            cap = 13 * sum(item.numel for item in portion) // (10 * num_shards)
            for item in _dearest_first(portion, _MEGATRONS):
                shard = filling.least_loaded(item.numel, cap)
                filling.put(item, filling.emptiest() if shard is None else shard)
            drafts.append(filling.shards)
        loads = _plus(loads, _costs(drafts[-1], _MEGATRONS))
    return drafts


def _in_first_shard(portion: Iterable[PackItem], num_shards: int) -> _Shards:
    return [list(portion), *([] for _ in range(num_shards - 1))]


def _best(items: Sequence[PackItem], num_shards: int, bucket_numel: int) -> list[_Shards]:
    """The least padding over all cuts, then the best balance within it; the reference where that is as good in the
    first and better in the second.

    Shards may come out shorter than the search found, by luck with how they are balanced. So that padding does not depend
    on what matrices cost, lengths are settled with the reference's cost, and ours balances within them.
    """
    reference = _reference(items, num_shards, bucket_numel)
    cuts = _search_cuts(items, num_shards, bucket_numel, list(_portions_of(reference)))
    shortest = min(
        _draft(items, cuts, reference, _MEGATRONS),
        reference,
        key=lambda found: (_total(found), max(_loads(found, num_shards, _MEGATRONS))),
    )
    balanced = _draft(items, list(_portions_of(shortest)), shortest, _OURS)
    return min(balanced, shortest, reference, key=lambda found: (_total(found), max(_loads(found, num_shards, _OURS))))


def _draft(items: Sequence[PackItem], cuts: Iterable[Portion], known: list[_Shards], cost: _Cost) -> list[_Shards]:
    """Buckets with these cuts and shards no longer than those, balanced; what is known of a portion is one way to do it."""
    known_by_range = {
        (portion.start, portion.stop): shards for portion, shards in zip(_portions_of(known), known, strict=True)
    }
    num_shards = len(known[0]) if known else 0
    drafts, loads = [], [0] * num_shards
    for portion in cuts:
        members = items[portion.start : portion.stop]
        if members[0].alone:
            drafts.append(_in_first_shard(members, num_shards))
        else:
            as_known = known_by_range.get((portion.start, portion.stop))
            drafts.append(_balanced(members, portion.shard_numel, loads, as_known, cost))
        loads = _plus(loads, _costs(drafts[-1], cost))
    _deal_again(drafts, loads, cost)
    return drafts


def _search_cuts(
    items: Sequence[PackItem], num_shards: int, bucket_numel: int, known: Sequence[Portion]
) -> list[Portion]:
    sizes = sorted({_aligned(item) for item in items if item.numel}, reverse=True)
    kind_of = {size: kind for kind, size in enumerate(sizes)}
    params = Cuttable(
        numels=[item.numel for item in items],
        alone=[item.alone for item in items],
        kinds=[kind_of.get(_aligned(item), -1) for item in items],
        sizes=sizes,
        num_shards=num_shards,
        bucket_numel=bucket_numel,
    )
    return best_cuts(params, Fitter(sizes, num_shards, shard_divisor(num_shards)), known)


def _portions_of(drafts: Iterable[_Shards]) -> Iterator[Portion]:
    start = 0
    for shards in drafts:
        stop = start + sum(map(len, shards))
        yield Portion(start, stop, _shard_numel(shards))
        start = stop


def _total(drafts: Iterable[_Shards]) -> int:
    return sum(_shard_numel(shards) for shards in drafts)


def _balanced(
    members: Sequence[PackItem], shard_numel: int, loads: Sequence[int], known: _Shards | None, cost: _Cost
) -> _Shards:
    """The best balance among packings into shards of that length. One of the last three fits: it is how the length was
    found."""
    by_load = _least_loaded_first(members, shard_numel, loads, cost)
    by_size = (_first_fit(members, shard_numel, len(loads)), _emptiest_first(members, len(loads)), known)
    fitting = [shards for shards in by_size if shards is not None and _shard_numel(shards) <= shard_numel]
    candidates = [*([by_load] if by_load else []), *(_dealt(shards, loads, cost) for shards in fitting)]

    def balance(shards: _Shards) -> tuple[int, int]:
        after = _plus(loads, _costs(shards, cost))
        return max(after), sum(load * load for load in after)

    return min(candidates, key=balance)


def _least_loaded_first(
    members: Sequence[PackItem], shard_numel: int, loads: Sequence[int], cost: _Cost
) -> _Shards | None:
    """The dearest first, each to the rank with least to do that has room for it; None where one has no room left."""
    filling = _Filling(loads, cost)
    for item in _dearest_first(members, cost):
        shard = filling.least_loaded(item.numel, shard_numel)
        if shard is None:
            return None
        filling.put(item, shard)
    return filling.shards


def _first_fit(members: Sequence[PackItem], shard_numel: int, num_shards: int) -> _Shards | None:
    """Each shard filled up with the largest that fit."""
    by_size: dict[int, list[PackItem]] = {}
    for item in sorted(members, key=_by_numel):
        by_size.setdefault(_aligned(item), []).append(item)
    empty = by_size.pop(0, [])
    patterns = first_fit(list(by_size), list(map(len, by_size.values())), num_shards, shard_numel)
    if patterns is None:
        return None
    equals = [iter(same) for same in by_size.values()]
    filled = [
        [item for kind, take in pattern for item in islice(equals[kind], take)]
        for pattern, repeats in patterns
        for _ in range(repeats)
    ]
    shards = [*filled, *([] for _ in range(num_shards - len(filled)))]
    shards[0].extend(empty)
    return shards


def _emptiest_first(members: Sequence[PackItem], num_shards: int) -> _Shards:
    """The largest first, each to the emptiest shard; what alignment takes counts as full."""
    shards: _Shards = [[] for _ in range(num_shards)]
    ends = [(0, shard) for shard in range(num_shards)]
    for item in sorted(members, key=lambda item: (-_aligned(item), item.fqn)):
        end, shard = ends[0]
        shards[shard].append(item)
        heapq.heapreplace(ends, (end + _aligned(item), shard))
    return shards


def _dealt(shards: _Shards, loads: Sequence[int], cost: _Cost) -> _Shards:
    """The same shards, the dearest for the rank with least to do: no other dealing has a smaller maximum."""
    costs = _costs(shards, cost)
    dearest = sorted(range(len(shards)), key=lambda shard: (-costs[shard], shard))
    idlest = sorted(range(len(loads)), key=lambda shard: (loads[shard], shard))
    dealt: _Shards = [[] for _ in shards]
    for source, target in zip(dearest, idlest, strict=True):
        dealt[target] = shards[source]
    return dealt


def _deal_again(drafts: list[_Shards], loads: list[int], cost: _Cost) -> None:
    """Early buckets were dealt before later ones were known. Deal each once more."""
    for index, shards in enumerate(drafts):
        if not any(item.alone for item in shards[0]):
            others = [load - mine for load, mine in zip(loads, _costs(shards, cost), strict=True)]
            drafts[index] = _dealt(shards, others, cost)
            loads = _plus(others, _costs(drafts[index], cost))

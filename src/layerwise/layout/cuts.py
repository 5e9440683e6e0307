"""Where to cut a buffer into buckets so that whole params in equal shards are padded least.

A bucket's shards are as large as its fullest one, so what a bucket wastes depends on which params it happens to hold:
moving a cut by one param can halve it. All cuts are searched at once, by dynamic programming.

Fewer, larger buckets waste less and overlap less, so the search needs a limit from the side of overlap. On a wire that
reduces s elements while backward makes one, the last reduction ends, in elements on the wire since backward began, at
the largest over buckets b of

    s * elements of params up to and with b + elements of buckets, padding and all, from b on

and what that exceeds s * all params by is *exposed*. (Gathering in forward is the mirror image and gives the same
number.) The search may not expose more than the packing it starts from, on a wire as fast as backward and on one twice
as fast: much beyond, there is little to hide, and much below, only bytes count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from layerwise.layout.alignment import PARAM_ALIGNMENT
from layerwise.layout.bins import Fitter

WIRE_SPEEDS = (1, 2)
"""Elements a wire reduces while backward makes one."""

_MAX_PORTIONS = 200_000
"""Portions that one search looks at, some microseconds each. Where there are more, it takes only every so many-th cut."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Params [start, stop) in backward order, to become a bucket with shards of that length."""

    start: int
    stop: int
    shard_numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cuttable:
    """What the search needs to know about params, in backward order."""

    numels: Sequence[int]
    alone: Sequence[bool]
    """Which must have a bucket of their own."""
    kinds: Sequence[int]
    """Index of each param's size, with alignment, in `sizes`; -1 for one without elements."""
    sizes: Sequence[int]
    """Distinct and descending."""
    num_shards: int
    bucket_numel: int
    """Every bucket has at least so many elements of params, but the last one and those at a param that is alone."""


def exposed_numel(numels: Sequence[int], portions: Sequence[Portion], num_shards: int, wire_speed: int) -> int:
    """Elements on the wire that are still to be reduced when backward ends."""
    ready, end = 0, 0
    for portion in portions:
        ready += wire_speed * sum(numels[portion.start : portion.stop])
        end = max(end, ready) + portion.shard_numel * num_shards
    return end - ready


class _Rest(NamedTuple):
    """The best buckets for all params from a cut on. Of two, the better one is the smaller tuple."""

    total_numel: int
    last_end: int
    """When the last reduction ends, on a wire as fast as backward."""
    fewest: int
    """Minus the number of buckets: the more, the better."""
    shard_numel: int
    """Of the first of them."""
    stop: int
    """The index of the cut where it ends."""


def best_cuts(params: Cuttable, fitter: Fitter, known: Sequence[Portion]) -> list[Portion]:
    """The portions with least padding that expose no more than the known ones; where padding is equal, those that expose
    least, then those that are most."""
    if len(known) == 1 and known[0].shard_numel < max(params.sizes, default=0) + PARAM_ALIGNMENT:
        # More ranks than a bucket can use: its shards are as long as the largest param, which no cut can change.
        return list(known)
    search = _Search(params, fitter, known)
    for start in range(len(search.cuts) - 2, -1, -1):
        search.extend(start)
    return search.found()


class _Search:
    """Goes from the last param to the first and knows the best rest from every cut it has passed."""

    def __init__(self, params: Cuttable, fitter: Fitter, known: Sequence[Portion]) -> None:
        self._params = params
        self._fitter = fitter
        self._known = {(portion.start, portion.stop): portion.shard_numel for portion in known}
        self._prefix = [0, *accumulate(params.numels)]
        self._total_limit = params.num_shards * sum(portion.shard_numel for portion in known)
        exposed = [exposed_numel(params.numels, known, params.num_shards, speed) for speed in WIRE_SPEEDS]
        self._largest_bucket = exposed[0]
        self._end_limits = [
            (speed, speed * self._prefix[-1] + numel) for speed, numel in zip(WIRE_SPEEDS, exposed, strict=True)
        ]
        self.cuts = self._positions()
        self._counts_before = [
            tuple(Counter(kind for kind in params.kinds[start:stop] if kind >= 0).items())
            for start, stop in pairwise([0, *self.cuts])
        ]
        """Of params between each cut and the one before it."""
        self._rests: list[_Rest | None] = [None] * len(self.cuts)
        self._rests[-1] = _Rest(0, 0, 0, 0, 0)
        self._totals = [0] * len(self.cuts)
        self._rooms = [-1] * len(self.cuts)
        """The largest bucket that may end at each cut."""
        self._rooms[-1] = self._room(self._prefix[-1], 0)

    def _positions(self) -> list[int]:
        """Where cuts are considered: everywhere, or every so many-th place where that would take too long."""
        prefix, num_params = self._prefix, len(self._params.numels)
        num_portions, stop = 0, 0
        for start in range(num_params):
            while stop < num_params and prefix[stop + 1] - prefix[start] <= self._largest_bucket:
                stop += 1
            num_portions += stop - start
        stride = math.isqrt(max(0, num_portions - 1) // _MAX_PORTIONS) + 1
        lonely = [start for start, alone in enumerate(self._params.alone) if alone]
        always = {num_params, *(start for start, _ in self._known), *lonely, *(start + 1 for start in lonely)}
        return sorted(always.union(range(0, num_params, stride)))

    def _room(self, numel_before: int, total_after: int) -> int:
        return min(end - speed * numel_before for speed, end in self._end_limits) - total_after

    def extend(self, start: int) -> None:
        """Find the best first bucket at a cut, given the best rests from all later ones."""
        params, prefix, first = self._params, self._prefix, self.cuts[start]
        counts, numel, largest = [0] * len(params.sizes), 0, 0
        best: _Rest | None = None
        # What lies before the cut takes at least its own room.
        limit = self._total_limit - prefix[first]
        for stop in range(start + 1, len(self.cuts)):
            last = self.cuts[stop]
            for kind, count in self._counts_before[stop]:
                counts[kind] += count
                numel += count * params.sizes[kind]
                if params.sizes[kind] > largest:
                    largest = params.sizes[kind]
            smallest = max(numel, largest * params.num_shards)
            if smallest > self._largest_bucket:
                break
            must_end = last == len(params.numels) or params.alone[last] or params.alone[first]
            may_end = must_end or prefix[last] - prefix[first] >= params.bucket_numel
            if may_end and smallest <= self._rooms[stop] and smallest <= limit - self._totals[stop]:
                found = self._rest(start, stop, counts, limit)
                if found is not None and (best is None or found < best):
                    best, limit = found, found.total_numel
            if must_end:
                break
        if best is not None:
            self._rests[start] = best
            self._totals[start] = best.total_numel
            self._rooms[start] = self._room(prefix[first], best.total_numel)

    def _rest(self, start: int, stop: int, counts: list[int], limit: int) -> _Rest | None:
        """The rest that begins with a bucket between these cuts; None if its total is above the limit."""
        after = self._rests[stop]
        if after is None:
            return None
        first, last = self.cuts[start], self.cuts[stop]
        cap = min(limit - after.total_numel, self._rooms[stop]) // self._params.num_shards
        known = self._known.get((first, last), cap + 1)
        fitted = self._fitter.fit(tuple(counts), cap)
        shard_numel = known if fitted is None else min(known, fitted)
        if shard_numel > cap:
            return None
        total = after.total_numel + shard_numel * self._params.num_shards
        return _Rest(total, max(after.last_end, self._prefix[last] + total), after.fewest - 1, shard_numel, stop)

    def found(self) -> list[Portion]:
        """The portions of the best rest from the first cut on: of everything."""
        portions, start = [], 0
        while start < len(self.cuts) - 1:
            rest = self._rests[start]
            if rest is None:
                raise RuntimeError(
                    f"no buckets were found from param {self.cuts[start]} on: the known ones should be among them."
                )
            portions.append(Portion(self.cuts[start], self.cuts[rest.stop], rest.shard_numel))
            start = rest.stop
        return portions

"""Bin packing on integers: how small the equal shards of a bucket can be.

A model has few distinct sizes, so shards are filled by *counts* of each size: thousands of matrices over thousands of
shards cost as much as a dozen over a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from layerwise.routing.geometry import ceil_to

Pattern = tuple[tuple[int, int], ...]
"""What lies in one shard: (index of a size, how many of it)."""

_TOLERANCE = 4096
"""The search for the smallest shard ends within one part in 4096 of it: 0.02 % of padding, and exact for small ones."""


def first_fit(
    sizes: Sequence[int], counts: Sequence[int], num_shards: int, capacity: int
) -> list[tuple[Pattern, int]] | None:
    """First-fit-decreasing: patterns and how many shards have each, or None where the shards do not suffice.

    `sizes` descend. A shard is filled with the largest that fit, and the next ones in the same way for as long as the
    counts last.

    >>> first_fit([7, 3, 1], [2, 3, 1], num_shards=3, capacity=9)
    [(((0, 1), (2, 1)), 1), (((0, 1),), 1), (((1, 3),), 1)]
    """
    left = list(counts)
    live = [kind for kind, count in enumerate(left) if count]
    free = num_shards
    found: list[tuple[Pattern, int]] = []
    while live:
        room, repeats, pattern = capacity, free, []
        for kind in live:
            take = min(left[kind], room // sizes[kind])
            if take:
                pattern.append((kind, take))
                room -= take * sizes[kind]
                repeats = min(repeats, left[kind] // take)
        if not pattern or not repeats:
            return None
        for kind, take in pattern:
            left[kind] -= take * repeats
        free -= repeats
        found.append((tuple(pattern), repeats))
        live = [kind for kind in live if left[kind]]
    return found


def longest_first(sizes: Sequence[int], counts: Sequence[int], num_shards: int) -> int:
    """The fullest shard when everything, the largest first, goes to the emptiest shard."""
    shards_by_fill = {0: num_shards}
    fills = [0]
    for size, count in zip(sizes, counts, strict=True):
        left = count
        while left:
            fill = fills[0]
            moved = min(left, shards_by_fill[fill])
            left -= moved
            if moved == shards_by_fill[fill]:
                heapq.heappop(fills)
                del shards_by_fill[fill]
            else:
                shards_by_fill[fill] -= moved
            if fill + size not in shards_by_fill:
                heapq.heappush(fills, fill + size)
                shards_by_fill[fill + size] = 0
            shards_by_fill[fill + size] += moved
    return max(shards_by_fill)


def lower_bound(sizes: Sequence[int], counts: Sequence[int], num_shards: int) -> int:
    """No shard can be smaller than the mean, nor (pigeonholes) than k+1 times the size of number k * shards + 1."""
    total, seen, bound = 0, 0, 0
    for size, count in zip(sizes, counts, strict=True):
        if count:
            total += size * count
            seen += count
            bound = max(bound, ((seen - 1) // num_shards + 1) * size)
    return max(bound, -(-total // num_shards))


class Fitter:
    """The smallest equal shards found for counts of given sizes. It remembers: the portions of a model repeat."""

    def __init__(self, sizes: Sequence[int], num_shards: int, divisor: int) -> None:
        self._sizes = sizes
        self._num_shards = num_shards
        self._divisor = divisor
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}
        """Below the first nothing was found to fit; the second fits. Equal ones are the answer."""

    def fit(self, counts: tuple[int, ...], cap: int) -> int | None:
        """The smallest shard, a multiple of the divisor; None if it is above `cap`."""
        cap -= cap % self._divisor
        low, high = self._known.get(counts) or self._first_look(counts)
        if low < high and low <= cap:
            # Most questions end here, with a packing that does not exist.
            if cap < high:
                reached = self._reached(counts, cap)
                low, high = (low, reached) if reached else (cap + self._divisor, high)
            if low <= cap:
                low = high = self._smallest(counts, low, high)
        self._known[counts] = low, high
        return high if low == high <= cap else None

    def _first_look(self, counts: tuple[int, ...]) -> tuple[int, int]:
        bound = ceil_to(max(1, lower_bound(self._sizes, counts, self._num_shards)), self._divisor)
        longest = ceil_to(longest_first(self._sizes, counts, self._num_shards), self._divisor)
        return bound, (self._reached(counts, bound) if longest > bound else 0) or max(bound, longest)

    def _smallest(self, counts: tuple[int, ...], low: int, high: int) -> int:
        while high - low > high // _TOLERANCE:
            middle = (low + high) // 2 // self._divisor * self._divisor
            reached = self._reached(counts, middle)
            low, high = (low, reached) if reached else (middle + self._divisor, high)
        return high

    def _reached(self, counts: tuple[int, ...], capacity: int) -> int:
        """The fullest shard under a capacity, rounded up; 0 if they do not fit."""
        found = first_fit(self._sizes, counts, self._num_shards, capacity)
        if found is None:
            return 0
        fullest = max(sum(self._sizes[kind] * take for kind, take in pattern) for pattern, _ in found)
        return ceil_to(max(1, fullest), self._divisor)

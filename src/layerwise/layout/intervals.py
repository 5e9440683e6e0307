"""How a bucket's elements are dealt out to the ranks of its domain: each rank has one interval of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import sub
from typing import Protocol

from layerwise.layout.shards import Held, Ranks


class Intervals(Protocol):
    """Every rank's interval of a bucket."""

    @property
    def numel(self) -> int:
        """Elements of the bucket."""

    @property
    def world(self) -> int: ...
    @property
    def is_split(self) -> bool:
        """Whether ranks have different elements, each a part of them."""

    def start(self, rank: int) -> int: ...
    def stop(self, rank: int) -> int: ...
    def numels(self) -> tuple[int, ...]:
        """Elements of every rank."""

    def ranks(self, start: int, stop: int) -> range:
        """Who has any of the elements [start, stop)."""

    def copies(self, rank: int) -> Ranks:
        """Who has the same elements as this rank."""

    def held(self, start: int, stop: int) -> list[Held]:
        """How many of the elements [start, stop) each rank has."""

    def to_json(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Equal:
    """Intervals of one length, one after the other."""

    numel: int
    world: int

    @property
    def is_split(self) -> bool:
        return self.world > 1

    @property
    def each(self) -> int:
        """Elements of every rank."""
        return self.numel // self.world

    def start(self, rank: int) -> int:
        return rank * self.each

    def stop(self, rank: int) -> int:
        return (rank + 1) * self.each

    def numels(self) -> tuple[int, ...]:
        return (self.each,) * self.world

    def ranks(self, start: int, stop: int) -> range:
        return range(start // self.each, (stop - 1) // self.each + 1) if start < stop else range(0)

    def copies(self, rank: int) -> Ranks:
        return range(rank, rank + 1)

    def held(self, start: int, stop: int) -> list[Held]:
        return held_equally(start, stop, self.numel // self.world)

    def to_json(self) -> dict[str, object]:
        return {"equal": self.world}


def held_equally(start: int, stop: int, each: int) -> list[Held]:
    """How many of the elements [start, stop) each rank has, where all have intervals of one length."""
    first, last = start // each, (stop - 1) // each
    if first == last:
        return [(first, last + 1, stop - start, 1)]
    head, tail = (first + 1) * each - start, stop - last * each
    if last == first + 1:
        return [(first, last, head, 1), (last, last + 1, tail, 1)]
    # In between there is nothing else.
    return [(first, first + 1, head, 1), (first + 1, last, each, 1), (last, last + 1, tail, 1)]


@dataclass(frozen=True, slots=True)
class Uneven:
    """Intervals of any lengths, one after the other."""

    borders: tuple[int, ...]
    """Where each rank's begins, and the end of the last one."""

    @property
    def numel(self) -> int:
        return self.borders[-1]

    @property
    def world(self) -> int:
        return len(self.borders) - 1

    @property
    def is_split(self) -> bool:
        return self.world > 1

    def start(self, rank: int) -> int:
        return self.borders[rank]

    def stop(self, rank: int) -> int:
        return self.borders[rank + 1]

    def numels(self) -> tuple[int, ...]:
        return tuple(map(sub, self.borders[1:], self.borders))

    def ranks(self, start: int, stop: int) -> range:
        if start >= stop:
            return range(0)
        return range(bisect_right(self.borders, start) - 1, bisect_right(self.borders, stop - 1))

    def copies(self, rank: int) -> Ranks:
        return range(rank, rank + 1)

    def held(self, start: int, stop: int) -> list[Held]:
        found = (
            (rank, rank + 1, min(stop, self.borders[rank + 1]) - max(start, self.borders[rank]), 1)
            for rank in self.ranks(start, stop)
        )
        return [run for run in found if run[2] > 0]

    def to_json(self) -> dict[str, object]:
        return {"borders": list(self.borders)}


@dataclass(frozen=True, slots=True)
class Copied:
    """Every rank has all of it."""

    numel: int
    world: int

    @property
    def is_split(self) -> bool:
        return False

    def start(self, rank: int) -> int:
        return 0

    def stop(self, rank: int) -> int:
        return self.numel

    def numels(self) -> tuple[int, ...]:
        return (self.numel,) * self.world

    def ranks(self, start: int, stop: int) -> range:
        return range(self.world) if start < stop else range(0)

    def copies(self, rank: int) -> Ranks:
        return range(self.world)

    def held(self, start: int, stop: int) -> list[Held]:
        return [(0, self.world, stop - start, 1)]

    def to_json(self) -> dict[str, object]:
        return {"copies": self.world}

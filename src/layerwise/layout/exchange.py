"""Exchange tables: which regions of which matrices each rank sends to which home, for one cohort.

Derived from the storage plan and the work plan and from nothing else. The way back is the same table read the other way
round, so it cannot disagree with the way there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from layerwise.layout.storage import BucketPlan
from layerwise.layout.work import EVERY_RANK, Held, WorkPlan, equal_shards_holding, holder_runs
from layerwise.routing.geometry import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one matrix that one shard holds: what travels between its owner and its home, region after region."""

    item: int
    """Index into the work plan's items."""
    owner: int
    home: int
    regions: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(region.numel for region in self.regions)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part of a cohort's all-to-all."""

    cohort: int
    rank: int
    sends: tuple[Piece, ...]
    """Pieces this rank owns and others are home to, by home, then in plan order: the order on the wire."""
    receives: tuple[Piece, ...]
    """Pieces this rank is home to and others own, by owner, then in plan order."""
    stays: tuple[Piece, ...]
    """Pieces that this rank owns and is home to."""
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]
    homed: tuple[int, ...]
    """Items this rank orthogonalises, in plan order."""

    def inverse(self) -> Exchange:
        """The return trip: what was received is sent, what was sent is received."""
        return Exchange(
            cohort=self.cohort,
            rank=self.rank,
            sends=self.receives,
            receives=self.sends,
            stays=self.stays,
            send_splits=self.receive_splits,
            receive_splits=self.send_splits,
            homed=self.homed,
        )


def _pieces_of(work: WorkPlan, number: int, bucket: BucketPlan, rank: int) -> list[Piece]:
    """The pieces of one item that this rank sends, receives or keeps."""
    item = work.items[number]
    placement = bucket.placements[item.placement]
    if item.home == EVERY_RANK:
        return [Piece(number, rank, rank, item.matrix.regions(0, placement.numel))]
    first = bucket.shards_holding(placement, item.matrix.flat_start, item.matrix.flat_stop)
    owners = first if item.home == rank else (range(rank, rank + 1) if rank in first else range(0))
    pieces = []
    for owner in owners:
        regions = item.matrix.regions(*bucket.held(placement, owner))
        if regions:
            pieces.append(Piece(number, owner, item.home, regions))
    return pieces


def exchange_for(work: WorkPlan, buckets: Mapping[int, BucketPlan], cohort: int, rank: int) -> Exchange:
    """The table of one rank for one cohort."""
    sends: list[Piece] = []
    receives: list[Piece] = []
    stays: list[Piece] = []
    homed: list[int] = []
    for number, item in enumerate(work.items):
        if item.cohort != cohort:
            continue
        if item.home in (rank, EVERY_RANK):
            homed.append(number)
        for piece in _pieces_of(work, number, buckets[item.bucket], rank):
            if piece.owner == piece.home:
                stays.append(piece)
            elif piece.owner == rank:
                sends.append(piece)
            else:
                receives.append(piece)
    sends.sort(key=lambda piece: (piece.home, piece.item))
    receives.sort(key=lambda piece: (piece.owner, piece.item))
    return Exchange(
        cohort=cohort,
        rank=rank,
        sends=tuple(sends),
        receives=tuple(receives),
        stays=tuple(stays),
        send_splits=_splits([(piece.home, piece.numel) for piece in sends], work.world),
        receive_splits=_splits([(piece.owner, piece.numel) for piece in receives], work.world),
        homed=tuple(homed),
    )


def _splits(numel_by_peer: Sequence[tuple[int, int]], world: int) -> tuple[int, ...]:
    splits = [0] * world
    for peer, numel in numel_by_peer:
        splits[peer] += numel
    return tuple(splits)


def sent_numel(work: WorkPlan, buckets: Mapping[int, BucketPlan]) -> list[tuple[list[int], list[int]]]:
    """Per cohort: elements each rank sends to homes, and elements each home sends back."""
    found, nothing = moved_numel(work, buckets), [0] * work.world
    return [found.get(cohort, (nothing, nothing)) for cohort in range(work.num_cohorts)]


def moved_numel(work: WorkPlan, buckets: Mapping[int, BucketPlan]) -> dict[int, tuple[list[int], list[int]]]:
    """The same for those cohorts that may move: there are thousands that do not where every rank does everything. For
    all ranks at once, without building their tables."""
    totals: dict[int, tuple[list[int], list[int]]] = {}
    held: dict[int, _Held] = {}
    moving = {index for index, bucket in buckets.items() if not bucket.whole and bucket.num_shards > 1}
    if not moving:
        return totals
    for matrix, index, position, home, cohort in work.items:
        if index not in moving or home == EVERY_RANK:
            continue  # it stays where it is
        bucket, numel = buckets[index], matrix.rows * matrix.cols
        if cohort not in totals:
            totals[cohort], held[cohort] = ([0] * work.world, [0] * work.world), _Held(work.world)
        if len(matrix.grid) > 1 or bucket.borders:
            at_home = held[cohort].add(holder_runs(matrix, bucket, bucket.placements[position]), home)
        else:
            start = bucket.placements[position].offset + matrix.box.starts[0]
            at_home = held[cohort].add_stretch(bucket, start, start + numel, home)
        there, back = totals[cohort]
        there[home] -= at_home
        back[home] += numel - at_home
    for cohort, (there, _) in totals.items():
        there[:] = map(add, there, held[cohort].by_shard())
    return totals


class _Held:
    """How many elements of a cohort's matrices each shard holds, at home or not. A matrix lies in many shards and there
    are many matrices, so what every shard of a run holds is noted at the run's two ends and summed up afterwards, and
    matrices that lie side by side count as one stretch."""

    def __init__(self, world: int) -> None:
        self._steps = [0] * (world + 1)
        self._start, self._stop, self._shard_numel = 0, 0, 1
        """The stretch that may still grow, in elements of its bucket, and that bucket's shards."""
        self._bucket = -1

    def add(self, runs: Iterable[Held], home: int) -> int:
        """Count a matrix; returns how much of it its home holds."""
        at_home = 0
        for first, stop, numel in runs:
            self._steps[first] += numel
            self._steps[stop] -= numel
            if first <= home < stop:
                at_home += numel
        return at_home

    def add_stretch(self, bucket: BucketPlan, start: int, stop: int, home: int) -> int:
        """Count a matrix that is one stretch of a bucket of equal shards."""
        if start != self._stop or bucket.index != self._bucket:
            self._close()
            self._start, self._shard_numel, self._bucket = start, bucket.numel // bucket.num_shards, bucket.index
        self._stop = stop
        low = home * self._shard_numel
        high = low + self._shard_numel
        at_home = (stop if stop < high else high) - (start if start > low else low)
        return at_home if at_home > 0 else 0

    def by_shard(self) -> Iterator[int]:
        """Elements that each shard holds."""
        self._close()
        return accumulate(self._steps)

    def _close(self) -> None:
        if self._start < self._stop:
            self.add(equal_shards_holding(self._start, self._stop, self._shard_numel), home=-1)
            self._start = self._stop

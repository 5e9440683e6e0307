"""Exchange tables: which regions of which matrices each rank sends to which home, for one cohort.

Derived from the storage plan and the work plan and from nothing else. The way back is the same table read the other way
round, so it cannot disagree with the way there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerwise.layout.storage import BucketPlan
from layerwise.layout.work import EVERY_RANK, WorkPlan, holders
from layerwise.routing.geometry import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one matrix that one shard holds: what travels between its owner and its home, region after region."""

    item: int
    """Index into the work plan's items."""
    owner: int
    home: int
    param_start: int
    """First element of the owner's span of the param; regions are read relative to it."""
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
        return [Piece(number, rank, rank, 0, item.matrix.regions(0, placement.numel))]
    first = bucket.shards_holding(placement, item.matrix.flat_start, item.matrix.flat_stop)
    owners = first if item.home == rank else (range(rank, rank + 1) if rank in first else range(0))
    pieces = []
    for owner in owners:
        start, stop = bucket.held(placement, owner)
        regions = item.matrix.regions(start, stop)
        if regions:
            pieces.append(Piece(number, owner, item.home, start, regions))
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
    """Per cohort: elements each rank sends to homes, and elements each home sends back. For all ranks at once, without
    building their tables."""
    totals = [([0] * work.world, [0] * work.world) for _ in range(work.num_cohorts)]
    for item in work.items:
        bucket = buckets[item.bucket]
        if item.home == EVERY_RANK or bucket.whole:
            continue  # it stays where it is
        there, back = totals[item.cohort]
        for owner, numel in holders(item.matrix, bucket, bucket.placements[item.placement]).items():
            if owner != item.home:
                there[owner] += numel
                back[item.home] += numel
    return totals

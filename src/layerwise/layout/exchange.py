"""Exchange tables: which regions of which matrices each rank sends to which home, for one cohort.

Derived from the shard plans and the work plan and from nothing else. There: every home gets each piece from the copy that
is nearest. Back: every copy gets it from the home that is nearest. Where a rank holds what it is home to, nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import NamedTuple

from layerwise.layout.boxes import BoxShards
from layerwise.layout.buckets import BucketPlan
from layerwise.layout.intervals import Equal, held_equally
from layerwise.layout.shards import Held, Ranks, ShardPlan, held_by, nearest, param_whole_on, pieces_of
from layerwise.layout.spans import Region, numel_in, regions_of
from layerwise.layout.work import WorkItem, WorkPlan
from layerwise.routing.matrices import Matrix


class Parcel(NamedTuple):
    """What travels of one matrix between a holder and a home, region after region."""

    item: int
    """Index into the work plan's items."""
    holder: int
    home: int
    regions: tuple[Region, ...]
    """Their addresses in a shard are those of the holder."""

    @property
    def numel(self) -> int:
        return sum(region.numel for region in self.regions)

    @property
    def begins_at(self) -> int:
        """Where its first element lies in the matrix: the same for every copy."""
        return self.regions[0].in_matrix.offset


@dataclass(frozen=True, slots=True)
class Leg:
    """One rank's part of an all-to-all."""

    sends: tuple[Parcel, ...]
    """By who receives them, then in plan order, then by place in the matrix: the order on the wire."""
    receives: tuple[Parcel, ...]
    """By who sends them, then likewise."""
    send_splits: tuple[int, ...]
    receive_splits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One rank's part of a cohort's way to its homes and back."""

    cohort: int
    rank: int
    there: Leg
    """From holders to homes."""
    back: Leg
    """From homes to holders."""
    stays: tuple[Parcel, ...]
    """What this rank holds and is home to."""
    homed: tuple[int, ...]
    """Items this rank orthogonalises, in plan order."""


def exchange_for(work: WorkPlan, plans: Mapping[int, ShardPlan], cohort: int, rank: int) -> Exchange:
    """The table of one rank for one cohort."""
    there_out: list[Parcel] = []
    there_in: list[Parcel] = []
    back_out: list[Parcel] = []
    back_in: list[Parcel] = []
    stays: list[Parcel] = []
    homed: list[int] = []
    for number, item in enumerate(work.items):
        if item.cohort != cohort:
            continue
        plan = plans[item.shard]
        if rank in item.homes:
            homed.append(number)
            for span, holders in pieces_of(plan, item.matrix):
                regions = regions_of(item.matrix, span)
                if rank not in holders:
                    there_in.append(Parcel(number, nearest(holders, rank, work.world), rank, regions))
                back_out.extend(
                    Parcel(number, holder, rank, regions)
                    for holder in holders
                    if holder not in item.homes and nearest(item.homes, holder, work.world) == rank
                )
        for span in plan.spans_of(item.matrix.fqn, rank):
            regions = regions_of(item.matrix, span)
            if not regions:
                continue
            if rank in item.homes:
                stays.append(Parcel(number, rank, rank, regions))
            else:
                back_in.append(Parcel(number, rank, nearest(item.homes, rank, work.world), regions))
            holders = plan.copies(span, rank)
            there_out.extend(
                Parcel(number, rank, home, regions)
                for home in item.homes
                if home not in holders and nearest(holders, home, work.world) == rank
            )
    return Exchange(
        cohort=cohort,
        rank=rank,
        there=_leg(there_out, there_in, work.world),
        back=_leg(back_out, back_in, work.world, back=True),
        stays=tuple(stays),
        homed=tuple(homed),
    )


def _leg(sends: list[Parcel], receives: list[Parcel], world: int, *, back: bool = False) -> Leg:
    def holder(parcel: Parcel) -> int:
        return parcel.holder

    def home(parcel: Parcel) -> int:
        return parcel.home

    receiver, sender = (holder, home) if back else (home, holder)
    # Several parcels of a matrix go by their place in it: the ranks that hold them may have them in other orders.
    sends.sort(key=lambda parcel: (receiver(parcel), parcel.item, parcel.begins_at))
    receives.sort(key=lambda parcel: (sender(parcel), parcel.item, parcel.begins_at))
    return Leg(
        sends=tuple(sends),
        receives=tuple(receives),
        send_splits=_splits(((receiver(parcel), parcel.numel) for parcel in sends), world),
        receive_splits=_splits(((sender(parcel), parcel.numel) for parcel in receives), world),
    )


def _splits(numel_by_peer: Iterable[tuple[int, int]], world: int) -> tuple[int, ...]:
    splits = [0] * world
    for peer, numel in numel_by_peer:
        splits[peer] += numel
    return tuple(splits)


def moved_numel(work: WorkPlan, plans: Mapping[int, ShardPlan]) -> dict[int, tuple[list[int], list[int]]]:
    """Per cohort: elements each rank sends to homes, and elements each home sends back; of those cohorts that may move, since there
    are thousands that do not where every rank does everything. For all ranks at once, without building their tables."""
    totals: dict[int, tuple[list[int], list[int]]] = {}
    held: dict[int, _Held] = {}
    param: _Param | None = None
    for item in work.items:
        matrix, index, homes, cohort = item
        if param is None or matrix.fqn != param.fqn:
            param = _Param.of(plans[index], matrix)
        if homes == param.whole_on:
            continue  # it is where it has to be
        if cohort not in totals:
            totals[cohort], held[cohort] = ([0] * work.world, [0] * work.world), _Held(work.world)
        there, back = totals[cohort]
        numel, home = matrix.rows * matrix.cols, homes[0]
        if param.each and len(homes) == 1 and len(matrix.grid) == 1:
            # Tens of thousands of matrices over thousands of ranks.
            start = param.offset + matrix.box.starts[0]
            at_home = held[cohort].add_stretch(index, param.each, start, start + numel, home)
        else:
            runs = param.plan.holders(matrix)
            total = sum(len(range(first, stop, step)) * count for first, stop, count, step in runs)
            if total != numel and len(homes) == 1 and isinstance(param.plan, BoxShards):
                runs, numel = param.plan.boxes.sources(matrix, home), total  # every copy gets it back
            elif len(homes) > 1 or total != numel:
                for sender, count, is_back in _copied_moves(param.plan, item):
                    (back if is_back else there)[sender] += count
                continue
            at_home = held[cohort].add(runs, home)
        there[home] -= at_home
        back[home] += numel - at_home
    for cohort, (there, _) in totals.items():
        there[:] = map(add, there, held[cohort].by_rank())
    return totals


def received_numel(work: WorkPlan, plans: Mapping[int, ShardPlan]) -> dict[int, tuple[list[int], list[int]]]:
    """Per cohort that may move: elements each home receives, and elements each rank gets back. Where there are no copies that
    is what is sent the other way."""
    totals: dict[int, tuple[list[int], list[int]]] = {}
    held: dict[int, _Held] = {}
    param: _Param | None = None
    for matrix, index, homes, cohort in work.items:
        if param is None or matrix.fqn != param.fqn:
            param = _Param.of(plans[index], matrix)
        if homes == param.whole_on:
            continue
        if cohort not in totals:
            totals[cohort], held[cohort] = ([0] * work.world, [0] * work.world), _Held(work.world)
        there, back = totals[cohort]
        runs = param.plan.holders(matrix)
        first_holds = held[cohort].add(runs, homes[0])
        for home in homes:
            at_home = first_holds if home == homes[0] else held_by(runs, home)
            there[home] += matrix.rows * matrix.cols - at_home
            back[home] -= at_home
    for cohort, (_, back) in totals.items():
        back[:] = map(add, back, held[cohort].by_rank())
    return totals


class _Param(NamedTuple):
    """What is the same for all matrices of a param."""

    plan: ShardPlan
    fqn: str
    whole_on: Ranks
    each: int
    """Elements of every rank, where it lies in a bucket that is cut evenly."""
    offset: int
    """Where it lies there."""

    @classmethod
    def of(cls, plan: ShardPlan, matrix: Matrix) -> _Param:
        each, offset = 0, 0
        if isinstance(plan, BucketPlan) and isinstance(plan.shards, Equal):
            each, offset = plan.shards.each, plan.offset_of(matrix.fqn)
        return cls(plan, matrix.fqn, param_whole_on(plan, matrix), each, offset)


def _copied_moves(plan: ShardPlan, item: WorkItem) -> Iterator[tuple[int, int, bool]]:
    """(who sends, how many elements, whether on the way back) for a matrix of which there are copies."""
    for span, holders in pieces_of(plan, item.matrix):
        numel = numel_in(item.matrix, span)
        for home in item.homes:
            if home not in holders:
                yield nearest(holders, home, plan.world), numel, False
        for holder in holders:
            if holder not in item.homes:
                yield nearest(item.homes, holder, plan.world), numel, True


class _Held:
    """How many elements of a cohort's matrices each rank holds, at home or not. A matrix lies on many ranks and there are
    many matrices, so what every rank of a run holds is noted at the run's two ends and summed up afterwards, and matrices
    that lie side by side count as one stretch."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._changes: dict[int, list[int]] = {1: [0] * (world + 1)}
        """By the step of runs: from the rank that comes a step before to each rank."""
        self._start, self._stop, self._each = 0, 0, 1
        """The stretch that may still grow, in elements of its bucket, and what each rank has of that."""
        self._bucket = -1

    def add(self, runs: Iterable[Held], home: int) -> int:
        """Count a matrix; returns how much of it its home holds."""
        at_home = 0
        for first, stop, numel, step in runs:
            if step not in self._changes:
                self._changes[step] = [0] * (self._world + step)
            changes = self._changes[step]
            changes[first] += numel
            changes[stop if step == 1 else first + len(range(first, stop, step)) * step] -= numel
            if first <= home < stop and (home - first) % step == 0:
                at_home += numel
        return at_home

    def add_stretch(self, bucket: int, each: int, start: int, stop: int, home: int) -> int:
        """Count a matrix that is one stretch of a bucket of equal shards."""
        if start != self._stop or bucket != self._bucket:
            self._close()
            self._start, self._each, self._bucket = start, each, bucket
        self._stop = stop
        low = home * self._each
        high = low + self._each
        at_home = (stop if stop < high else high) - (start if start > low else low)
        return at_home if at_home > 0 else 0

    def by_rank(self) -> Iterator[int]:
        """Elements that each rank holds."""
        self._close()
        found = [0] * self._world
        for step, changes in self._changes.items():
            for offset in range(min(step, self._world)):
                chain = slice(offset, self._world, step)
                found[chain] = map(add, found[chain], accumulate(changes[chain]))
        return iter(found)

    def _close(self) -> None:
        if self._start < self._stop:
            self.add(held_equally(self._start, self._stop, self._each), home=-1)
            self._start = self._stop

"""Phases 4 and 6, exchange and return: pieces of updates travel from the shards that hold them to the homes of their
matrices, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.dtypes import DType
from layerwise.errors import StateError
from layerwise.layout.exchange import Exchange, Piece, exchange_for
from layerwise.layout.schedule import CommOp, CommSchedule
from layerwise.layout.slots import Slot, passage_nbytes
from layerwise.layout.work import WorkPlan
from layerwise.memory.slots import Lease, Slots
from layerwise.memory.storage import Storage
from layerwise.models.table import torch_dtype
from layerwise.routing.geometry import flat_index, row_major_strides
from layerwise.routing.matrices import Matrix


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape and one param group that this rank orthogonalises together."""

    group: int
    """Index of the optimizer's param group."""
    rows: int
    cols: int
    transposed: bool
    """Stored (in, out): the logical matrix is the other way round."""
    items: tuple[int, ...]
    """Items of the work plan, in order."""
    labels: tuple[str, ...]

    @property
    def logical_shape(self) -> tuple[int, int]:
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)


@dataclass(frozen=True)
class OwnedRegion:
    """A region of a matrix in this rank's own memory."""

    fqn: str
    matrix: Matrix
    update: Tensor  # view of the bucket's work tensor
    master: Tensor  # view of the bucket's master


class _HomeRegion(NamedTuple):
    """Where a region of a matrix lies in the batches of its home."""

    batch: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        whole = tensors[self.batch]
        return whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class Passage:
    """One cohort's pieces on their way, there or back, and the slot they lie in."""

    handle: Handle
    lease: Lease | None

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


class Cohort:
    """One cohort on this rank: its batches, and how its pieces are packed and unpacked."""

    def __init__(
        self,
        storage: Storage,
        communicator: Communicator,
        schedule: CommSchedule,
        work: WorkPlan,
        number: int,
        group_of: Mapping[str, int],
        wire_dtype: DType,
    ) -> None:
        label = f"{work.domain} cohort {number}"
        self._communicator = communicator
        self.label = label
        self._there = schedule.find("exchange", label)
        self._back = schedule.find("return", label)
        self._work_plan = work
        self._storage = storage
        self._table = exchange_for(
            work, {bucket.plan.index: bucket.plan for bucket in storage.buckets}, number, communicator.rank
        )
        self.dtype = torch_dtype(wire_dtype)
        self.batches = _batches(work, self._table, group_of)
        self._place = {
            item: (index, position)
            for index, batch in enumerate(self.batches)
            for position, item in enumerate(batch.items)
        }
        # Shards stay where they are, so their views are made once. Homes get fresh tensors in every step: of those, only
        # where in them things lie.
        self._staying = [self._owned_regions(piece) for piece in self._table.stays]
        self._leaving = [self._owned_regions(piece) for piece in self._table.sends]
        self._kept = [self._home_regions(piece) for piece in self._table.stays]
        self._arriving = [self._home_regions(piece) for piece in self._table.receives]
        self.owned = [region for regions in (*self._staying, *self._leaving) for region in regions]
        self._device = storage.buckets[0].work.device
        self._slots: Slots | None = None
        self._slot: Slot | None = None

    @property
    def travels(self) -> bool:
        """Whether any rank moves any of it."""
        return self._there is not None

    @property
    def passage_nbytes(self) -> int:
        """Bytes of a slot for one passage of this cohort on this rank."""
        itemsize = self.dtype.itemsize
        return passage_nbytes(sum(self._table.send_splits) * itemsize, sum(self._table.receive_splits) * itemsize)

    def assign(self, slots: Slots, slot: Slot) -> None:
        """Where it will lie while it travels: known once the passages of all cohorts are."""
        self._slots, self._slot = slots, slot

    def send(self) -> Passage:
        """Start this cohort's pieces on their way to their homes."""
        return self._move(self._there, _updates(self._leaving), self._table)

    def unpack(self, passage: Passage) -> list[Tensor]:
        """The batches, (B, rows, cols) each, from what arrived and from what was here already."""
        received = passage.handle.wait()
        tensors = [
            torch.empty(len(batch.items), batch.rows, batch.cols, dtype=self.dtype, device=self._device)
            for batch in self.batches
        ]
        self._copy(_in_batches(self._kept, tensors), _updates(self._staying))
        self._scatter(received, _in_batches(self._arriving, tensors))
        passage.release()
        return tensors

    def send_back(self, updates: Sequence[Tensor]) -> Passage:
        """Start the orthogonalised updates on their way back to the shards; what stays here is written at once."""
        self._copy(_updates(self._staying), _in_batches(self._kept, updates))
        return self._move(self._back, _in_batches(self._arriving, updates), self._table.inverse())

    def _move(self, op: CommOp | None, outgoing: Sequence[Sequence[Tensor]], table: Exchange) -> Passage:
        if op is None:  # no rank has anything to send
            nothing = torch.empty(0, dtype=self.dtype, device=self._device)
            return Passage(Handle(f"{self.label}, which stays where it is", nothing), None)
        who = f"the {op.phase} of {self.label}"
        if self._slots is None or self._slot is None:
            raise StateError(f"{who} has been assigned no slot.")
        lease = self._slots.lease(self._slot, sum(table.send_splits), sum(table.receive_splits), self.dtype, who)
        leaving = [region for regions in outgoing for region in regions]
        _copy_all(_laid_out(lease.send, leaving), leaving)
        handle = self._communicator.all_to_all(op, lease.send, lease.receive, table.send_splits, table.receive_splits)
        return Passage(handle, lease)

    def store(self, passage: Passage) -> None:
        """Write returned updates into this rank's work tensors."""
        self._scatter(passage.handle.wait(), _updates(self._leaving))
        passage.release()

    @staticmethod
    def _copy(targets: Sequence[Sequence[Tensor]], sources: Sequence[Sequence[Tensor]]) -> None:
        _copy_all(*([view for views in some for view in views] for some in (targets, sources)))

    @staticmethod
    def _scatter(received: Tensor, views: Sequence[Sequence[Tensor]]) -> None:
        arriving = [region for regions in views for region in regions]
        _copy_all(arriving, _laid_out(received, arriving))

    def _owned_regions(self, piece: Piece) -> list[OwnedRegion]:
        item = self._work_plan.items[piece.item]
        bucket, fqn, grid = self._storage.buckets[item.bucket], item.matrix.fqn, item.matrix.grid
        return [
            OwnedRegion(
                fqn,
                item.matrix,
                bucket.region_in(bucket.work, fqn, grid, region),
                bucket.region_in(bucket.master, fqn, grid, region),
            )
            for region in piece.regions
        ]

    def _home_regions(self, piece: Piece) -> list[_HomeRegion]:
        matrix = self._work_plan.items[piece.item].matrix
        batch, position = self._place[piece.item]
        strides = row_major_strides(matrix.box.shape)
        found = []
        for region in piece.regions:
            inside = region.shifted_from(matrix.box.starts)
            offset = position * matrix.numel + flat_index(inside.starts, matrix.box.shape)
            found.append(_HomeRegion(batch, region.shape, strides, offset))
        return found


def _laid_out(message: Tensor, regions: Sequence[Tensor]) -> list[Tensor]:
    """Where these regions lie in a message, one after the other."""
    parts = torch.split(message[: sum(region.numel() for region in regions)], [region.numel() for region in regions])
    return [part.view(region.shape) for part, region in zip(parts, regions, strict=True)]


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """All copies, casts included, in as few launches as there are dtypes."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _in_batches(pieces: Sequence[Sequence[_HomeRegion]], tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [[region.of(tensors) for region in regions] for regions in pieces]


def _updates(pieces: Sequence[Sequence[OwnedRegion]]) -> list[list[Tensor]]:
    return [[region.update for region in regions] for regions in pieces]


def _batches(work: WorkPlan, table: Exchange, group_of: Mapping[str, int]) -> tuple[Batch, ...]:
    members: dict[tuple[int, int, int, bool], list[int]] = {}
    for item in table.homed:
        matrix = work.items[item].matrix
        members.setdefault((group_of[matrix.fqn], matrix.rows, matrix.cols, matrix.transposed), []).append(item)
    return tuple(
        Batch(
            group=group,
            rows=rows,
            cols=cols,
            transposed=transposed,
            items=tuple(items),
            labels=tuple(work.items[item].matrix.label for item in items),
        )
        for (group, rows, cols, transposed), items in members.items()
    )

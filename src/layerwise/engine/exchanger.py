"""Phases 4 and 6, exchange and return: pieces of updates travel from the shards that hold them to the homes of their
matrices, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.dtypes import DType
from layerwise.errors import StateError
from layerwise.kernels.elementwise import copy_all_
from layerwise.layout.exchange import Exchange, Leg, Parcel, exchange_for
from layerwise.layout.schedule import CommOp, CommSchedule
from layerwise.layout.slots import Slot, passage_nbytes
from layerwise.layout.spans import Region
from layerwise.layout.work import WorkPlan
from layerwise.memory.parts import UpdateParts
from layerwise.memory.shards import Shard, region_of
from layerwise.memory.slots import Lease, Slots
from layerwise.models.table import torch_dtype
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


class OwnedRegion(NamedTuple):
    """A region of a matrix in one of this rank's shards."""

    shard: Shard
    region: Region
    matrix: Matrix
    master: Tensor  # view of the shard's master


class _HomeRegion(NamedTuple):
    """Where a region of a matrix lies in the batches of its home."""

    batch: int
    position: int
    """Of its matrix in the batch."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_whole: bool
    """All of the matrix, as one stretch."""

    def of(self, batch: Tensor, flat: Sequence[Tensor]) -> Tensor:
        """A view of its batch, of which `flat` has the matrices, each as one stretch."""
        if self.is_whole:  # nearly always
            return flat[self.position]
        return batch.as_strided(self.shape, self.strides, batch.storage_offset() + self.offset)


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
        shards: Mapping[int, Shard],
        communicator: Communicator,
        schedule: CommSchedule,
        work: WorkPlan,
        number: int,
        group_of: Mapping[str, int],
        wire_dtype: DType,
        *,
        stay: bool,
    ) -> None:
        """`stay`: updates are the same memory in every step, as `UpdateParts` has it."""
        label = f"{work.domain} cohort {number}"
        self._communicator = communicator
        self.label = label
        self._there = schedule.find("exchange", label)
        self._back = schedule.find("return", label)
        self._work_plan = work
        self._shards = shards
        self._table = exchange_for(
            work, {index: shard.plan for index, shard in shards.items()}, number, communicator.rank
        )
        self.dtype = torch_dtype(wire_dtype)
        self.batches = _batches(work, self._table, group_of)
        self._place = {
            item: (index, position)
            for index, batch in enumerate(self.batches)
            for position, item in enumerate(batch.items)
        }
        table = self._table
        self.staying, self.returning = self._owned(table.stays), self._owned(table.back.receives)
        # Homes get fresh tensors in every step: of those, only where in them things lie.
        self._kept = self._home_regions(table.stays)
        sent = {parcel.item for parcel in table.there.sends}
        is_direct = [
            parcel.item not in sent and region.is_stretch for parcel in table.stays for region in parcel.regions
        ]
        self.direct = list(compress(self.staying, is_direct))
        """What stays here, goes nowhere else and is a stretch: momentum leaves it in the batches by itself."""
        self._direct = list(compress(self._kept, is_direct))
        copied = [one for one, direct in zip(self.staying, is_direct, strict=True) if not direct]
        self._copied = [one for one, direct in zip(self._kept, is_direct, strict=True) if not direct]
        self._copied_from, self._leaving = (
            UpdateParts(((one.shard, one.region) for one in owned), region_of, stay=stay)
            for owned in (copied, self._owned(table.there.sends))
        )
        self._arriving = self._home_regions(table.there.receives)
        self._departing = self._home_regions(table.back.sends)
        self._device = next(iter(shards.values())).master.device
        self._slots: Slots | None = None
        self._slot: Slot | None = None

    @property
    def travels(self) -> bool:
        """Whether any rank moves any of it."""
        return self._there is not None or self._back is not None

    @property
    def passage_nbytes(self) -> int:
        """Bytes of a slot for one passage of this cohort on this rank, whichever way takes more."""
        return max(
            passage_nbytes(sum(leg.send_splits) * self.dtype.itemsize, sum(leg.receive_splits) * self.dtype.itemsize)
            for leg in (self._table.there, self._table.back)
        )

    def assign(self, slots: Slots, slot: Slot) -> None:
        """Where it will lie while it travels: known once the passages of all cohorts are."""
        self._slots, self._slot = slots, slot

    def send(self) -> Passage:
        """Start this cohort's pieces on their way to their homes."""
        return self._move(self._there, self._leaving.now(), self._table.there)

    def unpack(self, passage: Passage) -> list[Tensor]:
        """The batches, (B, rows, cols) each, from what arrived and from what was here already; but for what is `direct`."""
        received = passage.handle.wait()
        tensors = [
            torch.empty(len(batch.items), batch.rows, batch.cols, dtype=self.dtype, device=self._device)
            for batch in self.batches
        ]
        copy_all_(_in_batches(self._copied, tensors), self._copied_from.now())
        if self._arriving:
            _scatter(received, _in_batches(self._arriving, tensors))
        passage.release()
        return tensors

    def directly(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Where every region in `direct` goes, as one stretch."""
        return [view if view.dim() == 1 else view.view(-1) for view in _in_batches(self._direct, batches)]

    def send_back(self, directions: Sequence[Tensor]) -> Passage:
        """Start what became of the batches on its way back to the shards of other ranks."""
        return self._move(self._back, _in_batches(self._departing, directions), self._table.back)

    def kept(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """What became of every region in `staying`."""
        return _in_batches(self._kept, directions)

    def returned(self, passage: Passage) -> list[Tensor]:
        """What became of every region in `returning`, where it arrived: until the passage is released."""
        arrived = passage.handle.wait()
        return _laid_out(arrived, [region.master for region in self.returning]) if self.returning else []

    def _move(self, op: CommOp | None, leaving: Sequence[Tensor], leg: Leg) -> Passage:
        if op is None:  # no rank has anything to send
            nothing = torch.empty(0, dtype=self.dtype, device=self._device)
            return Passage(Handle(f"{self.label}, which stays where it is", nothing), None)
        who = f"the {op.phase} of {self.label}"
        if self._slots is None or self._slot is None:
            raise StateError(f"{who} has been assigned no slot.")
        lease = self._slots.lease(self._slot, sum(leg.send_splits), sum(leg.receive_splits), self.dtype, who)
        copy_all_(_laid_out(lease.send, leaving), leaving)
        handle = self._communicator.all_to_all(op, lease.send, lease.receive, leg.send_splits, leg.receive_splits)
        return Passage(handle, lease)

    def _owned(self, parcels: Iterable[Parcel]) -> list[OwnedRegion]:
        found: list[OwnedRegion] = []
        for parcel in parcels:
            item = self._work_plan.items[parcel.item]
            shard = self._shards[item.shard]
            found.extend(
                OwnedRegion(shard, region, item.matrix, region_of(shard.master, region)) for region in parcel.regions
            )
        return found

    def _home_regions(self, parcels: Iterable[Parcel]) -> list[_HomeRegion]:
        found = []
        for parcel in parcels:
            matrix = self._work_plan.items[parcel.item].matrix
            batch, position = self._place[parcel.item]
            for region in parcel.regions:
                offset, strides = region.in_matrix
                is_whole = len(region.shape) == 1 and region.shape[0] == matrix.numel and region.is_stretch
                found.append(
                    _HomeRegion(batch, position, region.shape, strides, position * matrix.numel + offset, is_whole)
                )
        return found


def _scatter(received: Tensor, arriving: Sequence[Tensor]) -> None:
    copy_all_(arriving, _laid_out(received, arriving))


def _laid_out(message: Tensor, regions: Sequence[Tensor]) -> list[Tensor]:
    """Where these regions lie in a message, one after the other."""
    parts = torch.split(message[: sum(region.numel() for region in regions)], [region.numel() for region in regions])
    return [part.view(region.shape) for part, region in zip(parts, regions, strict=True)]


def _in_batches(regions: Sequence[_HomeRegion], tensors: Sequence[Tensor]) -> list[Tensor]:
    if not regions:
        return []
    flat = [tensor.flatten(1).unbind() for tensor in tensors]
    return [region.of(tensors[region.batch], flat[region.batch]) for region in regions]


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

"""Phases 4 and 6, exchange and return: pieces of updates travel from the shards that hold them to the homes of their
matrices, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.dtypes import DType
from layerwise.errors import StateError
from layerwise.kernels.elementwise import copy_all_
from layerwise.kernels.lists import Cuts, View, Views, laid_out, stretch
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
        kept = self._in_batches(table.stays)
        self._kept = Cuts(kept)
        sent = {parcel.item for parcel in table.there.sends}
        is_direct = [
            parcel.item not in sent and region.is_stretch for parcel in table.stays for region in parcel.regions
        ]
        self.direct = list(compress(self.staying, is_direct))
        """What stays here, goes nowhere else and is a stretch: momentum leaves it in the batches by itself."""
        self._direct = list(compress(kept, is_direct))
        copied = [one for one, direct in zip(self.staying, is_direct, strict=True) if not direct]
        self._copied = Cuts(one for one, direct in zip(kept, is_direct, strict=True) if not direct)
        self._copied_from, self._leaving = (
            UpdateParts(((one.shard, one.region) for one in owned), stay=stay)
            for owned in (copied, self._owned(table.there.sends))
        )
        self._arriving, self._departing = (
            Cuts(self._in_batches(parcels)) for parcels in (table.there.receives, table.back.sends)
        )
        # And where they lie in a message, one after the other.
        self._sent, self._received, self._sent_back, self._returned = (
            laid_out([region.shape for parcel in parcels for region in parcel.regions])
            for parcels in (table.there.sends, table.there.receives, table.back.sends, table.back.receives)
        )
        self._device = next(iter(shards.values())).master.device
        self._nothing = torch.empty(0, dtype=self.dtype, device=self._device)
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
        return self._move(self._there, self._leaving.now(), self._sent, self._table.there)

    def unpack(self, passage: Passage) -> list[Tensor]:
        """The batches, (B, rows, cols) each, from what arrived and from what was here already; but for what is `direct`."""
        received = passage.handle.wait()
        tensors = [
            torch.empty(len(batch.items), batch.rows, batch.cols, dtype=self.dtype, device=self._device)
            for batch in self.batches
        ]
        copy_all_(self._copied.of(tensors), self._copied_from.now())
        copy_all_(self._arriving.of(tensors), self._received.of([received]))
        passage.release()
        return tensors

    def directly(self, places: Iterable[int]) -> Cuts:
        """Where in the batches these of the regions in `direct` go, each as one stretch."""
        views = (self._direct[place] for place in places)
        return Cuts(stretch(view.tensor, view.offset, view.offset + prod(view.shape)) for view in views)

    def send_back(self, directions: Sequence[Tensor]) -> Passage:
        """Start what became of the batches on its way back to the shards of other ranks."""
        return self._move(self._back, self._departing.of(directions), self._sent_back, self._table.back)

    def kept(self, directions: Sequence[Tensor]) -> Views:
        """What became of every region in `staying`."""
        return self._kept.of(directions)

    def returned(self, passage: Passage) -> Views:
        """What became of every region in `returning`, where it arrived: until the passage is released."""
        return self._returned.of([passage.handle.wait()])

    def _move(self, op: CommOp | None, leaving: Views, places: Cuts, leg: Leg) -> Passage:
        if op is None:  # no rank has anything to send
            return Passage(Handle(f"{self.label}, which stays where it is", self._nothing), None)
        who = f"the {op.phase} of {self.label}"
        if self._slots is None or self._slot is None:
            raise StateError(f"{who} has been assigned no slot.")
        lease = self._slots.lease(self._slot, sum(leg.send_splits), sum(leg.receive_splits), self.dtype, who)
        copy_all_(places.of([lease.send]), leaving)
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

    def _in_batches(self, parcels: Iterable[Parcel]) -> list[View]:
        """Where regions of parcels lie in the batches of their home."""
        found = []
        for parcel in parcels:
            matrix = self._work_plan.items[parcel.item].matrix
            batch, position = self._place[parcel.item]
            for region in parcel.regions:
                offset, strides = region.in_matrix
                found.append(View(batch, region.shape, strides, position * matrix.numel + offset))
        return found


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

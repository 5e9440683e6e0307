"""Phase 7, publish: a bucket knows the step its master is at and the step its replica is at; `ensure` makes them equal.

Whoever reads weights calls `ensure`. There is nothing to stage beforehand and so nothing to forget.

Gathers are launched in one order on every rank, each bucket's once per step: all of them when masters have moved, or only
a few ahead of what is read. Whoever needs a bucket then launches those before it too, and what no module asked for is
launched before the first gradient is reduced, so that ranks which ran different modules still issue the same sequence.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.comm.leaving import before_exit
from layerwise.comm.scopes import scope
from layerwise.comm.waiting import impatient
from layerwise.engine.compiled import CompiledReads
from layerwise.engine.gather_order import GatherOrder
from layerwise.errors import StateError
from layerwise.layout.schedule import CommOp, publish_op
from layerwise.memory.replicas import Replica
from layerwise.memory.stale import StaleGuard
from layerwise.memory.storage import Storage


class Publisher:
    """Brings replicas up to date by pulling from masters."""

    def __init__(
        self,
        storage: Storage,
        communicators: Mapping[str, Communicator],
        *,
        overlap: bool,
        prefetch: int | None,
        by_chunk: bool,
    ) -> None:
        self._storage = storage
        self._communicators = communicators
        self.overlap = overlap
        copied = {id(replica.shard) for replica in storage.replicas}
        # What only its owner reads is written there at once, if it is not what was updated.
        self._alone = [shard for shard in storage.shards if id(shard) not in copied and shard.is_apart]
        self._ops = [
            publish_op(replica.plan, storage.plan.buffers[replica.plan.buffer].key.dtype)
            for replica in storage.replicas
        ]
        self.due_nbytes: Counter[str] = Counter()
        """What one round of gathers will have sent."""
        for replica, op in zip(storage.replicas, self._ops, strict=True):
            if op is not None:
                self.due_nbytes[op.kind] += op.nbytes(communicators[replica.plan.domain].rank)
        chunks = [storage.plan.buffers[replica.plan.buffer].key.chunk for replica in storage.replicas]
        self.order = GatherOrder(storage.replicas, chunks, prefetch=prefetch, by_chunk=by_chunk, learns=overlap)
        self.compiled = CompiledReads()
        self._is_lazy = prefetch is not None or by_chunk
        self._process = os.getpid()
        self._guards = [self._guard(replica) for replica in storage.replicas] if overlap else []
        self._flights: dict[int, Handle] = {}
        self._stream: torch.cuda.Stream | None = None
        # Whoever reads a weight may be a thread of the user's own, while another one waits for the same gather.
        self._lock = threading.RLock()
        self._launched = len(storage.replicas)
        if overlap:
            before_exit(self)

    def _guard(self, replica: Replica) -> StaleGuard:
        params = [self._storage.params[placement.fqn] for placement in replica.plan.placements]
        return StaleGuard(params, partial(self.ensure, replica), partial(self.trace, (replica,)))

    def begin(self) -> None:
        """Masters have moved: all replicas are stale. Gathers now, or as forward asks for them."""
        with self._lock:
            for replica in self._storage.replicas:
                replica.expect_fresh()
            for shard in self._storage.shards:
                shard.version += 1
            self._launched = 0
            self._storage.note_update()
            for shard in self._alone:
                shard.round_master()
            if not self.overlap:
                self.ensure_all()
                return
            for guard in self._guards:
                guard.arm()
            self._launch_to(self.order.first)
            for replica in self.compiled.unguarded:
                self.ensure(replica)

    @torch.no_grad()
    def ensure(self, replica: Replica) -> None:
        """Make this rank's replica of a bucket as new as its master, for whatever the current CUDA stream is about to do."""
        if replica.version != replica.shard.version:
            self._catch_up(replica)
        replica.wait_written()

    def trace(self, replicas: Sequence[Replica]) -> None:
        """Bring up to date what is read by code that is being compiled, and remember that this code will not ask."""
        self.compiled.note(replicas)
        for replica in replicas:
            self.ensure(replica)

    def _catch_up(self, replica: Replica) -> None:
        self._check_process()
        with self._lock:
            if replica.version != replica.shard.version:  # still, after another thread's turn
                self._launch_to(self.order.reach[replica.plan.index])
                self._land(replica)

    def launch_all(self) -> None:
        """Launch what is left, and wait for nothing."""
        if self._launched == len(self.order.sequence):
            return
        self._check_process()
        with self._lock:
            self._launch_to(len(self.order.sequence) - 1)

    def ensure_all(self) -> None:
        """Bring every bucket up to date."""
        self.launch_all()
        for index in self.order.sequence:
            replica = self._storage.replicas[index]
            if replica.version != replica.shard.version:
                self._catch_up(replica)
            replica.wait_written()

    @torch.no_grad()
    def _launch_to(self, position: int) -> None:
        while self._launched <= position:
            replica = self._storage.replicas[self.order.sequence[self._launched]]
            self._make_room(replica)
            with self._beside(replica), scope(f"launch gather of {replica.plan.label}"):
                message = replica.message()
                op = self._ops[replica.plan.index]
                if op is not None:
                    self._flights[replica.plan.index] = self._start(replica, message, op)
                replica.launch()
            self._launched += 1

    def _make_room(self, replica: Replica) -> None:
        """Land gathers that have staging memory which this one needs, the oldest first: all ranks have launched it."""
        while not replica.has_room:
            launched = (self._storage.replicas[index] for index in self.order.sequence[: self._launched])
            oldest = next(other for other in launched if other.has_slot)
            with self._beside(oldest):
                self._land(oldest)

    def _beside(self, replica: Replica) -> AbstractContextManager[object]:
        """On CUDA, a stream of its own for gathers that share slots: they wait for each other there, and nobody else does."""
        device = self._storage.device
        if device.type != "cuda" or not (replica.needs_slot or replica.has_slot):
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)

    def _land(self, replica: Replica) -> None:
        flight = self._flights.get(replica.plan.index)
        if flight is not None:
            with self._impatient(replica):
                flight.wait()  # which may fail: only what has arrived is no flight any more
            del self._flights[replica.plan.index]
        replica.land()
        if self._guards:
            self._guards[replica.plan.index].disarm()

    def leave(self, deadline_s: float) -> None:
        """The process ends: let what was launched arrive, since others wait for this rank's part of it."""
        if os.getpid() != self._process:
            return
        try:
            for flight in self._flights.values():
                flight.settle(deadline_s - time.monotonic())
            if self._flights and self._storage.device.type == "cuda":
                torch.cuda.synchronize(self._storage.device)
        except RuntimeError:
            return  # the others are gone already, or late: there is nobody left to tell

    @contextmanager
    def _impatient(self, replica: Replica) -> Iterator[None]:
        """Where gathers are launched as forward asks for them, it may be one rank alone that reads, while the others wait for
        it elsewhere: say what it waits for."""
        if not self._is_lazy or self._storage.device.type == "cuda":  # there it is the device that waits, and no rank
            yield
            return
        name = replica.plan.placements[0].fqn
        hint = (
            f"{name!r} is read on this rank, which waits for the other ranks to read it too. If they wait for this one, call "
            "model.ensure() on every rank first, or build the DataParallel with overlap_param_gather=True."
        )
        try:
            with impatient(hint):
                yield
        except RuntimeError as error:
            raise StateError(hint) from error

    def _check_process(self) -> None:
        """What gathers are made of, threads and connections, a forked process does not have: it would wait for ever."""
        if os.getpid() != self._process:
            raise StateError(
                "weights are read in a forked process while they are still on their way to the process it was forked from: call "
                "model.ensure() before the fork."
            )

    def _start(self, replica: Replica, message: Tensor, op: CommOp) -> Handle:
        """Launch a bucket's gather, in place: the message is this rank's part of where it lands."""
        communicator = self._communicators[replica.plan.domain]
        if replica.plan.publisher == "uneven_all_gather":
            return communicator.uneven_all_gather(op, replica.landing, replica.plan.shard_numels())
        return communicator.all_gather(op, message, replica.landing)

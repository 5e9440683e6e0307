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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.groups import Groups, share
from layerwise.comm.handles import Handle
from layerwise.comm.leaving import before_exit
from layerwise.comm.scopes import scope
from layerwise.errors import StateError, warn
from layerwise.layout.schedule import CommOp, gather_order, publish_op
from layerwise.layout.storage import BucketPlan
from layerwise.memory.replicas import Replica
from layerwise.memory.stale import StaleGuard
from layerwise.memory.storage import Storage

_PATIENCE_S = 10.0
"""After how long a rank that reads a weight says what it is waiting for."""


class Publisher:
    """Brings replicas up to date by pulling from masters."""

    def __init__(
        self,
        storage: Storage,
        communicators: Mapping[str, Communicator],
        *,
        overlap: bool,
        prefetch: int | None,
        aligned: bool,
    ) -> None:
        self._storage = storage
        self._communicators = communicators
        self.overlap = overlap
        copied = {id(replica.shard) for replica in storage.replicas}
        # What only its owner reads is written there at once.
        self._alone = [shard for shard in storage.shards if id(shard) not in copied]
        self._ops = [
            publish_op(replica.plan, storage.plan.buffers[replica.plan.buffer].key.dtype)
            for replica in storage.replicas
        ]
        self.due_nbytes: Counter[str] = Counter()
        """What one round of gathers will have sent."""
        for replica, op in zip(storage.replicas, self._ops, strict=True):
            if op is not None:
                self.due_nbytes[op.kind] += op.nbytes(communicators[replica.plan.domain].rank)
        self._prefetch, self._aligned = prefetch, aligned
        self._process = os.getpid()
        self._guards = [self._guard(replica) for replica in storage.replicas] if overlap else []
        self._flights: dict[int, Handle] = {}
        # Whoever reads a weight may be a thread of the user's own, while another one waits for the same gather.
        self._lock = threading.RLock()
        self._launched = len(storage.replicas)
        self._set_order(gather_order(len(storage.replicas)))
        # In which order modules first asked for buckets: the true forward order, once it has been seen.
        self._asked: list[int] | None = [] if overlap else None
        self._when_learned: list[Callable[[], object]] = []
        self._compiled: dict[int, Replica] = {}
        self._unguarded: dict[int, Replica] = {}
        if overlap:
            before_exit(self)

    def _guard(self, replica: Replica) -> StaleGuard:
        params = [self._storage.params[placement.fqn] for placement in replica.plan.placements]
        return StaleGuard(params, partial(self.ensure, replica))

    def _set_order(self, order: Sequence[int]) -> None:
        """The sequence of gathers, and how far each bucket's reader launches it."""
        self._order = list(order)
        last = len(order) - 1
        ahead = last + 1 if self._prefetch is None else self._prefetch
        self._first = min(ahead - 1, last)
        self._reach = {index: min(position + ahead, last) for position, index in enumerate(self._order)}
        if self._aligned:
            # All of a chunk at once, and nothing of the next: the pipeline's stages run the same chunk together.
            chunks = [self._storage.plan.buffers[replica.plan.buffer].key.chunk for replica in self._storage.replicas]
            # Also what nobody asked for in the first forward, and would come last.
            in_turn = list(dict.fromkeys(chunks[index] for index in self._order))
            self._order.sort(key=lambda index: in_turn.index(chunks[index]))
            last_of = {chunks[index]: position for position, index in enumerate(self._order)}
            self._reach = {index: last_of[chunks[index]] for index in self._order}
            self._first = -1

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
            self._launch_to(self._first)
            for replica in self._unguarded.values():
                self.ensure(replica)

    @torch.no_grad()
    def ensure(self, replica: Replica) -> None:
        """Make this rank's replica of a bucket as new as its master."""
        if replica.version != replica.shard.version:
            self._catch_up(replica)

    def _catch_up(self, replica: Replica) -> None:
        self._check_process()
        with self._lock:
            if replica.version != replica.shard.version:  # still, after another thread's turn
                self._launch_to(self._reach[replica.plan.index])
                self._land(replica)

    def launch_all(self) -> None:
        """Launch what is left, and wait for nothing."""
        if self._launched == len(self._order):
            return
        self._check_process()
        with self._lock:
            self._launch_to(len(self._order) - 1)

    def ensure_all(self) -> None:
        """Bring every bucket up to date."""
        self.launch_all()
        for index in self._order:
            replica = self._storage.replicas[index]
            if replica.version != replica.shard.version:
                self._catch_up(replica)

    @torch.no_grad()
    def _launch_to(self, position: int) -> None:
        while self._launched <= position:
            replica = self._storage.replicas[self._order[self._launched]]
            with scope(f"launch gather of {replica.plan.label}"):
                message = replica.message()
                op = self._ops[replica.plan.index]
                if op is not None:
                    self._flights[replica.plan.index] = self._start(replica, message, op)
                replica.launch()
            self._launched += 1

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
        if self._prefetch is None and not self._aligned:
            yield
            return
        name = replica.plan.placements[0].fqn
        hint = (
            f"{name!r} is read on this rank, which waits for the other ranks to read it too. If they wait for this one, call "
            "model.ensure() on every rank first, or pass prefetch=None to DataParallel."
        )
        timer = threading.Timer(_PATIENCE_S, warn, (hint,))
        timer.daemon = True
        timer.start()
        try:
            yield
        except RuntimeError as error:
            raise StateError(hint) from error
        finally:
            timer.cancel()

    def _check_process(self) -> None:
        """What gathers are made of, threads and connections, a forked process does not have: it would wait for ever."""
        if os.getpid() != self._process:
            raise StateError(
                "weights are read in a forked process while they are still on their way to the process it was forked from: call "
                "model.ensure() before the fork."
            )

    def _start(self, replica: Replica, message: Tensor, op: CommOp) -> Handle:
        communicator = self._communicators[replica.plan.domain]
        match replica.plan.publisher:
            case "uneven_all_gather":
                return communicator.uneven_all_gather(op, replica.weights, replica.plan.shard_numels())
            case "broadcast":
                return communicator.broadcast_parts(op, replica.weights, _all_spans(replica.plan))
            case _:
                return communicator.all_gather(op, message, replica.weights)

    # -- the order of forward ------------------------------------------------------------------------

    def ask(self, buckets: Iterable[Replica]) -> None:
        """A module that reads these is about to run."""
        if self._asked is not None:
            self._asked.extend(replica.plan.index for replica in buckets if replica.plan.index not in self._asked)

    def when_learned(self, then: Callable[[], object]) -> None:
        """Call this once nobody needs to `ask` any more."""
        self._when_learned.append(then)

    def learn_order(self, groups: Groups) -> None:
        """Once, in the first step: gather in the order in which forward asked, from now on. Ranks of a stage take their
        first one's word, since they must launch alike. No gather may be left to launch, and none be due: it may raise."""
        if self._asked is None:
            return
        asked, first = self._asked, min(groups.stages[groups.stage])

        def mine() -> dict[str, object]:
            # In here, because a warning may be an error, and one on one rank must be one on all.
            if groups.rank == first and [index for index in self._order if index in asked] != asked:
                name = self._storage.replicas[asked[0]].plan.placements[0].fqn
                warn(
                    "modules run in another order than they were registered in: params are gathered as they run from now "
                    f"on, first the bucket of {name!r}.",
                )
            return {"order": asked}

        told: Any = share(groups, mine)
        order = told[first]["order"]
        self._asked = None
        for then in self._when_learned:
            then()
        self._set_order([*order, *(index for index in self._order if index not in order)])

    # -- compiled modules ----------------------------------------------------------------------------

    def note_compiled(self, buckets: Iterable[Replica]) -> None:
        """A module that reads these is being traced: the code that comes of it will not ask."""
        for replica in buckets:
            if replica.plan.index in self._compiled and replica.version != replica.shard.version:
                # It is entered by a way that we do not know. Tracing it anew in every step would cost more than it saves.
                self._unguarded[replica.plan.index] = replica
            self._compiled[replica.plan.index] = replica
            self.ensure(replica)

    def ensure_compiled(self) -> None:
        """Bring up to date whatever compiled code may read. Never to be traced itself."""
        for replica in self._compiled.values():
            self.ensure(replica)


def _all_spans(plan: BucketPlan) -> list[tuple[int, slice]]:
    """Every span of a bucket with the rank that owns it, as parts of the bucket."""
    found: list[tuple[int, slice]] = []
    for rank in range(plan.world):
        start = plan.shard_part(rank).start
        found.extend((rank, slice(start + span.part.start, start + span.part.stop)) for span in plan.spans(rank))
    return found

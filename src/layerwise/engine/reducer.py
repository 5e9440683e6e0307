"""Phase 1, reduce: gradients fill buckets, and full buckets are reduced while backward goes on.

Buckets are launched strictly in plan order. A bucket that is full early waits for its predecessors, so the sequence of
collectives is the same on every rank even when ranks produce gradients in different orders, or some of them not at all.

Where full gradients are released once reduced, every microbatch is reduced on its own and the shards add up: a round
ends with each `no_sync()` block, and the last one in `finish()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.scopes import scope
from layerwise.engine.arrivals import Expected
from layerwise.engine.gradients import Said
from layerwise.engine.progress import BucketPhase, Flight, Progress
from layerwise.engine.reductions import predivisor, reduction_of
from layerwise.errors import StateError, listed
from layerwise.layout.buckets import BucketPlan
from layerwise.layout.schedule import tie_op
from layerwise.memory.replicas import Replica
from layerwise.memory.storage import Storage
from layerwise.memory.streams import InTurn


class GradReducer:
    """Accumulates gradients into buckets and reduces the buckets."""

    are_copies = are_reduced = False
    joint: frozenset[str] = frozenset()

    def __init__(
        self,
        storage: Storage,
        communicators: Mapping[str, Communicator],
        ties: Mapping[str, Communicator],
        *,
        overlap: bool,
        before: Callable[[], None] = lambda: None,
        ensure: Callable[[Replica], None] = lambda _: None,
    ) -> None:
        self._storage = storage
        self._overlap = overlap
        # What every rank must have launched before its first reduction.
        self._before = before
        # What has a bucket's gradient memory back from a gather.
        self._ensure = ensure
        self._predivisor = predivisor(storage.plan.grad_dtype, storage.plan.world)
        self._reductions = [
            reduction_of(replica, storage.plan.grad_dtype, communicators[replica.plan.domain], self._predivisor)
            for replica in storage.replicas
        ]
        self._ties = {replica.plan.index: ties[replica.plan.tie] for replica in storage.replicas if replica.plan.tie}
        self._groups = storage.plan.reduce_groups
        self._bucket_of = storage.plan.bucket_of
        # Backward writes a gradient on the stream of its param's forward, and reduces a bucket on that of its last one.
        self._turns = InTurn(storage.device) if storage.device.type == "cuda" else None
        self._written: set[str] = set()
        self._seen: set[str] = set()
        self._arrivals: dict[str, int] = {}
        # Until one backward was seen nothing is launched early, unless full gradients must not pile up.
        self._expected = Expected(self._bucket_of, len(storage.replicas))
        self._progress = [Progress() for _ in storage.replicas]
        # What came late: the params, and by bucket one spare gradient that all of it is added into.
        self._late: set[str] = set()
        self._spares: dict[int, Tensor] = {}
        self._next = 0
        self._is_last_round = True
        self._is_finished = False
        self.sync = True
        """Whether gradients are of the last microbatch now: not in a `no_sync()` block."""
        self.said = Said()
        self.when_dropped: Callable[[], None] = lambda: None
        self._has_launched = False
        self._unwanted: set[str] = set()
        self.reset()

    @property
    def _leases(self) -> bool:
        return self._storage.plan.options.shard_grads

    @torch.no_grad()
    def write(self, fqn: str, grad: Tensor, *, sync: bool) -> None:
        """Add a gradient. With `sync` it belongs to the last microbatch, so its bucket may be reduced once all of its
        gradients are in."""
        if self._turns is not None:
            self._turns.go_on()
        self._is_last_round = sync
        progress = self._progress[self._bucket_of[fqn]]
        if progress.phase is BucketPhase.FILLING:
            self._accumulate(fqn, grad)
        else:
            # Kept aside, not waited for: a peer may launch this bucket only in its step(), and in between the user may
            # have collectives of his own that need both of us.
            self._keep_aside(fqn, grad)
        if sync or self._leases:
            self._arrivals[fqn] = self._arrivals.get(fqn, 0) + 1
            if self._may_launch_early and self._arrivals[fqn] == self._expected.counts.get(fqn):
                progress.pending -= 1
                self._launch_ready()

    def _keep_aside(self, fqn: str, grad: Tensor) -> None:
        index = self._bucket_of[fqn]
        if index not in self._spares:
            self._spares[index] = self._spare(index)
        self._storage.view_in(self._spares[index], fqn).add_(grad)
        self._late.add(fqn)

    def _spare(self, index: int) -> Tensor:
        """Zeros, as long as a bucket."""
        replica = self._storage.replicas[index]
        return torch.zeros(replica.plan.numel, dtype=self._reductions[index].dtype, device=replica.shard.update.device)

    def _accumulate(self, fqn: str, grad: Tensor) -> None:
        self._take_memory(self._storage.replicas[self._bucket_of[fqn]])
        view = self._storage.grad_view(fqn)
        if fqn in self._written:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._written.add(fqn)

    @property
    def _may_launch_early(self) -> bool:
        return self._overlap and (self._expected.is_learned or self._leases)

    @property
    def late(self) -> frozenset[str]:
        """Params that got a gradient on this rank after their reduction was launched (a second backward without
        `no_sync`). Other ranks may have other ones, so what to reduce again is for all of them to decide together."""
        return frozenset(self._late)

    @torch.no_grad()
    def reduce_again(self, fqns: Iterable[str]) -> None:
        """Add what came late to the sums of these params' buckets: the same ones on every rank."""
        if self._turns is not None:
            self._turns.go_on()
        more_of: dict[int, Tensor] = {}
        for index in sorted({self._bucket_of[fqn] for fqn in fqns}):
            replica = self._storage.replicas[index]
            spare = self._spares.pop(index, None)
            full = self._spare(index) if spare is None else spare  # others have something, if not this rank
            out = torch.empty_like(replica.grad_shard)
            self._reductions[index].start(full, out).wait()
            more_of[index] = out.to(replica.shard.update.dtype)
        self._add_stages(more_of)
        for index, more in more_of.items():
            self._storage.replicas[index].shard.update.add_(more)
        self._seen |= self._late
        self._forget_late()

    def _forget_late(self) -> None:
        self._late.clear()
        self._spares.clear()

    def _launch_ready(self) -> None:
        """Launch up to the last group whose gradients are all in. What nobody expects goes along with what comes after it,
        and is not launched for its own sake: it may come in this round, and would be late."""
        stop = self._next
        for number in range(self._next, len(self._groups)):
            buckets = self._groups[number].buckets
            if any(self._progress[index].pending > 0 for index in buckets):
                break
            if any(self._expected.params_by_bucket[index] for index in buckets):
                stop = number + 1
        while self._next < stop:
            self._launch_next()

    def _launch_next(self) -> None:
        if self._next == 0:
            self._before()
        self._has_launched = True
        for index in self._groups[self._next].buckets:
            self._launch(self._storage.replicas[index], self._progress[index])
        self._next += 1

    def _launch(self, replica: Replica, progress: Progress) -> None:
        if progress.phase is not BucketPhase.FILLING or not (self._is_last_round or replica.ring is not None):
            return
        full = self._take_memory(replica)
        for placement in replica.plan.placements:
            if placement.fqn not in self._written:
                self._storage.grad_view(placement.fqn).zero_()
        out = torch.empty_like(replica.grad_shard) if progress.has_landed or progress.flights else replica.grad_shard
        with scope(f"launch reduction of {replica.plan.label}"):
            handle = self._reductions[replica.plan.index].start(full, out)
        progress.flights.append(Flight(handle, full, out))
        progress.phase = BucketPhase.REDUCING

    def _take_memory(self, replica: Replica) -> Tensor:
        """A bucket's gradient memory is backward's from now on, whoever has it."""
        if replica.is_lent:
            self._ensure(replica)
        replica.holds_gradient = True
        return self._lease(replica) if replica.grad is None else replica.grad

    def _lease(self, replica: Replica) -> Tensor:
        """Memory for the full gradient of a bucket: that of a reduction which is over, or else one slot more for a while.
        Nothing is waited for here. A peer may reduce a bucket only in its step(), and the user may have collectives of
        their own before that."""
        ring = replica.ring
        if ring is None:
            raise RuntimeError(f"{replica.plan.label} does not lease its gradient.")
        for other, progress in zip(self._storage.replicas, self._progress, strict=True):
            if other.ring is ring and all(flight.handle.is_ready for flight in progress.flights):
                self._land(other, progress)
        replica.grad = ring.lease(replica.plan.numel)
        return replica.grad

    def _land(self, replica: Replica, progress: Progress) -> None:
        """Wait for a bucket's reductions and take the sums."""
        for flight in progress.flights:
            flight.handle.wait()
            if flight.out.data_ptr() != replica.grad_shard.data_ptr():
                replica.grad_shard.add_(flight.out)
            progress.has_landed = True
            if replica.ring is not None:
                replica.ring.release(flight.full)
                if replica.grad is flight.full:
                    replica.grad = None
        progress.flights.clear()
        if progress.phase is BucketPhase.REDUCING:
            progress.phase = BucketPhase.REDUCED

    @torch.no_grad()
    def end_round(self, *, wait: bool = True) -> None:
        """A `no_sync()` block is over: where full gradients are released, reduce what it brought, and wait for it, or the
        next block's would pile up on top. Every rank does, also one that it brought nothing: the others wait for its
        zeros. What comes once all is finished, for a norm before the step, is late and stays that."""
        if not self._leases or self._is_finished:
            return
        self._is_last_round = False
        self._finish_round() if wait else self._launch_rest()
        self._learn()
        for replica, progress in zip(self._storage.replicas, self._progress, strict=True):
            progress.pending = self._expected.params_by_bucket[replica.plan.index]
            if replica.ring is not None:
                self._written.difference_update(placement.fqn for placement in replica.plan.placements)
                progress.phase = BucketPhase.FILLING
                replica.grad = None
        self._next = 0
        for fqn in [fqn for fqn in sorted(self._late) if self._storage.replicas[self._bucket_of[fqn]].ring is not None]:
            self._accumulate(fqn, self._storage.view_in(self._spares[self._bucket_of[fqn]], fqn))
            self._late.remove(fqn)
        kept = {self._bucket_of[fqn] for fqn in self._late}
        self._spares = {index: spare for index, spare in self._spares.items() if index in kept}

    def _learn(self) -> None:
        self._seen.update(self._written)
        self._expected.learn(self._arrivals)
        self._arrivals.clear()

    @torch.no_grad()
    def finish(self) -> frozenset[str]:
        """Reduce what is left, wait for everything; returns the params that got no gradient on this rank. After it each
        shard's update holds the sum over ranks, in fp32."""
        if not self._is_finished:
            self._is_last_round = True
            self._finish_round()
            self._learn()
            for replica in self._storage.replicas:
                replica.take_gradient()
            self._add_stages({index: self._storage.replicas[index].shard.update for index in self._ties})
            self._is_finished = True
        return frozenset(self._bucket_of).difference(self._seen, self._late)

    def _add_stages(self, shards: Mapping[int, Tensor]) -> None:
        """Sum the gradients of tied weights over the pipeline stages that hold copies of them; the order is by name,
        since their buckets may come in another order on another stage."""
        for index in sorted(shards.keys() & self._ties.keys(), key=lambda index: self._plan_of(index).tie):
            communicator = self._ties[index]
            communicator.all_reduce(tie_op(self._plan_of(index), communicator.world), shards[index]).wait()

    def _plan_of(self, index: int) -> BucketPlan:
        return self._storage.replicas[index].plan

    def _launch_rest(self) -> None:
        if self._turns is not None:
            self._turns.go_on()
        while self._next < len(self._groups):
            self._launch_next()

    def _finish_round(self) -> None:
        self._launch_rest()
        for replica, progress in zip(self._storage.replicas, self._progress, strict=True):
            self._land(replica, progress)

    @torch.no_grad()
    def settle(self) -> None:
        """Have nothing under way, wherever ranks are: every rank does it, so all of them finish the round. What comes
        afterwards is late."""
        self._is_last_round = True
        self._finish_round()

    @torch.no_grad()
    def forget(self) -> None:
        """Forget all gradients, and what was said of them. If their reduction has begun, ranks tell each other."""
        self.said = Said()
        has_launched = self.reset()
        if has_launched:
            self.when_dropped()

    def reset(self) -> bool:
        """Forget all gradients; returns whether any were reduced, here and with that on other ranks. Costs no pass over
        memory: the first write of a gradient replaces what was there.

        A round that was begun is finished first: other ranks may have launched buckets that this one has not, because
        its gradients were missing, and would wait for it for ever.
        """
        if self._may_launch_early and self._arrivals:
            self._is_last_round = True
            self._finish_round()
        for progress, replica in zip(self._progress, self._storage.replicas, strict=True):
            self._land(replica, progress)
            if replica.ring is not None and replica.grad is not None:
                replica.ring.release(replica.grad)
                replica.grad = None
            replica.holds_gradient = False
            progress.phase = BucketPhase.FILLING
            progress.pending = self._expected.params_by_bucket[replica.plan.index]
            progress.has_landed = False
        self._written.clear()
        self._seen.clear()
        self._arrivals.clear()
        self._forget_late()
        self._unwanted.clear()
        self._next = 0
        self._is_finished = False
        has_launched, self._has_launched = self._has_launched, False
        return has_launched

    def leave(self) -> bool:
        self.forget()
        return False

    @property
    def is_under_way(self) -> bool:
        """Whether this rank has launched the reduction of any bucket since the last reset."""
        return self._has_launched

    def forget_one(self, fqn: str) -> None:
        """Forget a param's gradient, once that of every other is to be forgotten too: buckets are reduced whole, on all
        ranks or on none."""
        self._unwanted.add(fqn)
        if len(self._unwanted) == len(self._bucket_of):
            self.forget()

    @property
    def common_divisor(self) -> float:
        return float(self._storage.plan.world)

    @property
    def own_divisor(self) -> float:
        return self._storage.plan.world / self._predivisor

    def check(self) -> None:
        """Raise if gradients of some params were to be forgotten, and not of all, or if somebody set a `.grad` by hand."""
        self._storage.check_no_grads()
        if self._unwanted:
            kept = sorted(self._bucket_of.keys() - self._unwanted)
            raise StateError(
                f"zero_grad() was called on a part of the model: expected all of it, gradients of {listed(kept)} are still "
                "there. They lie in buckets and are forgotten together: call zero_grad() of the model or of the optimizer."
            )

    @property
    def arrived(self) -> frozenset[str]:
        """Params that got a gradient on this rank since the last reset."""
        return self.late.union(self._written, self._seen)

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient was written since the last reset."""
        return bool(self._written or self._seen or self._late)

"""The tensors that a plan asks for: replicas, gradients, masters and optimizer state, each flat and cut by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from layerwise.errors import StateError, listed
from layerwise.layout.plan import Plan
from layerwise.layout.slots import IdleRun, place_slots, usable
from layerwise.layout.storage import GRAD_SLOTS, BucketPlan, BufferPlan, Span
from layerwise.memory.places import Places
from layerwise.memory.slots import Slots
from layerwise.models.table import torch_dtype
from layerwise.routing.geometry import Box, flat_index, row_major_strides


class ReplicaState(Enum):
    """How a bucket's replica stands to its master."""

    FRESH = "fresh"  # forward may read it
    STALE = "stale"  # the master has moved on
    IN_FLIGHT = "in flight"  # a gather is writing it


@dataclass(eq=False)
class Bucket:
    """One bucket's memory on this rank."""

    plan: BucketPlan
    shard: int
    replica: Tensor  # 1D, param dtype: what forward reads; every rank has all of it
    grad: Tensor | None  # 1D, grad dtype: what backward accumulates into; None between leases, where it is leased
    grad_shard: (
        Tensor  # 1D: this rank's shard of the reduced gradient; lies in `grad` unless that is leased or narrower
    )
    work: Tensor  # 1D, fp32: averaged gradient, then update; aliases `grad_shard` where that is fp32 already
    master: Tensor  # 1D, fp32: the truth of this rank's shard; aliases `replica` for fp32 params
    spans: tuple[Span, ...]
    ring: GradRing | None = None  # where `grad` is leased from
    state: dict[str, Tensor] = field(default_factory=dict)  # 1D, fp32 each: momentum, exp_avg ...
    # The step that masters are at, the one whose gather was launched last, and the one that forward reads.
    master_version: int = 0
    launched_version: int = 0
    replica_version: int = 0

    @cached_property
    def span_by_fqn(self) -> dict[str, Span]:
        """This rank's span of each param that it holds some of."""
        return {span.fqn: span for span in self.spans}

    def region_in(self, flat: Tensor, fqn: str, grid: tuple[int, ...], region: Box) -> Tensor:
        """A region of a param (seen as a `grid`) that this rank holds, as a view of a tensor of the shard's length."""
        span = self.span_by_fqn[fqn]
        offset = flat.storage_offset() + span.shard_offset - span.start + flat_index(region.starts, grid)
        return flat.as_strided(region.shape, row_major_strides(grid), offset)

    @property
    def replica_state(self) -> ReplicaState:
        """Where the three versions are; there is no flag that could say something else."""
        if self.replica_version == self.master_version:
            return ReplicaState.FRESH
        return ReplicaState.IN_FLIGHT if self.launched_version == self.master_version else ReplicaState.STALE

    def advance(self) -> None:
        """The master has moved: fresh becomes stale."""
        self._expect(ReplicaState.FRESH, ReplicaState.STALE)
        self.master_version += 1

    def launch(self) -> None:
        """The gather was started: stale becomes in flight."""
        self._expect(ReplicaState.STALE, ReplicaState.IN_FLIGHT)
        self.launched_version = self.master_version

    def land(self) -> None:
        """The gather was waited for: in flight becomes fresh."""
        self._expect(ReplicaState.IN_FLIGHT, ReplicaState.FRESH)
        self.replica_version = self.master_version

    def _expect(self, state: ReplicaState, becoming: ReplicaState) -> None:
        if self.replica_state is not state:
            raise StateError(
                f"{self.plan.label} cannot become {becoming.value}: its replica is {self.replica_state.value} (version "
                f"{self.replica_version} of {self.master_version}), expected {state.value}. Bring it up to date first, "
                "with model.ensure()."
            )

    @property
    def replica_shard(self) -> Tensor:
        """The part of the replica that this rank publishes."""
        return self.replica[self.plan.shard_part(self.shard)]

    def refresh_replica_shard(self) -> None:
        """Write the params' own dtype of the master into this rank's part of the replica."""
        if self.master.data_ptr() != self.replica_shard.data_ptr():
            self.replica_shard.copy_(self.master)

    def refresh_master(self) -> None:
        """Take the replica as the truth, before there was any step."""
        if self.master.data_ptr() != self.replica_shard.data_ptr():
            self.master.copy_(self.replica_shard)

    def pull(self, part: slice) -> None:
        """Take over what was written into a part of this rank's shard of the replica. Where that is what the master rounds
        to, the master knows better: weights and masters may both have been loaded, in either order."""
        if self.master.data_ptr() != self.replica_shard.data_ptr():
            master, seen = self.master[part], self.replica_shard[part]
            master.copy_(torch.where(master.to(seen.dtype) == seen, master, seen.to(master.dtype)))


class GradRing:
    """Memory for the full gradients of a buffer's buckets, leased to one bucket at a time.

    A few slots are kept. When all of them are out another one is made and dropped afterwards: waiting for a peer in the
    middle of backward could be waiting for ever, if that peer waits for us elsewhere.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel, self._dtype, self._device = numel, dtype, device
        self._free: list[Tensor] = []
        self._leased: dict[int, Tensor] = {}
        self.peak = 0
        """Most slots that were ever out at once."""

    def lease(self, numel: int) -> Tensor:
        """Zeros, as many as a bucket needs."""
        slot = self._free.pop() if self._free else torch.empty(self._numel, dtype=self._dtype, device=self._device)
        self._leased[slot.data_ptr()] = slot
        self.peak = max(self.peak, len(self._leased))
        return slot[:numel].zero_()

    def release(self, leased: Tensor) -> None:
        slot = self._leased.pop(leased.data_ptr())
        if len(self._leased) + len(self._free) < GRAD_SLOTS:
            self._free.append(slot)

    def free(self) -> None:
        """Let go of slots that nobody has."""
        self._free.clear()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All slots, leased or free."""
        return (*self._free, *self._leased.values())


def one_device(params: Mapping[str, nn.Parameter]) -> torch.device:
    """The device that all params are on; they must have values there."""
    fqn_by_device = {param.device: fqn for fqn, param in params.items()}
    if len(fqn_by_device) > 1:
        (first, one), (second, other) = list(fqn_by_device.items())[:2]
        raise ValueError(
            f"params {one!r} and {other!r} are on different devices ({first} and {second}): expected all trainable "
            "params on one. Move the module to one device before wrapping it."
        )
    device, fqn = next(iter(fqn_by_device.items()))
    if device.type == "meta":
        raise ValueError(
            f"param {fqn!r} is on the meta device: it has no values. Materialise the module (to_empty() and "
            "initialise) before wrapping it."
        )
    return device


def refuse_sparse(fqn: str, grad: Tensor) -> None:
    """Raise for a sparse gradient, by name."""
    if grad.is_sparse:
        raise TypeError(f"param {fqn!r} has a sparse gradient: buckets are dense. Use sparse=False on its module.")


def _of_its_own(part: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger. What saves a param writes its storage, and what looks for
    shared weights compares storages: a param must not seem to be a part of its whole buffer."""
    start = part.storage_offset() * part.element_size()
    storage = part.untyped_storage()[start : start + part.nbytes]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, 0, part.shape)  # type: ignore[call-overload, no-any-return]


class Storage:
    """All buckets of a model on this rank. Params are re-pointed at views of the replicas."""

    def __init__(self, plan: Plan, params: Mapping[str, nn.Parameter], ranks: Mapping[str, int]) -> None:
        self.plan = plan
        self.ranks = dict(ranks)
        """This rank's number in every domain."""
        self.params = dict(params)
        if plan.bucket_of.keys() != self.params.keys():
            missing = sorted(plan.bucket_of.keys() ^ self.params.keys())
            raise ValueError(f"params and plan do not match: {listed(missing)} is only in one of them.")
        self.buckets: tuple[Bucket, ...] = ()
        self._grad_parts: dict[str, tuple[Bucket, slice, torch.Size]] = {}
        self._grad_views: dict[str, Tensor] = {}  # ND, alias the buckets' grads, where those stay
        self._full_grads: list[Tensor | None] = []
        found: dict[int, Bucket] = {}
        self.device = device = one_device(self.params)
        for buffer in plan.buffers:
            replica = torch.zeros(buffer.numel, dtype=torch_dtype(buffer.key.dtype), device=device)
            grad, ring = self._gradients(buffer, device)
            self._full_grads.append(grad)
            for bucket in buffer.buckets:
                part = slice(bucket.offset, bucket.offset + bucket.numel)
                found[bucket.index] = self._bucket(bucket, replica[part], None if grad is None else grad[part], ring)
        self.buckets = tuple(found[index] for index in sorted(found))
        self._adopt_params()
        self._fqns = tuple(self.params)
        self._places = Places(tuple(self.params.values()))

    def _gradients(self, buffer: BufferPlan, device: torch.device) -> tuple[Tensor | None, GradRing | None]:
        dtype = torch_dtype(self.plan.grad_dtype)
        if self.plan.leases_grads(buffer):
            return None, GradRing(max(bucket.numel for bucket in buffer.buckets), dtype, device)
        return torch.zeros(buffer.numel, dtype=dtype, device=device), None

    def _bucket(self, plan: BucketPlan, replica: Tensor, grad: Tensor | None, ring: GradRing | None) -> Bucket:
        shard = plan.shard_of(self.ranks[plan.domain])
        numel, device = plan.shard_numel(shard), replica.device
        # An ordered sum is taken in fp32 and stays that.
        dtype = torch.float32 if plan.reducer.startswith("ordered") else torch_dtype(self.plan.grad_dtype)
        if grad is not None and grad.dtype == dtype:
            grad_shard = grad[plan.shard_part(shard)]
        else:
            grad_shard = torch.zeros(numel, dtype=dtype, device=device)
        work = grad_shard if dtype == torch.float32 else torch.zeros(numel, dtype=torch.float32, device=device)
        if replica.dtype == torch.float32:
            master = replica[plan.shard_part(shard)]
        else:
            master = torch.zeros(numel, dtype=torch.float32, device=device)
        return Bucket(
            plan=plan,
            shard=shard,
            replica=replica,
            grad=grad,
            grad_shard=grad_shard,
            work=work,
            master=master,
            spans=plan.spans(shard),
            ring=ring,
        )

    @torch.no_grad()
    def _adopt_params(self) -> None:
        for bucket in self.buckets:
            for placement in bucket.plan.placements:
                param = self.params[placement.fqn]
                part = slice(placement.offset, placement.offset + placement.numel)
                view = _of_its_own(bucket.replica[part]).view(param.shape)
                view.copy_(param.data)
                param.data = view
                self._grad_parts[placement.fqn] = bucket, part, param.shape
                if bucket.grad is not None:
                    self._grad_views[placement.fqn] = bucket.grad[part].view(param.shape)
            bucket.refresh_master()

    def grad_view(self, fqn: str) -> Tensor:
        """Where a param's gradient accumulates, in the param's shape."""
        view = self._grad_views.get(fqn)
        return view if view is not None else self.view_in(self._leased_grad(fqn), fqn)

    def view_in(self, full: Tensor, fqn: str) -> Tensor:
        """A param's place in a tensor of its bucket's length."""
        _, part, shape = self._grad_parts[fqn]
        return full[part].view(shape)

    def _leased_grad(self, fqn: str) -> Tensor:
        bucket = self._grad_parts[fqn][0]
        if bucket.grad is None:
            raise StateError(f"{bucket.plan.label} has no gradient memory: it was released when it was reduced.")
        return bucket.grad

    def slots(self, passages: Sequence[Sequence[int]]) -> Slots:
        """Staging memory for passages of so many bytes, domain by domain."""
        itemsize = self.plan.grad_dtype.itemsize
        runs = usable(self.plan.idle_runs(self.ranks), itemsize) if self.plan.staging == "gradients" else []
        plan = place_slots(passages, [run.stop - run.start for run in runs])
        return Slots(plan, self.device, [self._idle_bytes(run) for run in runs])

    def _idle_bytes(self, run: IdleRun) -> Tensor:
        full = self._full_grads[run.buffer]
        if full is None:
            raise RuntimeError(f"buffer {run.buffer} has no gradients to lease.")
        return full.view(torch.uint8)[run.start : run.stop]

    def check_aliases(self) -> None:
        """Raise if a param no longer reads the replica, as after `module.to()`, `param.data = ...`, or once it was shared with
        another process, which gives its storage other memory: updates would not reach it."""
        if moved := self._places.moved():
            raise StateError(
                f"param {self._fqns[moved[0]]!r} was moved out of its buffer (by module.to(), param.data = ..., share_memory(), a "
                "queue of torch.multiprocessing or similar): expected it at its place in the replica. Move or convert the module "
                "before it is wrapped; to change values use param.copy_() under torch.no_grad(); send clones to other processes."
            )

    def check_no_grads(self) -> None:
        """Raise if a param has a `.grad` of its own: hooks take what backward brings, so somebody set it by hand."""
        if found := self._places.with_grads():
            raise StateError(
                f"param {self._fqns[found[0]]!r} has a .grad that backward did not bring: a DataParallel keeps gradients in buckets "
                "and would not see it. Add a term to the loss instead; if another wrapper such as DistributedDataParallel put it "
                "there, train without that one."
            )

    @torch.no_grad()
    def release(self) -> None:
        """Give params memory of their own, with the values that they have."""
        for param in self.params.values():
            param.data = param.data.clone()

    def note_update(self) -> None:
        """Weights have moved: autograd must not use them for a graph of before, as if nothing had happened."""
        increment_version(list(self.params.values()))
        self._places.note()

    @torch.no_grad()
    def pull_changed_params(self) -> set[str]:
        """Take over weights that the user changed in place (`load_state_dict`, `param.copy_()`): the change counts, as
        it would with any torch optimizer. We write through the replica and never through the param, so its version
        moves only for others. Returns which ones."""
        changed = {self._fqns[number] for number in self._places.written()}
        for bucket in self.buckets if changed else ():
            for span in bucket.spans:
                if span.fqn in changed:
                    bucket.pull(span.part)
        return changed

    def nbytes(self) -> int:
        """Bytes this rank holds, aliases counted once."""
        seen: dict[int, int] = {}
        for bucket in self.buckets:
            held = [bucket.replica, bucket.grad_shard, bucket.work, bucket.master, *bucket.state.values()]
            held.extend(() if bucket.grad is None else (bucket.grad,))
            held.extend(() if bucket.ring is None else bucket.ring.tensors)
            for tensor in held:
                storage = tensor.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

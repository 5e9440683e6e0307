"""All memory of a model on one rank: the shards and replicas that its plan asks for, in buffers of ours or in the params'
own memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from layerwise.errors import StateError, listed
from layerwise.kernels.stored import stored_of
from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.plan import Plan
from layerwise.layout.shards import ShardPlan
from layerwise.layout.slots import place_slots
from layerwise.layout.spans import Span
from layerwise.memory.places import Places, extent_of
from layerwise.memory.replicas import GradRing, Replica
from layerwise.memory.shards import Shard
from layerwise.memory.slots import Slots
from layerwise.memory.staged import KeptCodes, KeptPlain, StagedReplica, StagingRing
from layerwise.models.table import advice_apart, torch_dtype

_CPU = torch.device("cpu")


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


def check_held(held: Mapping[str, Tensor]) -> None:
    """Raise for what cannot be trained where it is: values of inference mode, and memory that several params share without being
    one. Each of those would be updated by itself, and have memory of its own once weights lie in buffers."""
    unfit = next((fqn for fqn, tensor in held.items() if tensor.is_inference()), None)
    if unfit is not None or torch.is_inference_mode_enabled():
        what = "the Optimizer or its model is being built" if unfit is None else f"param {unfit!r} was made"
        raise ValueError(
            f"{what} within torch.inference_mode(): nothing from there can be trained. Build it outside, or under torch.no_grad()."
        )
    plain = ((fqn, tensor) for fqn, tensor in held.items() if type(tensor) in (Tensor, nn.Parameter))
    places = sorted(
        (tensor.data_ptr(), tensor.nbytes, fqn) for fqn, tensor in plain if tensor.numel() and _is_dense(tensor)
    )
    for (start, nbytes, one), (next_start, _, other) in pairwise(places):
        if next_start < start + nbytes:
            raise ValueError(
                f"params {one!r} and {other!r} lie in the same memory and are two params: each would be updated by itself. To tie "
                "weights, have both modules hold one Parameter (a.weight = b.weight, not a.weight.data = b.weight.data)."
            )


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has every element from its first to its last, in whatever order."""
    return extent_of(tensor) == tensor.nbytes


def refuse_sparse(fqn: str, grad: Tensor) -> None:
    """Raise for a sparse gradient, by name."""
    if grad.is_sparse:
        raise TypeError(
            f"param {fqn!r} has a sparse gradient: buckets are dense. Use sparse=False on its module. {advice_apart(fqn)}"
        )


def _of_its_own(part: Tensor) -> Tensor:
    """The same memory as a tensor whose storage is no larger. What saves a param writes its storage, and what looks for
    shared weights compares storages: a param must not seem to be a part of its whole buffer."""
    start = part.storage_offset() * part.element_size()
    storage = part.untyped_storage()[start : start + part.nbytes]
    return torch.empty(0, dtype=part.dtype, device=part.device).set_(storage, 0, part.shape)  # type: ignore[call-overload, no-any-return]


def _move_to(param: nn.Parameter, place: Tensor) -> None:
    """Have a param lie in its place of a buffer, with the values that it has."""
    view = _of_its_own(place).view(param.shape)
    stored = stored_of(param)
    if stored is not None:
        stored.keep_in(view)
        return
    view.copy_(param.data)
    param.data = view


def _master_of(weight: Tensor) -> Tensor:
    """fp32 memory for what the model reads in this dtype."""
    return weight if weight.dtype == torch.float32 else torch.zeros_like(weight, dtype=torch.float32)


class Storage:
    """All shards and replicas of a model on this rank. Where the plan has buffers, params are re-pointed at views of the
    replicas; where it has none, params stay where they are, and shards are their memory."""

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, nn.Parameter],
        ranks: Mapping[str, int],
        other: torch.device = _CPU,
        held_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`other` is the device of what is not trained: that of a model that trains nothing. `held_of` is what this rank has
        of a param, where that may not be all of it."""
        self.plan = plan
        self.ranks = dict(ranks)
        """This rank's number in every domain."""
        self.params = dict(params)
        self.held: dict[str, Tensor] = {
            fqn: param if held_of is None else held_of(param) for fqn, param in params.items()
        }
        """What this rank has of each param: itself, or its part."""
        planned = {fqn for shard in plan.shards for fqn in shard.fqns}
        if planned != self.params.keys():
            missing = sorted(planned ^ self.params.keys())
            raise ValueError(f"params and plan do not match: {listed(missing)} is only in one of them.")
        self._grad_parts: dict[str, tuple[Replica, slice, torch.Size]] = {}
        self._grad_views: dict[str, Tensor] = {}  # ND, alias the replicas' grads, where those stay
        self.device = one_device(self.params) if self.params else other
        check_held(self.held)
        self.replicas = self._replicas()
        self.shards: tuple[Shard, ...] = tuple(replica.shard for replica in self.replicas) or tuple(
            self._own_shard(shard) for shard in plan.shards
        )
        self.changes = 0
        """How often weights have changed, by a step, by loading, or by who writes into them, as far as that was noticed."""
        self._fqns = tuple(self.params)
        self._stored = [stored for param in self.params.values() if (stored := stored_of(param)) is not None]
        self._places = Places(tuple(self.params.values()), held_of)

    @property
    def keeps_updates(self) -> bool:
        """Whether updates are memory of ours, the same in every step, and not gradients that come and go."""
        return bool(self.replicas)

    def _replicas(self) -> tuple[Replica, ...]:
        found: dict[int, Replica] = {}
        longest = max((bucket.numel for bucket in self.plan.buckets if bucket.is_staged), default=0)
        slots = StagingRing(longest, self.device)
        for buffer in self.plan.buffers:
            dtype = torch_dtype(buffer.key.dtype)
            kept = sum(bucket.numel for bucket in buffer.buckets if not bucket.is_staged)
            rest = torch.zeros(kept, dtype=dtype, device=self.device)
            grad, ring = self._gradients(buffer)
            for bucket in buffer.buckets:
                full = None if grad is None else grad[bucket.offset : bucket.offset + bucket.numel]
                if bucket.is_staged:
                    found[bucket.index] = self._staged_replica(bucket, dtype, full, ring, slots)
                else:
                    weights, rest = rest[: bucket.numel], rest[bucket.numel :]
                    found[bucket.index] = self._replica(bucket, weights, full, ring)
        return tuple(found[index] for index in sorted(found))

    def _gradients(self, buffer: BufferPlan) -> tuple[Tensor | None, GradRing | None]:
        dtype = torch_dtype(self.plan.grad_dtype)
        if not buffer.has_grads:
            return None, None
        if self.plan.leases_grads(buffer):
            return None, GradRing(max(bucket.numel for bucket in buffer.buckets), dtype, self.device)
        return torch.zeros(buffer.numel, dtype=dtype, device=self.device), None

    def _reduced(self, plan: BucketPlan, grad: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where this rank's shard of a bucket's reduced gradient lies, and where it is worked on."""
        rank = self.ranks[plan.domain]
        numel = plan.shard_numel(rank)
        # An ordered sum is taken in fp32 and stays that.
        dtype = torch.float32 if plan.reducer == "ordered" else torch_dtype(self.plan.grad_dtype)
        if grad is not None and grad.dtype == dtype:
            grad_shard = grad[plan.shard_part(rank)]
        else:
            grad_shard = torch.zeros(numel, dtype=dtype, device=self.device)
        update = grad_shard if dtype == torch.float32 else torch.zeros(numel, dtype=torch.float32, device=self.device)
        return grad_shard, update

    @torch.no_grad()
    def _replica(self, plan: BucketPlan, weights: Tensor, grad: Tensor | None, ring: GradRing | None) -> Replica:
        rank = self.ranks[plan.domain]
        grad_shard, update = self._reduced(plan, grad)
        weight = weights[plan.shard_part(rank)]
        shard = Shard(plan, plan.spans(rank), weight, _master_of(weight), update, weight.dtype)
        replica = Replica(plan, shard, weights, grad, grad_shard, ring)
        self._place_grads(replica)
        for placement in plan.placements:
            _move_to(self.params[placement.fqn], weights[placement.part])
        shard.begin_from(weight)
        return replica

    @torch.no_grad()
    def _staged_replica(
        self, plan: BucketPlan, dtype: torch.dtype, grad: Tensor | None, ring: GradRing | None, slots: StagingRing
    ) -> StagedReplica:
        rank = self.ranks[plan.domain]
        grad_shard, update = self._reduced(plan, grad)
        staged = torch.zeros(plan.numel, dtype=dtype, device=self.device)
        master = torch.zeros(plan.shard_numel(rank), dtype=torch.float32, device=self.device)
        shard = Shard(plan, plan.spans(rank), None, master, update, dtype)
        kept: list[KeptPlain | KeptCodes] = []
        for placement in plan.placements:
            param, place = self.params[placement.fqn], staged[placement.part]
            stored = stored_of(param)
            if placement.recipe and stored is not None:
                place.copy_(stored.take_given(placement.fqn).view(-1))
                kept.append(KeptCodes(placement.part, stored))
            else:
                place.copy_(param.detach().reshape(-1))
                param.data = param.data.clone(memory_format=torch.contiguous_format)
                kept.append(KeptPlain(placement.part, param.data))
        nothing = torch.empty(0, dtype=dtype, device=self.device)
        replica = StagedReplica(plan, shard, nothing, grad, grad_shard, ring, rank=rank, kept=tuple(kept), slots=slots)
        self._place_grads(replica)
        replica.begin_with(staged)
        shard.begin_from(staged[plan.shard_part(rank)])
        return replica

    def _place_grads(self, replica: Replica) -> None:
        for placement in replica.plan.placements:
            shape = self.params[placement.fqn].shape
            self._grad_parts[placement.fqn] = replica, placement.part, shape
            if replica.grad is not None:
                self._grad_views[placement.fqn] = replica.grad[placement.part].view(shape)

    @torch.no_grad()
    def _own_shard(self, plan: ShardPlan) -> Shard:
        """A shard that is a param's own memory. Its update comes with the gradient."""
        (fqn,) = plan.fqns
        held = self.held[fqn]
        if not held.is_contiguous():
            held.data = held.data.contiguous()
        weight = held.data.view(-1)
        nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        shard = Shard(plan, plan.spans(self.ranks[plan.domain]), weight, _master_of(weight), nothing, weight.dtype)
        shard.begin_from(weight)
        return shard

    def grad_view(self, fqn: str) -> Tensor:
        """Where a param's gradient accumulates, in the param's shape."""
        view = self._grad_views.get(fqn)
        return view if view is not None else self.view_in(self._leased_grad(fqn), fqn)

    def view_in(self, full: Tensor, fqn: str) -> Tensor:
        """A param's place in a tensor of its bucket's length."""
        _, part, shape = self._grad_parts[fqn]
        return full[part].view(shape)

    def _leased_grad(self, fqn: str) -> Tensor:
        replica = self._grad_parts[fqn][0]
        if replica.grad is None:
            raise StateError(f"{replica.plan.label} has no gradient memory: it was released when it was reduced.")
        return replica.grad

    def slots(self, passages: Sequence[Sequence[int]]) -> Slots:
        """Staging memory for passages of so many bytes, domain by domain."""
        return Slots(place_slots(passages), self.device)

    def check_aliases(self) -> None:
        """Raise if a param is no longer where it was, as after `module.to()`, `param.data = ...`, or once it was shared with
        another process, which gives its storage other memory: updates would not reach it."""
        if moved := self._places.moved():
            raise StateError(
                f"param {self._fqns[moved[0]]!r} was moved {'out of its buffer ' if self.replicas else ''}(by module.to(), param.data = "
                "..., share_memory(), a queue of torch.multiprocessing or similar): expected it where it was, since updates go there. "
                "Move or convert the module before it is wrapped; to change values use param.copy_() under torch.no_grad(); send clones "
                "to other processes."
            )

    def check_no_grads(self) -> None:
        """Raise if a param has a `.grad` of its own: hooks take what backward brings, so somebody set it by hand."""
        if found := self._places.with_grads():
            raise StateError(
                f"param {self._fqns[found[0]]!r} has a .grad that backward did not bring: a DataParallel keeps gradients in buckets "
                "and would not see it. Add a term to the loss instead; if another wrapper such as DistributedDataParallel put it "
                "there, train without that one. Zero-bubble and DualPipe schedules of a pipeline put it there themselves: use GPipe, "
                "1F1B or interleaved 1F1B."
            )

    def keep_values(self) -> bool:
        """Have params that are kept as codes keep what the next gathers bring; returns whether there are any."""
        staged = [replica for replica in self.replicas if isinstance(replica, StagedReplica)]
        for replica in staged:
            replica.keep_values = True
        return bool(staged)

    @torch.no_grad()
    def release(self) -> None:
        """Give params memory of their own, with the values that they have."""
        for param in self.params.values() if self.replicas else ():
            stored = stored_of(param)
            if stored is not None:
                stored.release()
            else:
                param.data = param.data.clone()

    def note_update(self) -> None:
        """Weights have moved: autograd must not use them for a graph of before, as if nothing had happened."""
        self.changes += 1
        for stored in self._stored:
            if not stored.is_by_codes:  # codes say so when they are made
                stored.taken()
        apart = (held for fqn, held in self.held.items() if held is not self.params[fqn])
        increment_version([*self.params.values(), *apart])
        self._places.note()

    @torch.no_grad()
    def take_back(self) -> set[str]:
        """Move params that were given other memory into their buffers again, with the values that they have. Trainers of others
        have a module for their own, and move it to where it is once more. Who wraps a module keeps it: there it is refused,
        as are other shapes, dtypes and devices. Returns which ones."""
        if not self.replicas or self.plan.options.reduces:
            return set()
        found = set()
        for number in self._places.moved():
            fqn = self._fqns[number]
            param = self.params[fqn]
            replica, part, shape = self._grad_parts[fqn]
            place = replica.weights[part]
            if (param.shape, param.dtype, param.device) == (shape, place.dtype, place.device):
                _move_to(param, place)
                found.add(fqn)
        return found

    @torch.no_grad()
    def pull_changed_params(self) -> set[str]:
        """Take over weights that the user changed in place (`load_state_dict`, `param.copy_()`): the change counts, as
        it would with any torch optimizer. We write through the replica and never through the param, so its version
        moves only for others. Returns which ones."""
        changed = self.take_back() | {self._fqns[number] for number in self._places.written()}
        if changed:
            self._pull(changed)
        return changed

    @torch.no_grad()
    def pull_all(self) -> None:
        """Take what forward reads as the truth, as far as somebody wrote it."""
        self._pull(self.params.keys())

    def _pull(self, fqns: Collection[str]) -> None:
        self.changes += 1
        for shard in self.shards:
            for span in shard.spans:
                if span.fqn in fqns:
                    self._pull_span(shard, span)
        for fqn in fqns:
            if (stored := stored_of(self.params[fqn])) is not None:
                stored.taken()

    def _pull_span(self, shard: Shard, span: Span) -> None:
        if shard.weight is not None:
            shard.pull(span.part, shard.weight[span.part])
            return
        # What codes stand for is no truth; what they were made of is.
        param = self.params[span.fqn]
        stored = stored_of(param)
        seen = param.detach() if stored is None else stored.given
        if seen is not None:
            shard.pull(span.part, seen.reshape(-1)[span.start : span.stop])

    def nbytes(self) -> int:
        """Bytes this rank holds, aliases counted once."""
        seen: dict[int, int] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

    def _tensors(self) -> Iterator[Tensor]:
        for shard in self.shards:
            yield from (shard.update, shard.master, *shard.state.values())
            yield from () if shard.weight is None else (shard.weight,)
        for replica in self.replicas:
            yield from (*replica.held, *replica.staging, replica.grad_shard)
            yield from () if replica.grad is None else (replica.grad,)
            yield from () if replica.ring is None else replica.ring.tensors

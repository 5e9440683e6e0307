"""The tensors that a plan asks for: replicas, gradients, masters and optimizer state, each flat and cut by bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from layerwise.buffers.bind import torch_dtype
from layerwise.errors import StateError
from layerwise.layout.plan import Plan
from layerwise.layout.storage import BucketPlan, Span


@dataclass
class Bucket:
    """One bucket's memory on this rank."""

    plan: BucketPlan
    shard: int
    replica: Tensor  # 1D, param dtype: what forward reads; every rank has all of it
    grad: Tensor  # 1D, grad dtype: what backward accumulates into; every rank has all of it
    grad_shard: (
        Tensor  # 1D, grad dtype: the reduced gradient of this rank's shard; aliases `grad` where this rank is alone
    )
    work: Tensor  # 1D, fp32: averaged gradient, then update; aliases `grad_shard` where that is fp32 already
    master: Tensor  # 1D, fp32: the truth of this rank's shard; aliases `replica` for fp32 params
    spans: tuple[Span, ...]
    state: dict[str, Tensor] = field(default_factory=dict)  # 1D, fp32 each: momentum, exp_avg ...
    master_version: int = 0
    replica_version: int = 0

    @cached_property
    def span_by_fqn(self) -> dict[str, Span]:
        """This rank's span of each param that it holds some of."""
        return {span.fqn: span for span in self.spans}

    @property
    def replica_shard(self) -> Tensor:
        """The part of the replica that this rank publishes."""
        start = self.shard * self.plan.shard_numel
        return self.replica[start : start + self.plan.shard_numel]

    def refresh_replica_shard(self) -> None:
        """Write the params' own dtype of the master into this rank's part of the replica."""
        if self.master.data_ptr() != self.replica_shard.data_ptr():
            self.replica_shard.copy_(self.master)

    def refresh_master(self) -> None:
        """Take the replica as the truth, for params that were changed from outside."""
        if self.master.data_ptr() != self.replica_shard.data_ptr():
            self.master.copy_(self.replica_shard)


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


class Storage:
    """All buckets of a model on this rank. Params are re-pointed at views of the replicas."""

    def __init__(self, plan: Plan, params: Mapping[str, nn.Parameter], rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.params = dict(params)
        self.buckets: tuple[Bucket, ...] = ()
        self.grad_views: dict[str, Tensor] = {}  # ND, alias the buckets' grads
        self._replica_views: dict[str, Tensor] = {}  # ND, alias the buckets' replicas
        self._versions: dict[str, int] = {}
        found: dict[int, Bucket] = {}
        device = one_device(self.params)
        for buffer in plan.buffers:
            replica = torch.zeros(buffer.numel, dtype=torch_dtype(buffer.key.dtype), device=device)
            grad = torch.zeros(buffer.numel, dtype=torch_dtype(plan.grad_dtype), device=device)
            for bucket in buffer.buckets:
                part = slice(bucket.offset, bucket.offset + bucket.numel)
                found[bucket.index] = self._bucket(bucket, replica[part], grad[part])
        self.buckets = tuple(found[index] for index in sorted(found))
        self._adopt_params()

    def _bucket(self, plan: BucketPlan, replica: Tensor, grad: Tensor) -> Bucket:
        shard = plan.shard_of(self.rank)
        numel = plan.shard_numel
        alone = self.plan.world == 1
        grad_shard = grad if alone else torch.zeros(numel, dtype=grad.dtype, device=grad.device)
        work = (
            grad_shard
            if grad_shard.dtype == torch.float32
            else torch.zeros(numel, dtype=torch.float32, device=grad.device)
        )
        if replica.dtype == torch.float32:
            master = replica[shard * numel : (shard + 1) * numel]
        else:
            master = torch.zeros(numel, dtype=torch.float32, device=grad.device)
        return Bucket(
            plan=plan,
            shard=shard,
            replica=replica,
            grad=grad,
            grad_shard=grad_shard,
            work=work,
            master=master,
            spans=plan.spans(shard),
        )

    @torch.no_grad()
    def _adopt_params(self) -> None:
        for bucket in self.buckets:
            for placement in bucket.plan.placements:
                param = self.params[placement.fqn]
                part = slice(placement.offset, placement.offset + placement.numel)
                view = bucket.replica[part].view(param.shape)
                view.copy_(param.data)
                param.data = view
                self._replica_views[placement.fqn] = view
                self._versions[placement.fqn] = param._version
                self.grad_views[placement.fqn] = bucket.grad[part].view(param.shape)
            bucket.refresh_master()

    def check_aliases(self) -> None:
        """Raise if a param no longer reads the replica, as after `module.to()` or `param.data = ...`: updates would not
        reach it."""
        for fqn, param in self.params.items():
            view = self._replica_views[fqn]
            if param.data_ptr() != view.data_ptr() or param.shape != view.shape or param.dtype != view.dtype:
                raise StateError(
                    f"param {fqn!r} was moved out of its buffer (by module.to(), param.data = ... or similar): expected it at its place in the "
                    "replica. Move or convert the module before it is wrapped; to change values use param.copy_() under torch.no_grad()."
                )

    def check_no_grads(self) -> None:
        """Raise if a param has a `.grad` of its own: hooks take what backward brings, so somebody set it by hand."""
        for fqn, param in self.params.items():
            if param.grad is not None:
                raise StateError(
                    f"param {fqn!r} has a .grad that backward did not bring: a DataParallel keeps gradients in buckets and "
                    "would not see it. Add a term to the loss instead."
                )

    @torch.no_grad()
    def pull_changed_params(self) -> None:
        """Take over weights that the user changed in place (`load_state_dict`, `param.copy_()`): the change counts, as
        it would with any torch optimizer. We write through the replica and never through the param, so its version
        moves only for others."""
        for bucket in self.buckets:
            changed = {
                placement.fqn
                for placement in bucket.plan.placements
                if self.params[placement.fqn]._version != self._versions[placement.fqn]
            }
            for span in bucket.spans:
                if span.fqn in changed:
                    master, seen = bucket.master[span.part], bucket.replica_shard[span.part]
                    # Where the replica is what the master rounds to, the master knows better: weights and masters may
                    # both have been loaded, in either order.
                    master.copy_(torch.where(master.to(seen.dtype) == seen, master, seen.to(master.dtype)))
            self._versions.update({fqn: self.params[fqn]._version for fqn in changed})

    def nbytes(self) -> int:
        """Bytes this rank holds, aliases counted once."""
        seen: dict[int, int] = {}
        for bucket in self.buckets:
            for tensor in (
                bucket.replica,
                bucket.grad,
                bucket.grad_shard,
                bucket.work,
                bucket.master,
                *bucket.state.values(),
            ):
                storage = tensor.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        return sum(seen.values())

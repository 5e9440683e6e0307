"""The engine: one plan, its memory and its communication, shared by the module wrapper that feeds it gradients and the
optimizer that steps it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from layerwise.buffers.bind import named_trainables, param_table, plain_dtype
from layerwise.buffers.storage import Storage, one_device
from layerwise.comm.collectives import Communicator
from layerwise.comm.contract import Contract
from layerwise.comm.groups import Groups, derive_together
from layerwise.comm.publisher import Publisher
from layerwise.comm.reducer import GradReducer
from layerwise.errors import StateError
from layerwise.layout.plan import Plan, make_plan
from layerwise.routing.rules import RouteRule, suspicion
from layerwise.units import MIB

_HOOKED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Params whose gradients the hooks of a DataParallel take away; nobody else would ever see one."""


def plan_for(
    module: nn.Module,
    *,
    world: int,
    layout: str,
    rules: Sequence[RouteRule] | None,
    strict: bool,
    bucket_mib: float | None,
    grad_dtype: torch.dtype,
) -> Plan:
    """The plan of a live module (also one on the meta device)."""
    dtype = plain_dtype(grad_dtype, "grad_dtype")
    if bucket_mib is not None and not (isinstance(bucket_mib, int | float) and bucket_mib > 0):
        raise ValueError(f"bucket_mib must be a positive number, got {bucket_mib!r}. Leave it out for the default.")
    table = param_table(module)
    if not any(param.trainable for param in table):
        raise ValueError(
            f"{type(module).__name__} has no trainable param: there is nothing to optimise. Unfreeze some of it first."
        )
    return make_plan(
        table,
        world=world,
        layout=layout,
        rules=rules,
        strict=strict,
        grad_dtype=dtype,
        bucket_numel=None if bucket_mib is None else max(1, int(bucket_mib * MIB) // dtype.itemsize),
    )


def _plan_unclaimed(module: nn.Module, **settings: Any) -> Plan:
    """The plan of a module whose params are on one device and in nobody else's buffers."""
    for fqn, param in module.named_parameters():
        if param in _HOOKED:
            raise StateError(
                f"param {fqn!r} of {type(module).__name__} lies in the buffers of a DataParallel already: its gradients go "
                "there. Wrap a model once, and pass the wrapped model on."
            )
    plan = plan_for(module, **settings)
    one_device(named_trainables(module))
    return plan


class Engine:
    """Plan, storage, reducer and publisher of one model on one rank."""

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        *,
        layout: str,
        rules: Sequence[RouteRule] | None,
        strict: bool,
        bucket_mib: float | None,
        grad_dtype: torch.dtype,
        overlap_grad_reduce: bool,
        check_collectives: bool,
        hooked: bool,
    ) -> None:
        self.module = module
        self.groups = groups
        self._frozen = {fqn: param for fqn, param in module.named_parameters() if not param.requires_grad}
        self.plan = derive_together(
            groups,
            "plans",
            lambda: _plan_unclaimed(
                module,
                world=groups.world,
                layout=layout,
                rules=rules,
                strict=strict,
                bucket_mib=bucket_mib,
                grad_dtype=grad_dtype,
            ),
            lambda plan: {**plan.to_json(), "constants": self._describe_constants()},
        )
        doubt = suspicion(self.plan.routes, self.plan.table)
        if doubt is not None and groups.rank == 0:
            warnings.warn(doubt, stacklevel=3)
        contract = Contract(groups.control) if check_collectives and groups.control is not None else None
        self.communicator = Communicator(groups.training, contract)
        self.storage = Storage(self.plan, named_trainables(module), groups.rank)
        self.reducer = GradReducer(self.storage, self.communicator, overlap=overlap_grad_reduce)
        self.publisher = Publisher(self.storage, self.communicator)
        self.has_optimizer = False
        if hooked:
            _HOOKED.update(dict.fromkeys(self.storage.params.values(), True))

    def _constants(self) -> dict[str, Tensor]:
        """What the model reads beside its trainable params: frozen ones and buffers."""
        return {**self._frozen, **dict(self.module.named_buffers())}

    def _describe_constants(self) -> dict[str, list[object]]:
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in self._constants().items()}

    @torch.no_grad()
    def spread_from_first(self) -> None:
        """Make every rank start from rank 0's weights and buffers, as DistributedDataParallel does."""
        for bucket in self.storage.buckets:
            self.communicator.broadcast(bucket.replica, label=bucket.plan.label)
            bucket.refresh_master()
        for name, tensor in self._constants().items():
            if tensor.numel():
                whole = tensor.detach().contiguous()
                # As bytes: buffers may have dtypes that a backend cannot send.
                self.communicator.broadcast(whole.view(-1).view(torch.uint8), label=f"{name!r}")
                tensor.detach().copy_(whole)

    def check_trainables(self) -> None:
        """Raise if the model's trainable params are not those its buffers were laid out for."""
        for fqn, param in self.module.named_parameters():
            mine = self.storage.params.get(fqn)
            if mine is param and not param.requires_grad:
                raise StateError(
                    f"param {fqn!r} was frozen after construction: expected requires_grad=True, as it was when its buffers "
                    "were laid out. Freeze params before wrapping the model, or give the param lr 0 with a route rule."
                )
            if mine is not param and param.requires_grad:
                was = "unfrozen" if fqn in self._frozen else "replaced" if mine is not None else "added"
                raise StateError(
                    f"param {fqn!r} was {was} after construction: it has no place in the buffers and would never be updated. "
                    "Build the model whole and set requires_grad before wrapping it."
                )

    @torch.no_grad()
    def pull_from_replicas(self) -> None:
        """Take the weights that forward reads as the truth, after the user changed them."""
        for bucket in self.storage.buckets:
            bucket.refresh_master()
            bucket.replica_version = bucket.master_version

"""accelerate: `prepare()` in the order that works, and checkpoints that hold the state of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from layerwise.errors import StateError
from layerwise.optim.optimizer import Optimizer

_OTHERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""What accelerate calls frameworks that shard a model in their own way."""


def prepare(accelerator: Any, module: nn.Module, *others: Any, **options: Any) -> tuple[Any, ...]:
    """The prepared model, a prepared `layerwise.Optimizer` for it, and whatever else is to be prepared.

    The model comes first: accelerate moves and wraps it (in DistributedDataParallel, on several ranks), or cuts it (FSDP2), and
    the optimizer is made for what it is then. `save_state()` puts the state of all ranks together before one of them writes it,
    or has torch's distributed checkpoints write the shards.

    Args:
        accelerator: an `accelerate.Accelerator`.
        module: the model as it is.
        others: loaders and the like, for `accelerator.prepare()`. A scheduler needs the optimizer: prepare it afterwards.
        options: arguments of `layerwise.Optimizer`, its rules at least.
    """
    if cuts(accelerator):
        model, optimizer = accelerator.prepare(module, stand_in(module))
        take_over(accelerator, optimizer, Optimizer(model, **options))
    else:
        refuse_others(accelerator)
        model = accelerator.prepare_model(module)
        own = Optimizer(model, **options)
        # Its state is where it has to be: it need not be taken out and loaded again.
        optimizer = accelerator.prepare_optimizer(own, device_placement=False)
        accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: own.consolidate_state_dict())
    prepared = accelerator.prepare(*others) if others else ()
    rest = prepared if isinstance(prepared, tuple) else (prepared,)
    return (model, optimizer, *rest)


def refuse_others(accelerator: Any) -> None:
    """Raise for what shards a model in a way that no optimizer of ours can follow."""
    kind = accelerator.distributed_type.value
    if kind in _OTHERS:
        which = "FSDP in its first version" if kind == "FSDP" else kind
        raise StateError(
            f"accelerate was asked for {which}, which gives params other memory after the optimizer was made: expected plain data "
            "parallelism, or FSDP2 (FullyShardedDataParallelPlugin(fsdp_version=2))."
        )


def cuts(accelerator: Any) -> bool:
    """Whether accelerate cuts the model with `fully_shard()`."""
    return bool(accelerator.is_fsdp2)


def stand_in(module: nn.Module) -> torch.optim.Optimizer:
    """An optimizer for accelerate to prepare together with a model that it cuts: it does not do one without the other. Ours is made
    for params that are cut, and takes its place then."""
    return torch.optim.SGD([param for param in module.parameters() if param.requires_grad], lr=0.0)


def take_over(accelerator: Any, prepared: Any, own: Optimizer) -> None:
    """Put our optimizer into what accelerate has made around the one that stood in, and knows. It is made anew, because one that
    scales losses keeps the `step()` of the optimizer that it was made with."""
    prepared.__init__(own, device_placement=False, scaler=accelerator.scaler)

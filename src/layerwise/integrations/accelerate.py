"""accelerate: `prepare()` in the order that works, and checkpoints that hold the state of all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from layerwise.errors import StateError
from layerwise.optim.optimizer import Optimizer

_OTHERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
"""What accelerate calls frameworks that shard a model in their own way."""


def prepare(accelerator: Any, module: nn.Module, *others: Any, **options: Any) -> tuple[Any, ...]:
    """The prepared model, a prepared `layerwise.Optimizer` for it, and whatever else is to be prepared.

    The model comes first: accelerate moves and wraps it (in DistributedDataParallel, on several ranks), and the optimizer is
    made for what it is then. `save_state()` puts the state of all ranks together before one of them writes it.

    Args:
        accelerator: an `accelerate.Accelerator`.
        module: the model as it is.
        others: loaders and the like, for `accelerator.prepare()`. A scheduler needs the optimizer: prepare it afterwards.
        options: arguments of `layerwise.Optimizer`, its rules at least.
    """
    kind = accelerator.distributed_type.value
    if kind in _OTHERS:
        raise StateError(
            f"the Accelerator was asked for {kind}, which gives params other memory after the optimizer was made: expected plain data "
            "parallelism. For FSDP2 call fully_shard() yourself and then layerwise.Optimizer(model)."
        )
    model = accelerator.prepare_model(module)
    own = Optimizer(model, **options)
    # Its state is where it has to be: it need not be taken out and loaded again.
    optimizer = accelerator.prepare_optimizer(own, device_placement=False)
    prepared = accelerator.prepare(*others) if others else ()
    rest = prepared if isinstance(prepared, tuple) else (prepared,)

    def put_together(models: object, weights: object, output_dir: object) -> None:
        own.consolidate_state_dict()

    accelerator.register_save_state_pre_hook(put_together)
    return (model, optimizer, *rest)

"""accelerate: `prepare()` in the order that works, and checkpoints that hold the state of all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from layerwise.optim.optimizer import Optimizer


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
    model = accelerator.prepare_model(module)
    own = Optimizer(model, **options)
    optimizer, *rest = accelerator.prepare(own, *others) if others else [accelerator.prepare(own)]

    def put_together(models: object, weights: object, output_dir: object) -> None:
        own.consolidate_state_dict()

    accelerator.register_save_state_pre_hook(put_together)
    return (model, optimizer, *rest)

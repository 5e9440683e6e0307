"""Hugging Face `Trainer`: a mixin that makes the optimizer, and has all ranks take part when it is saved.

The trainer makes the optimizer of a plain module, wraps that in DistributedDataParallel, clips and unscales `param.grad` and
writes checkpoints on one rank. All of that stays its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from layerwise.errors import StateError
from layerwise.optim.optimizer import Optimizer


class _Factory:
    """What `Trainer` calls an optimizer factory: made without arguments, then called with the model."""

    def __call__(self, model: nn.Module, **options: Any) -> Optimizer:
        return Optimizer(model, gradients="reduced", **options)


class TrainerMixin:
    """Stands before `Trainer`, or a subclass of it, as in `class MyTrainer(TrainerMixin, Trainer)`.

    Args:
        layerwise: arguments of `layerwise.Optimizer`, its rules at least. They have the learning rates; `learning_rate`,
            `weight_decay` and `optim` of the training arguments are not read. Its scheduler and `max_grad_norm` are.
    """

    optimizer: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    def __init__(self, *args: Any, layerwise: Mapping[str, Any], **more: Any) -> None:
        super().__init__(*args, optimizer_cls_and_kwargs=(_Factory, dict(layerwise)), **more)  # type: ignore[call-arg]

    def create_optimizer(self, *args: Any, **more: Any) -> Any:
        """Refuses what changes params after the optimizer was made."""
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise StateError(
                "the Trainer was asked for FSDP or DeepSpeed, which give params other memory after the optimizer was made: expected "
                "plain data parallelism. For FSDP2 call fully_shard() yourself and pass layerwise.Optimizer(model) in optimizers=."
            )
        return super().create_optimizer(*args, **more)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """One rank writes, and has the state of all of them."""
        getattr(self.optimizer, "optimizer", self.optimizer).consolidate_state_dict()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

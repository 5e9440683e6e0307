"""Hugging Face `Trainer`: a mixin that makes the optimizer, and has all ranks take part when it is saved.

The trainer makes the optimizer of a plain module, wraps that in DistributedDataParallel, clips and unscales `param.grad` and
writes checkpoints on one rank. All of that stays its own. Where it was asked for FSDP2, it has accelerate cut the module together
with the optimizer: another one stands in until that is done, and torch's distributed checkpoints hold the shards of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from layerwise.integrations.accelerate import cuts, refuse_others, stand_in, take_over
from layerwise.optim.optimizer import Optimizer


class _Factory:
    """What `Trainer` calls an optimizer factory: made without arguments, then called with the model."""

    def __call__(self, model: nn.Module, **options: Any) -> Optimizer:
        optimizer = Optimizer(model, gradients="reduced", **options)
        # The trainer takes state out and loads it again before it trains, and when it saves it has the whole.
        optimizer.has_said_part = True
        return optimizer


class TrainerMixin:
    """Stands before `Trainer`, or a subclass of it, as in `class MyTrainer(TrainerMixin, Trainer)`.

    Args:
        layerwise: arguments of `layerwise.Optimizer`, its rules at least. They have the learning rates; `learning_rate`,
            `weight_decay` and `optim` of the training arguments are not read. Its scheduler and `max_grad_norm` are.
    """

    accelerator: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, layerwise: Mapping[str, Any], **more: Any) -> None:
        self._layerwise = dict(layerwise)
        self._own: Optimizer | None = None
        super().__init__(*args, optimizer_cls_and_kwargs=(_Factory, self._layerwise), **more)  # type: ignore[call-arg]

    def create_optimizer(self, *args: Any, **more: Any) -> Any:
        """Ours; or one that stands in where the model is still to be cut. Refuses what changes params in other ways."""
        if cuts(self.accelerator):
            self.optimizer = stand_in(self.model)
            return self.optimizer
        refuse_others(self.accelerator)
        return super().create_optimizer(*args, **more)  # type: ignore[misc]

    def create_scheduler(self, *args: Any, **more: Any) -> Any:
        """The trainer calls it once the model and the optimizer are prepared: a model that was cut gets its own now."""
        if cuts(self.accelerator):
            if self._own is None:  # a second `train()` goes on with the first one's
                self._own = Optimizer(self.model, **self._layerwise)
            take_over(self.accelerator, self.optimizer, self._own)
        return super().create_scheduler(*args, **more)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """One rank writes, and has the state of all of them; or each writes its shards."""
        if not cuts(self.accelerator):
            getattr(self.optimizer, "optimizer", self.optimizer).consolidate_state_dict()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

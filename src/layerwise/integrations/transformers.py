"""Hugging Face `Trainer`: a mixin that makes the optimizer, and has all ranks take part when it is saved.

The trainer makes the optimizer of a plain module, wraps that in DistributedDataParallel, clips and unscales `param.grad` and
writes checkpoints on one rank. All of that stays its own. Where it was asked for FSDP2, it has accelerate cut the module together
with the optimizer: another one stands in until that is done, and torch's distributed checkpoints hold the shards of ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from layerwise.errors import StateError, warn
from layerwise.integrations.accelerate import cuts, refuse_others, stand_in, take_over
from layerwise.optim.optimizer import Optimizer

_NOT_READ = ("learning_rate", "weight_decay", "optim")
"""The training arguments that the rules stand in for."""


class _Factory:
    """What `Trainer` calls an optimizer factory: made without arguments, then called with the model."""

    def __call__(self, model: nn.Module, **options: Any) -> Optimizer:
        return Optimizer(model, gradients="reduced", **options)


class TrainerMixin:
    """Stands before `Trainer`, or a subclass of it, as in `class MyTrainer(TrainerMixin, Trainer)`.

    Args:
        layerwise: arguments of `layerwise.Optimizer`, its rules at least. They have the learning rates; `learning_rate`,
            `weight_decay` and `optim` of the training arguments are not read, and a warning names those that were set. Its
            scheduler and `max_grad_norm` are read.
    """

    accelerator: Any
    args: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, layerwise: Mapping[str, Any], **more: Any) -> None:
        self._layerwise = dict(layerwise)
        self._own: Optimizer | None = None
        super().__init__(*args, **more)
        if self.optimizer is not None:
            raise StateError(
                f"layerwise= and optimizers= were both passed to {type(self).__name__}: expected one optimizer. The mixin makes it of "
                "layerwise=; leave optimizers= out, or give it a scheduler alone, as in optimizers=(None, scheduler)."
            )
        # Not an argument: subclasses have arguments of their own. `Trainer` reads it when it makes its optimizer.
        self.optimizer_cls_and_kwargs = (_Factory, self._layerwise)
        if self.args.process_index == 0:
            self._say_not_read()

    def _say_not_read(self) -> None:
        """Warn of training arguments that somebody set and nobody reads."""
        default = {field.name: field.default for field in dataclasses.fields(self.args)}
        found = {name: getattr(self.args, name) for name in _NOT_READ}
        given = [f"{name}={getattr(value, 'value', value)}" for name, value in found.items() if value != default[name]]
        if given:
            rates = ", ".join(f"{name} {rule.lr:g}" for name, rule in self._layerwise.items() if hasattr(rule, "lr"))
            warn(
                f"{', '.join(given)} of the training arguments: not read. The rules in layerwise= have learning rates ({rates}) and weight "
                "decay of their own: set them there, and leave these out."
            )

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

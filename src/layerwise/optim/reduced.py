"""Modules whose gradients somebody else reduces: a DistributedDataParallel, or whoever wraps a plain module in one later.

Weights move to our buffers, as with `layerwise.DataParallel`, so every layout is there; gradients stay the params' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerwise.comm.groups import ProcessGroup, all_ranks, derive_together
from layerwise.engine.engine import Engine, Settings
from layerwise.layout.options import Options
from layerwise.models.names import unwrapped
from layerwise.routing.rules import RouteRule

Reduced = Literal["reduced"]
"""What a user says of gradients that are the same on every rank by the time of `step()`."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an optimizer was asked for about a model that has no engine of its own; `Optimizer` documents it."""

    rules: Sequence[RouteRule] | None = None
    strict: bool = False
    process_group: ProcessGroup | None = None
    gradients: Reduced | None = None
    layout: str | None = None
    check_replicas: bool = False

    @property
    def about_reduced(self) -> list[str]:
        """Arguments that were given and are for reduced gradients only."""
        given = {"layout": self.layout is not None, "check_replicas": self.check_replicas}
        return [name for name, is_given in given.items() if is_given]


def reduced_by(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is, compiled or not."""
    inner = unwrapped(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def engine_of_ddp(ddp: DistributedDataParallel, asked: Asked) -> Engine:
    """An engine for the module inside, on the ranks that it is copied to."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "the DistributedDataParallel has mixed_precision set: it puts other tensors in the place of params while forward runs. "
            "Use torch.autocast, or params in bf16, which get fp32 masters here."
        )
    return engine_of_reduced(ddp.module, asked, ddp.process_group)


def engine_of_reduced(module: nn.Module, asked: Asked, process_group: ProcessGroup | None = None) -> Engine:
    """An engine for a plain module, on all ranks of a process group (the default one)."""
    everyone = all_ranks(process_group)

    def checked() -> Settings:
        return Settings(
            options=Options(
                layout="auto" if asked.layout is None else asked.layout,
                rules=asked.rules,
                strict=asked.strict,
                gradients="params",
            ),
            overlap_grad_reduce=False,
            check_replicas=asked.check_replicas,
        )

    settings = derive_together(everyone, "arguments", checked, lambda found: {"check_replicas": found.check_replicas})
    return Engine((module,), everyone, settings)

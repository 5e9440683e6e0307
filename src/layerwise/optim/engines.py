"""The engine of whatever an optimizer was given: a wrapped model has one, a sharded or a plain one gets one that works in the
params' own memory.

Where somebody else reduces gradients, a DistributedDataParallel or whoever wraps a plain module in one later, weights move
to our buffers, as with `layerwise.DataParallel`, so every layout is there; gradients stay the params' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerwise.comm.groups import ProcessGroup, all_ranks, alone, check_still_alone, default_world, derive_together
from layerwise.comm.sharded import groups_of, is_sharded, placements_of, reshard
from layerwise.engine.engine import Engine, Settings
from layerwise.errors import listed
from layerwise.layout.options import Options
from layerwise.models.names import unwrapped
from layerwise.models.table import domains_by_prefix, named_params
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


def _reduced_by(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is, compiled or not."""
    inner = unwrapped(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


def _engine_of_ddp(ddp: DistributedDataParallel, asked: Asked) -> Engine:
    """An engine for the module inside, on the ranks that it is copied to."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "the DistributedDataParallel has mixed_precision set: it puts other tensors in the place of params while forward runs. "
            "Use torch.autocast, or params in bf16, which get fp32 masters here."
        )
    return _engine_of_reduced(ddp.module, asked, ddp.process_group)


def _engine_of_reduced(module: nn.Module, asked: Asked, process_group: ProcessGroup | None = None) -> Engine:
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


def refuse_arguments(engine: Engine, asked: Asked) -> None:
    """Raise for what a model does not take: a wrapped one was laid out when it was wrapped."""
    is_wrapped = engine.plan.options.reduces
    if is_wrapped and (asked.rules is not None or asked.strict):
        raise ValueError(
            "rules or strict were passed to the Optimizer of a wrapped model: pass them to DataParallel, which lays it out."
        )
    if is_wrapped and asked.gradients is not None:
        raise ValueError(
            f"gradients={asked.gradients!r} was passed to the Optimizer of a layerwise.DataParallel, which reduces gradients itself: "
            "leave it out, or pass the module that it was made of."
        )
    if asked.about_reduced and not engine.gradients.are_copies:
        where = "DataParallel" if is_wrapped else "an Optimizer with gradients='reduced'"
        raise ValueError(
            f"{listed(asked.about_reduced)} was passed to the Optimizer of a model whose gradients nobody else reduces: it is "
            f"for {where}."
        )


def engine_of(model: nn.Module, asked: Asked) -> Engine:
    """The engine of a wrapped model, or a new one: for a module whose gradients somebody else reduces, or for one that stays
    as it is, sharded by others or in a single process."""
    engine = getattr(model, "engine", None)
    if isinstance(engine, Engine):
        check_still_alone(engine.groups)
        return engine
    if asked.gradients not in (None, "reduced"):
        raise ValueError(f"gradients must be 'reduced' or left out, got {asked.gradients!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a DataParallel or an nn.Module, got {type(model).__name__}. Pass the model, not its parameters()."
        )
    ddp = _reduced_by(model)
    if ddp is not None:
        return _engine_of_ddp(ddp, asked)
    settings = Settings(
        options=Options(rules=asked.rules, strict=asked.strict, memory="params"), overlap_grad_reduce=False
    )
    reshard((model,))
    params = dict(named_params(model))
    if any(map(is_sharded, params.values())):
        groups, placed = placements_of(groups_of(params, asked.process_group), params, domains_by_prefix(model))
        return Engine((model,), groups, settings, placed)
    if asked.gradients == "reduced":
        return _engine_of_reduced(model, asked, asked.process_group)
    if default_world() > 1:
        raise ValueError(
            f"model is a plain {type(model).__name__} on {default_world()} ranks: nobody would average its gradients. Pass "
            "layerwise.DataParallel(module), which does, or the torch DistributedDataParallel that the module is in; or, if it "
            "will be in one or somebody else reduces gradients before step(), Optimizer(module, gradients='reduced')."
        )
    return Engine((model,), alone(), settings)

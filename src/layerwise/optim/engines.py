"""Which engine steps the model that an Optimizer is given, and whose memory it works in.

A DataParallel has one. Gradients that somebody else reduces, a DistributedDataParallel or whoever wraps a plain module in one
later, stay the params' own: weights move to our buffers, so every layout is there. What somebody else has sharded stays where
it is altogether, and so does a module in a single process.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from layerwise.comm.device_mesh import default_world
from layerwise.comm.groups import (
    Groups,
    ProcessGroup,
    all_ranks,
    alone,
    check_process_group,
    check_still_alone,
    derive_together,
    members,
)
from layerwise.comm.sharded import gathered_params, groups_of, is_sharded, placements_of, refuse_first_fsdp, reshard
from layerwise.config.rules import tp_mode_of
from layerwise.engine.engine import Engine
from layerwise.engine.settings import Settings
from layerwise.errors import StateError, warn
from layerwise.kernels.foreign import adapter_of
from layerwise.layout.cost import cost_of
from layerwise.layout.options import Memory, Options
from layerwise.models.adopting import not_adopted
from layerwise.models.names import named_parameters, unwrapped
from layerwise.models.quantizing import first_quantized
from layerwise.models.table import domains_by_prefix, named_params
from layerwise.routing.evidence import RulesArgument, rules_and_evidence

Reduced = Literal["reduced"]
"""What a user says of gradients that are the same on every rank by the time of `step()`."""

_HELD_AS = ("_forward_module", "module")
"""The names under which wrappers of frameworks hold what they wrap."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an optimizer was asked for about a model that has no engine of its own; `Optimizer` documents it."""

    rules: RulesArgument = None
    matrix: object = None
    """The rule of matrices."""
    strict: bool = False
    gradients: Reduced | None = None
    layout: str | Mapping[str, str] | None = None
    process_group: ProcessGroup | None = None


def engine_of(model: nn.Module, asked: Asked) -> Engine:
    """The engine of a wrapped model, or a new one for a module that stays as it is: sharded or reduced by others, or in a
    single process."""
    engine = getattr(model, "engine", None)
    if isinstance(engine, Engine):
        check_still_alone(engine.groups)
        return engine
    check_process_group(asked.process_group)
    if asked.gradients not in (None, "reduced"):
        raise ValueError(f"gradients must be 'reduced' or left out, got {asked.gradients!r}.")
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a DataParallel or an nn.Module, got {type(model).__name__}. Pass the model, not its parameters()."
        )
    _refuse_codes(model)
    refuse_first_fsdp(model)
    ddp = _reduced_by(model)
    if ddp is not None:
        return _engine_of_ddp(ddp, asked)
    reshard((model,))
    params = dict(named_params(model))
    if any(map(is_sharded, params.values())):
        everyone = groups_of(params, asked.process_group)
        settings = _agreed(everyone, model, asked, memory="params")
        groups, placed = placements_of(everyone, params, domains_by_prefix(model), gathered_params(model))
        return Engine((model,), groups, settings, placed)
    if asked.gradients == "reduced":
        return _engine_of_reduced(model, asked, asked.process_group)
    if default_world() > 1:
        raise ValueError(
            f"model is a plain {type(model).__name__} on {default_world()} ranks: nobody would average its gradients. Pass "
            "layerwise.DataParallel(module), which does, or the torch DistributedDataParallel that the module is in; or, if it "
            "will be in one or somebody else reduces gradients before step(), Optimizer(module, gradients='reduced'). A model that this "
            "rank trains for itself is Optimizer(module, gradients='reduced', process_group=group) with the group of this rank alone, "
            "torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)."
        )
    groups = alone()
    return Engine((model,), groups, _agreed(groups, model, asked, memory="params"))


def _refuse_codes(model: nn.Module) -> None:
    """Raise for a param that is kept as codes, ours or those of others: here nobody would make new ones of what a step leaves."""
    for fqn, param in named_parameters(model):
        if param.requires_grad and adapter_of(param) is not None:
            raise not_adopted(fqn, param)
    found = first_quantized(model)
    if found is not None:
        fqn, recipe = found
        raise ValueError(
            f"param {fqn!r} is quantised ({recipe}), and the model is a {type(model).__name__}: only a wrapper of ours makes codes of "
            "what a step leaves. Wrap it: layerwise.DataParallel(module), in place of DistributedDataParallel or fully_shard()."
        )


def refuse_unfit(engine: Engine, asked: Asked) -> None:
    """Raise for what the engine of a model does not take: what its wrapper has been asked already, or a second optimizer."""
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
    if asked.layout is not None and not engine.gradients.are_copies:
        where = "DataParallel" if is_wrapped else "an Optimizer with gradients='reduced'"
        raise ValueError(
            f"layout was passed to the Optimizer of a model whose gradients nobody else reduces: it is for {where}."
        )
    engine.check_bound()
    if engine.optimizer is not None:
        gc.collect()  # one that nobody has any more may be waiting for that, in a cycle with a scheduler
    if engine.optimizer is not None:
        raise StateError(
            "the model has an optimizer already: its state lives in the model's buffers, so there can be one. Reuse it, or "
            "drop it (and schedulers that hold it) first."
        )


def _reduced_by(model: nn.Module) -> DistributedDataParallel | None:
    """The DistributedDataParallel that a model is, compiled or not, or that the wrapper of a framework (Lightning Fabric) holds. One
    that holds other trainable params as well is a model that has a DistributedDataParallel for a part of itself."""
    inner: nn.Module | None = unwrapped(model)
    while inner is not None and not isinstance(inner, DistributedDataParallel):
        held = next((child for name in _HELD_AS if (child := inner._modules.get(name)) is not None), None)
        inner = None if held is None else unwrapped(held)
    if inner is None:
        return None
    reduced = set(inner.parameters())
    return inner if all(param in reduced for param in model.parameters() if param.requires_grad) else None


def _engine_of_ddp(ddp: DistributedDataParallel, asked: Asked) -> Engine:
    """An engine for the module inside, on the ranks that it is copied to."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "the DistributedDataParallel has mixed_precision set: it puts other tensors in the place of params while forward runs. "
            "Use torch.autocast, or params in bf16, which get fp32 masters here."
        )
    if asked.process_group is not None:
        asked_ranks, its = map(members, (asked.process_group, ddp.process_group))
        if asked_ranks != its:
            raise ValueError(
                f"process_group has the ranks {asked_ranks}, and the DistributedDataParallel {its}, over which it reduces gradients: "
                "expected the same. Pass its own process_group, or leave it out."
            )
    return _engine_of_reduced(ddp.module, asked, ddp.process_group)


def _engine_of_reduced(module: nn.Module, asked: Asked, process_group: ProcessGroup | None) -> Engine:
    """An engine for a plain module, on all ranks of a process group (the default one)."""
    everyone = all_ranks(process_group)
    return Engine((module,), everyone, _agreed(everyone, module, asked, memory="buffers"))


def _agreed(groups: Groups, module: nn.Module, asked: Asked, memory: Memory) -> Settings:
    """The settings that were asked for, once all ranks have found them right."""

    def checked() -> Settings:
        if groups.world < default_world() and asked.process_group is None:
            warn(
                f"the model is on {groups.world} of {default_world()} ranks: gradients are clipped by the norm, and steps skipped by "
                "the inf and NaN, of these ranks alone. If it is a pipeline stage, shard it with fully_shard() over a part of one mesh "
                "of all ranks that has a dim 'pp', or wrap it in layerwise.DataParallel with such a mesh. If it is a model of its own, "
                "say so: Optimizer(..., process_group=), with the ranks that it is on.",
                aloud=groups.rank == 0,
            )
        rules, evidence = rules_and_evidence(asked.rules)
        return Settings(
            options=Options(
                layout="flat" if asked.layout is None else asked.layout,
                rules=rules,
                tp_mode=tp_mode_of(asked.matrix),
                cost=cost_of(asked.matrix),
                strict=asked.strict,
                evidence=evidence,
                memory=memory,
                gradients="params",
            ),
            overlap_grad_reduce=False,
        )

    return derive_together(groups, "arguments", checked, lambda found: {})

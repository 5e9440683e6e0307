"""Follow a model's forward on example inputs and say what each of its params is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.models import names
from layerwise.models.forward.answers import KnownIndices
from layerwise.models.forward.blocks import Blocks
from layerwise.models.forward.follow import Follower
from layerwise.models.forward.keeping import keeping
from layerwise.models.forward.reading import read_params
from layerwise.models.names import joined, unwrapped
from layerwise.routing.readings import Reading, Readings, Role


@dataclass(frozen=True, slots=True)
class Trace:
    """What was seen of a model."""

    readings: Readings
    problem: str = ""
    """Why the forward could not be followed to its end; what came before is seen all the same."""


def trace(module: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Trace:
    """Follow `module(*args, **kwargs)` without values: neither the module nor its memory change, whatever its forward keeps in
    its attributes, and nothing is computed.

    Params of two or more dims get a reading. What could not be followed is `Role.UNSEEN`, with the reason.
    """
    root = unwrapped(module)
    named = dict(names.named_parameters(root))
    args, kwargs = tree_map(_bare, (tuple(args), dict(kwargs or {})))
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    with keeping(root, given) as kept, _without_values(root) as stand_ins:
        params = {fqn: stand_ins[id(param)] for fqn, param in named.items()}
        follower = Follower(params, given, kept.note)
        blocks = Blocks(root, follower.books.labels.of, follower.books.mark_live)
        problem = _run(root, follower, blocks, args, kwargs)
        readings: Readings = read_params(follower.books, {fqn: tuple(param.shape) for fqn, param in params.items()})
    if problem:
        readings = _before(blocks.finished(), readings, problem)
    readings = _like_others(readings, blocks.leads(is_any_enough=follower.books.answers.count > 0))
    return Trace({fqn: readings[fqn] for fqn, param in named.items() if param.dim() >= 2}, problem)


def _bare(found: object) -> object:
    """Inputs without values, but for numbers: ids and masks may decide what a forward does."""
    if not isinstance(found, Tensor) or not found.dtype.is_floating_point:
        return found
    return torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta")


def _run(root: nn.Module, follower: Follower, blocks: Blocks, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Run the forward under the follower; why it failed, or nothing."""
    with torch.no_grad(), _as_in_evaluation(root), blocks.standing_in(), KnownIndices(), follower:
        try:
            out = root(*args, **kwargs)
        except Exception as error:  # whatever a model does with shapes that it did not expect
            words = " ".join(str(error).split())
            return f"{type(error).__name__}: {words[:200]}"
    follower.books.mark_outputs(leaf for leaf in _leaves(out) if isinstance(leaf, Tensor))
    return ""


def _leaves(out: Any) -> list[Any]:
    """What a model returns, also in containers that torch does not know."""
    found = []
    for leaf in tree_leaves(out):
        is_container = hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module)
        found.extend(tree_leaves(vars(leaf)) if is_container else [leaf])
    return found


@contextmanager
def _without_values(root: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Within, params and buffers are meta tensors of the same shapes; yields them by the `id` of what they stand for."""
    stand_ins: dict[int, Tensor] = {}
    tables: list[dict[str, Any]] = [
        table for module in root.modules() for table in (module._parameters, module._buffers)
    ]
    before = [dict(table) for table in tables]
    recurrent = [module for module in root.modules() if isinstance(module, nn.RNNBase)]

    def stand_in(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in stand_ins:
            made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
            is_param = isinstance(tensor, nn.Parameter)
            stand_ins[id(tensor)] = nn.Parameter(made, requires_grad=False) if is_param else made
        return stand_ins[id(tensor)]

    try:
        for table in tables:
            table.update({name: stand_in(tensor) for name, tensor in table.items()})
        for module in recurrent:  # they keep a list of their own
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]
        yield stand_ins
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)
        for module in recurrent:
            module._flat_weights = [module._parameters.get(name) for name in module._flat_weights_names]


@contextmanager
def _as_in_evaluation(root: nn.Module) -> Iterator[None]:
    """Within, nothing is dropped, and torch's own layers take no short cuts that nobody could follow."""
    training = {module: module.training for module in root.modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        for module in training:
            module.training = False
        torch.backends.mha.set_fastpath_enabled(False)
        # Who has not imported the compiler has compiled nothing, and importing it takes seconds.
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, was in training.items():
            module.training = was


def _before(finished: Sequence[str], readings: Readings, problem: str) -> Readings:
    """After a failure only blocks that were through count: of others it is not known what would have come."""
    unseen = Reading(Role.UNSEEN, f"the forward failed before it was through with it ({problem})")
    return {
        fqn: reading if any(fqn.startswith(f"{name}.") for name in finished) else unseen
        for fqn, reading in readings.items()
    }


def _like_others(readings: Readings, leads: Mapping[str, str]) -> Readings:
    """Params of blocks that were not followed are like those of the block of their kind that was."""

    def lead_of(fqn: str) -> str:
        parts = fqn.split(".")
        prefix, at = "", 0
        while at < len(parts):
            prefix = joined(prefix, parts[at])
            at += 1
            seen = set()
            while prefix in leads and prefix not in seen:
                seen.add(prefix)
                prefix = leads[prefix]
        return prefix

    found = {}
    for fqn, reading in readings.items():
        lead = lead_of(fqn) if reading.role in (Role.UNSEEN, Role.ADDED) else fqn
        found[fqn] = readings.get(lead, reading) if lead != fqn else reading
    return found

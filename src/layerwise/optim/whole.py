"""The whole state of an optimizer whose ranks hold parts of it: put together for a checkpoint that one rank writes, and
taken apart again, on any number of ranks and in any layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.engine.engine import Engine
from layerwise.engine.update import AtHome
from layerwise.errors import StateError
from layerwise.layout.shards import speaks_for
from layerwise.layout.spans import Span
from layerwise.memory.storage import Storage
from layerwise.optim.state import KEY, STEP, ExtraState

State = Mapping[str, Mapping[str, Tensor]]
"""By param and name."""


class _Part(NamedTuple):
    """A span of a param that this rank has, and whether it is the first that does."""

    span: Span
    is_first: bool


class Whole(NamedTuple):
    """State that was put together: of every param by name on the rank that keeps it, of none on others; which rank that is, and
    how often weights had changed by then."""

    state: State
    to: int
    changes: int

    def entries(self, storage: Storage) -> State:
        """The state of every param that this rank keeps. Raises, on every rank, if it is of before."""
        if self.changes != storage.changes:
            raise StateError(
                "weights were written since consolidate_state_dict(): what it put together is of before. Call it again, on every rank."
            )
        return self.state

    def put_into(self, state_dict: dict[str, Any], extra: ExtraState, engine: Engine) -> None:
        """Have a state dict of this rank's part hold the whole on the rank that keeps it, and nothing on another one with a part."""
        state = self.entries(engine.storage)
        if self.to == engine.groups.rank:
            fqns = [fqn for group in state_dict["param_groups"] for fqn in group["fqns"]]
            state_dict["state"] = {number: state[fqn] for number, fqn in enumerate(fqns)}
            extra["whole"] = True
        elif engine.plan.is_split:
            state_dict["state"] = {}
            extra["elsewhere"] = self.to


def with_steps(state: State, own: State) -> State:
    """The same with the steps of those that count their own."""
    return {
        fqn: {**{name: kept for name, kept in own[fqn].items() if name == STEP}, **entry}
        for fqn, entry in state.items()
    }


def check_consolidation(engine: Engine, to: int) -> None:
    """Raise where state is of no single model that one rank could hold, or that rank is none."""
    if not isinstance(to, int) or not 0 <= to < engine.groups.world:
        raise ValueError(f"to must be the number of one of {engine.groups.world} ranks, from 0 on, got {to!r}.")
    if engine.plan.options.memory == "params" and engine.groups.world > 1:
        raise StateError(
            "consolidate_state_dict() was called on the optimizer of a sharded model: its state is DTensors. Save it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict()."
        )
    if len(engine.groups.stages) > 1 or min(engine.plan.world_by_domain.values(), default=1) < engine.plan.world:
        raise StateError(
            "consolidate_state_dict() was called on a model whose ranks hold different params (pipeline stages, or experts of "
            "their own): no rank has room for all of them under one name. Save state_dict(part=True) on every rank, in a file of its own."
        )


def _parts(storage: Storage) -> dict[str, list[_Part]]:
    found: dict[str, list[_Part]] = {}
    for shard in storage.shards:
        rank = storage.ranks[shard.plan.domain]
        for span in shard.spans:
            found.setdefault(span.fqn, []).append(_Part(span, speaks_for(shard.plan, span, rank)))
    return found


@torch.no_grad()
def put_together(
    state: State, storage: Storage, at_home: Mapping[tuple[str, str], AtHome], communicator: Communicator, *, keep: bool
) -> dict[str, dict[str, Tensor]]:
    """Every tensor whole, in host memory, on the ranks that `keep` it. One after the other: nobody else holds more than one.

    Every element has one owner, so adding up bits over ranks is a copy.
    """
    parts = _parts(storage)
    found: dict[str, dict[str, Tensor]] = {}
    for fqn, tensors in sorted(state.items()):
        param = storage.params[fqn]
        for name, own in sorted(tensors.items()):
            if name == STEP:
                continue  # said once, beside
            home = at_home.get((fqn, name))
            shape = tuple(param.shape) if home is None else home.shape
            full = torch.zeros(math.prod(shape), dtype=own.dtype, device=own.device)
            if home is not None:
                if home.first == communicator.rank:
                    full.copy_(own.reshape(-1))
            else:
                offset, flat = 0, own.reshape(-1)
                for span, is_first in parts.get(fqn, ()):
                    if is_first:
                        full[span.start : span.stop] = flat[offset : offset + span.numel]
                    offset += span.numel
            communicator.add_bits(full.view(torch.int32), label=f"{name} of {fqn}")
            if keep:
                found.setdefault(fqn, {})[name] = full.view(shape).cpu()
    return found


def part_of(
    state_dict: Mapping[str, Any],
    mine: State,
    storage: Storage,
    at_home: Mapping[tuple[str, str], AtHome],
    extra: ExtraState,
) -> Mapping[str, Any]:
    """This rank's part of a whole state dict, as its own `state_dict(part=True)` would have been; any other state dict as it is."""
    theirs = state_dict.get(KEY, {})
    if not theirs.get("whole"):
        return state_dict
    parts = _parts(storage)
    state: dict[object, dict[str, Tensor]] = {}
    for group in state_dict["param_groups"]:
        for fqn, key in zip(group["fqns"], group["params"], strict=True):
            entry = state_dict["state"].get(key, {})
            own = mine.get(fqn, {})
            state[key] = {
                name: _cut(fqn, name, full, own.get(name), parts.get(fqn, ()), at_home.get((fqn, name)), storage)
                for name, full in entry.items()
                if name != STEP
            }
            if STEP in own:
                since = theirs.get("begun", {}).get(fqn, 0)
                state[key][STEP] = torch.tensor(float(theirs["step"] - since), device="cpu")
    own_place = {name: value for name, value in extra.items() if name not in ("step", "begun", "loss_scale")}
    return {**state_dict, "state": state, KEY: {**theirs, **own_place}}


def _cut(
    fqn: str,
    name: str,
    full: Tensor,
    own: Tensor | None,
    parts: list[_Part] | tuple[()],
    home: AtHome | None,
    storage: Storage,
) -> Tensor:
    """What this rank has of one tensor."""
    param = storage.params.get(fqn)
    expected = home.shape if home is not None else None if param is None else tuple(param.shape)
    if own is None or expected is None:
        return full  # for whoever compares names to refuse
    if tuple(full.shape) != expected:
        raise ValueError(
            f"state dict has {name!r} of param {fqn!r} as {tuple(full.shape)}: expected {expected}. It is of another model."
        )
    if home is not None:
        return full if own.numel() else full.new_empty(0)
    if own.shape == full.shape:
        return full
    flat = full.reshape(-1)
    return torch.cat([flat[span.start : span.stop] for span, _ in parts]) if parts else flat[:0]

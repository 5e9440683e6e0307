"""Optimizer state in and out, in torch's state_dict format. Loading checks everything before it writes anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from layerwise.comm.sharded import local_of, placed_alike
from layerwise.config.rules import plain_option
from layerwise.engine.engine import Engine
from layerwise.engine.loss_scale import LossScaler
from layerwise.engine.param_groups import live_rule
from layerwise.errors import StateError, listed, users_function
from layerwise.layout.plan import Plan
from layerwise.memory.storage import Storage

KEY = "layerwise"
"""Where a state dict has what is ours."""
STEP = "step"
"""What the state of a param that lies in memory of its own has beside tensors of its shape: successful steps so far, as
torch's optimizers have it. It goes through checkpoints that know of state and param groups only."""
_WRAPS = ("accelerate.optimizer", "__init__")
"""The function of accelerate that takes state out of an optimizer which it wraps, and loads it again at once."""
_NOT_LOADED = ("params", "name", "method")
"""Entries of a saved param group that a load leaves out. `method` is an option that rules had in earlier versions."""


class _SometimesThere(TypedDict, total=False):
    """Entries beside torch's that not every state dict holds."""

    begun: dict[str, int]
    """The step after which the state of a param began anew, by name."""
    whole: bool
    """True in a state dict of all ranks."""
    elsewhere: int
    """In an empty state dict, the rank on which the whole was put together."""


class ExtraState(_SometimesThere):
    """What a state dict holds beside torch's entries."""

    step: int
    plan: str
    spans: dict[str, list[int]]
    place: list[int]
    """Pipeline stage, and place among the ranks that share out experts."""
    rank: int
    loss_scale: dict[str, float] | None


def describe_spans(storage: Storage) -> dict[str, list[int]]:
    """The elements of every param that this rank's state covers: where each span begins and ends, in order, and where its
    block begins, if it has one."""
    found: dict[str, list[int]] = {}
    for shard in storage.shards:
        for span in shard.spans:
            block = () if span.block is None else span.block.box.starts
            found.setdefault(span.fqn, []).extend((span.start, span.stop, *block))
    return found


def extra_state_of(engine: Engine, scaler: LossScaler | None) -> ExtraState:
    """What is ours beside the state of this rank."""
    return {
        "step": engine.count.steps,
        "begun": dict(engine.count.begun),
        "plan": engine.plan.digest,
        "spans": describe_spans(engine.storage),
        "loss_scale": scaler.state_dict() if scaler is not None else None,
        "place": engine.groups.place,
        "rank": engine.groups.rank,
    }


def _packing_advice(plan: Plan) -> str:
    """The remedy for a state dict that one rank saved under the packing of an earlier version, as a sentence; empty for a plan
    without packed buffers."""
    if all(buffer.key.facts.cut != "packed" for buffer in plan.buffers):
        return ""
    return (
        " Earlier versions packed layout='padded' in another way: if one of them wrote it, load it there and call layerwise.save(), whose "
        "checkpoints load here."
    )


def is_whole(engine: Engine, kept_at_home: Sequence[str], is_together: bool) -> bool:
    """Whether a state dict is to be the whole; a trainer that only wraps the optimizer gets the part. Raises where this rank has a
    part alone and all parts are not put together; `kept_at_home` names what homes keep of matrices. Asks no other rank."""
    if users_function() == _WRAPS:
        return False
    if is_together:
        return True
    groups = engine.groups
    where = f"rank {groups.rank} of {groups.world}"
    own = "state_dict(part=True) is the part of this rank, for a file of its own that the same rank loads."
    if engine.plan.is_split:
        raise StateError(
            f"state_dict() was called on an optimizer whose state is in parts: {where} has its own alone, and a checkpoint of that would "
            "lose the others. For a file that one rank writes, call consolidate_state_dict(to=0) on every rank before, and state_dict() on "
            "rank 0 (not torch's get_state_dict(), which leaves out the step); prepare() and TrainerMixin of layerwise.integrations do it "
            "in accelerate and in Hugging Face's Trainer. "
            f"layerwise.save(folder, model, optimizer) writes all parts. {own}"
        )
    if kept_at_home and engine.plan.own and groups.world > 1:
        raise StateError(
            f"state_dict() was called on an optimizer that keeps {listed(kept_at_home)} of whole matrices on the ranks that are home to "
            f"them: {where} has its own alone, they are no DTensors, and torch.distributed.checkpoint would keep those of one rank. Call "
            f"layerwise.save(folder, model, optimizer); of Muon all state goes through torch's checkpoints. {own}"
        )
    return True


def export_state(state_dict: dict[str, object], extra: ExtraState) -> dict[str, object]:
    """torch's state dict with what is ours beside it, and options as plain values: `torch.load` takes no others unless it is
    told to."""
    groups: Any = state_dict["param_groups"]
    entries: Any = state_dict["state"]
    # Steps of its own: torch's distributed checkpoints read into what they are given.
    state = {key: {**entry, STEP: entry[STEP].clone()} if STEP in entry else entry for key, entry in entries.items()}
    plain = [{name: plain_option(value) for name, value in group.items()} for group in groups]
    return {**state_dict, "state": state, "param_groups": plain, KEY: extra}


class Own:
    """The state that steps work on: by name, each param and its tensors."""

    def __init__(self, state: Mapping[Tensor, dict[str, Tensor]], params: Mapping[str, Tensor]) -> None:
        self._kept = {fqn: (param, dict(state[param])) for fqn, param in params.items()}
        self._entries = list(state.values())
        places = [(entry, name) for entry in self._entries for name in entry if name != STEP]
        self._holders = [entry for entry, _ in places]
        self._names = [name for _, name in places]
        self._tensors = [entry[name] for entry, name in places]

    def check(self, state: Mapping[Tensor, dict[str, Tensor]]) -> None:
        """Raise unless an optimizer's state is these tensors."""
        if (
            len(state) == len(self._entries)  # asked at every step: without a step of Python for each
            and all(map(is_, state.values(), self._entries))
            and all(map(is_, map(dict.get, self._holders, self._names), self._tensors))
        ):
            return
        for fqn, (param, kept) in self._kept.items():
            now = state.get(param, {})
            changed = next(
                (name for name, tensor in kept.items() if name != STEP and now.get(name) is not tensor), None
            )
            if changed is not None:
                raise StateError(
                    f"state {changed!r} of param {fqn!r} was replaced or removed: steps work on the tensor that was there, where the "
                    f"model's memory is. Write into it, as in optimizer.state[param][{changed!r}].zero_(), or begin anew with a new "
                    "Optimizer."
                )


def after_hooks(optimizer: torch.optim.Optimizer, state_dict: dict[str, object]) -> dict[str, object]:
    """What hooks that were registered for it make of a state dict before it is loaded. The user's own stays as it is."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state dict is a {type(state_dict).__name__}: expected what layerwise.Optimizer.state_dict() gave. Load it on every rank."
        )
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        found = hook(optimizer, state_dict)
        state_dict = state_dict if found is None else found
    return state_dict


class Fitting(NamedTuple):
    """A state dict that was found to fit: what goes where, not yet written."""

    extra: ExtraState
    tensors: list[tuple[Tensor, Tensor]]
    groups: Sequence[Mapping[str, Any]]

    @property
    def begun(self) -> Mapping[str, int]:
        """After which step state of some params began."""
        return self.extra.get("begun", {})

    def write(self, optimizer: torch.optim.Optimizer) -> None:
        for target, source in self.tensors:
            local_of(target).copy_(local_of(source))
        for group, theirs in zip(optimizer.param_groups, self.groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name not in _NOT_LOADED})


def fit_state(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, object],
    mine: ExtraState,
    plan: Plan,
    fixed: Sequence[str],
) -> Fitting:
    """Check a state dict against the optimizer, whole, before anything is written; `fixed` options cannot change."""
    saved = _Saved.of(state_dict, mine)
    if saved.extra["spans"] != mine["spans"] and saved.extra["plan"] == mine["plan"]:
        raise ValueError(
            f"state dict is the part of rank {saved.extra['rank']}, this is rank {mine['rank']}: every rank has a part of its own. "
            "Save on every rank, in a file of its own, and load that on the same rank."
        )
    if saved.extra["spans"] != mine["spans"]:
        raise ValueError(
            f"state dict belongs to another layout: it was written under plan {saved.extra['plan'][:12]}, this rank has plan "
            f"{mine['plan'][:12]}. A state dict fits the same rank of the same plan only.{_packing_advice(plan)}"
        )
    if saved.extra["place"] != mine["place"]:
        raise ValueError(
            f"state dict belongs to another part of the model: stage and expert place {saved.extra['place']}, this rank has "
            f"{mine['place']}. A state dict fits the same rank of the same plan only."
        )
    if (saved.extra["loss_scale"] is None) != (mine["loss_scale"] is None):
        raise ValueError(
            "state dict and optimizer differ in loss scaling: one has it, the other has not. Construct them alike."
        )
    if len(saved.groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state dict has {len(saved.groups)} param groups, the optimizer {len(optimizer.param_groups)}."
        )
    pairs = []
    for index, (group, theirs) in enumerate(zip(optimizer.param_groups, saved.groups, strict=True)):
        _check_group(index, group, theirs, fixed)
        for fqn, param, key in zip(group["fqns"], group["params"], theirs["params"], strict=True):
            pairs += _matched(fqn, optimizer.state[param], saved.state.get(key, {}))
    return Fitting(saved.extra, pairs, saved.groups)


class _Saved(NamedTuple):
    """A state dict whose outer shape is known to be right."""

    state: Mapping[object, Mapping[str, Tensor]]
    groups: Sequence[Mapping[str, Any]]
    extra: ExtraState

    @classmethod
    def of(cls, state_dict: Mapping[str, Any], mine: ExtraState) -> _Saved:
        steps = {key: int(entry[STEP]) for key, entry in state_dict.get("state", {}).items() if STEP in entry}
        for key in ("state", "param_groups", KEY):
            if key not in state_dict and not (key == KEY and steps):
                raise ValueError(
                    f"state dict has no {key!r}: expected one that layerwise.Optimizer.state_dict() wrote. torch's get_state_dict() "
                    "leaves out what is not its own: of a DataParallel save layerwise.integrations.dcp.TrainState with torch.distributed.checkpoint, "
                    "or call layerwise.save() and load()."
                )
        # torch's distributed checkpoints know of state and param groups only.
        extra = state_dict.get(KEY, mine)
        if steps:
            # The model has taken as many as the param with most; others began later.
            most = extra["step"] if KEY in state_dict else max(steps.values())
            fqn_of = {
                key: fqn
                for group in state_dict["param_groups"]
                for fqn, key in zip(group.get("fqns", ()), group["params"], strict=False)
            }
            begun = {fqn_of[key]: most - step for key, step in steps.items() if step != most and key in fqn_of}
            if min(begun.values(), default=0) < 0:
                raise ValueError(f"state dict has params at step {max(steps.values())}, and is of step {most} itself.")
            extra = {**extra, "step": most, "begun": begun}
        if "elsewhere" in extra:
            raise ValueError(
                f"state dict has no state: it is that of rank {extra['rank']}, and consolidate_state_dict() put the whole together on rank "
                f"{extra['elsewhere']}. Load the one of that rank, on every rank."
            )
        lacking = sorted(ExtraState.__required_keys__ - set(extra))
        if lacking:
            raise ValueError(f"state dict entry {KEY!r} lacks {', '.join(map(repr, lacking))}.")
        return cls(state_dict["state"], state_dict["param_groups"], extra)


def _check_group(index: int, group: Mapping[str, Any], theirs: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Raise unless a saved param group fits the live one: the same params under the same rule, with all of its
    options."""
    for name in ("rule", "fqns", *fixed):
        if group.get(name) != theirs.get(name):
            raise ValueError(
                f"param group {index} of the state dict has another {name!r} than the optimizer: "
                f"{theirs.get(name)!r} against {group.get(name)!r}."
            )
    live_rule(index, theirs)


def _matched(fqn: str, mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Every tensor of a param with what goes into it; raises if they do not fit."""
    if set(mine) != set(theirs):
        raise ValueError(
            f"state dict has {sorted(theirs)} for param {fqn!r}: expected {sorted(mine)}. It is that of a model in another wrapper, "
            "of another dtype or with another rule; layerwise.save() and load() go between wrappers and dtypes."
        )
    found = []
    for name, target in mine.items():
        if name == STEP:
            continue
        source = theirs[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(
                f"state dict has {name!r} of param {fqn!r} as {tuple(source.shape)} {source.dtype}: "
                f"expected {tuple(target.shape)} {target.dtype}."
            )
        if not placed_alike(target, source):
            raise ValueError(
                f"state dict has {name!r} of param {fqn!r} on other ranks, or cut in another way, than the param: expected a DTensor "
                "with the param's mesh and placements. torch.distributed.checkpoint brings it there."
            )
        found.append((target, source))
    return found

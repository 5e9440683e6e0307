"""Optimizer state in and out, in torch's state_dict format. Loading checks everything before it writes anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

from layerwise.buffers.storage import Storage

_KEY = "layerwise"


class ExtraState(TypedDict):
    """What a state dict holds beside torch's entries."""

    step: int
    plan: str
    spans: dict[str, list[int]]
    loss_scale: dict[str, float] | None


def describe_spans(storage: Storage) -> dict[str, list[int]]:
    """The flat interval of every param that this rank's state covers."""
    return {span.fqn: [span.start, span.stop] for bucket in storage.buckets for span in bucket.spans}


def export_state(state_dict: dict[str, object], extra: ExtraState) -> dict[str, object]:
    """torch's state dict with what is ours beside it."""
    return {**state_dict, _KEY: extra}


def import_state(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object], mine: ExtraState) -> ExtraState:
    """Copy a state dict into the optimizer's tensors and param groups; returns our own entry of it."""
    for key in ("state", "param_groups", _KEY):
        if key not in state_dict:
            raise ValueError(f"state dict has no {key!r}: expected one that layerwise.Optimizer.state_dict() wrote.")
    theirs: ExtraState = state_dict[_KEY]  # type: ignore[assignment]
    if theirs["spans"] != mine["spans"]:
        raise ValueError(
            f"state dict belongs to another layout: it was written under plan {theirs['plan'][:12]}, this rank has plan "
            f"{mine['plan'][:12]}. A state dict fits the same rank of the same plan only."
        )
    if (theirs["loss_scale"] is None) != (mine["loss_scale"] is None):
        raise ValueError(
            "state dict and optimizer differ in loss scaling: one has it, the other has not. Construct them alike."
        )
    pairs = _matched(optimizer, state_dict)
    for target, source in pairs:
        target.copy_(source)
    saved_groups: list[dict[str, object]] = state_dict["param_groups"]  # type: ignore[assignment]
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        group.update({name: value for name, value in saved.items() if name not in ("params", "fqns", "rule")})
    return theirs


def _matched(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object]) -> list[tuple[Tensor, Tensor]]:
    """Every tensor to be written with what goes into it; raises on the first that does not fit, before anything is
    written."""
    saved_groups: list[dict[str, object]] = state_dict["param_groups"]  # type: ignore[assignment]
    saved_state: dict[int, dict[str, Tensor]] = state_dict["state"]  # type: ignore[assignment]
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"state dict has {len(saved_groups)} param groups, the optimizer {len(optimizer.param_groups)}."
        )
    pairs = []
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        if (saved.get("rule"), saved.get("fqns")) != (group["rule"], group["fqns"]):
            raise ValueError(
                f"param group {index} of the state dict has other params or another rule than the optimizer's ({group['rule']})."
            )
        for fqn, param, key in zip(group["fqns"], group["params"], saved["params"], strict=True):  # type: ignore[call-overload]
            for name, target in optimizer.state[param].items():
                source = saved_state.get(key, {}).get(name)
                if source is None:
                    raise ValueError(f"state dict lacks {name!r} of param {fqn!r}.")
                if source.shape != target.shape or source.dtype != target.dtype:
                    raise ValueError(
                        f"state dict has {name!r} of param {fqn!r} as {tuple(source.shape)} {source.dtype}: expected {tuple(target.shape)} {target.dtype}."
                    )
                pairs.append((target, source))
    return pairs

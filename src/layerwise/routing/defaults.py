"""The default rules: what a param is, by module type, sharing, shape and position, and by name as the last resort.

Each rule says yes with a reason or says nothing; the first that speaks decides. Users see the reasons.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from layerwise.routing.spec import EXPERT, ModuleKind, ParamSpec

Family = Literal["matrix", "other", "frozen"]

_HEAD_NAMES = frozenset({"head", "output", "unembed", "unembedding", "classifier", "score", "embed_out"})
"""And whatever ends in `_head`."""
_TABLE_WORDS = ("embed", "pos", "token", "ape")
_ROUTER_NAMES = frozenset({"router", "router_proj", "gate_network"})
_LORA_STARTS = ("lora_a", "lora_b", "lora_embedding_a", "lora_embedding_b")
_STATE_SPACE_NAMES = frozenset({"A_log", "dt_bias"})
_STATE_SPACE_CLASSES = ("Mamba", "SSM", "StateSpace")
_EXPERT_CLASS = re.compile(r"Expert|M[Oo]E(Block|Layer)?$|Moe(Block|Layer)?$")
_EXPERT_STEP = re.compile(r"(^|_)experts?(_|$)")
"""experts, local_experts, expert_weights: a step of a path that says what class names may not."""
_ADAPTER_STEPS = frozenset({"base_layer", "modules_to_save"})
"""Path steps that adapter libraries put between a module's name and its weight."""


@dataclass(frozen=True, slots=True)
class DefaultRule:
    """A default rule: its name, and a function that says yes with a reason or None."""

    name: str
    family: Family
    applies: Callable[[ParamSpec], str | None]
    is_fallback: bool = False
    """It takes what no better rule explains: `strict` refuses that for anything with two dims."""


def _leaf(param: ParamSpec) -> str:
    return (param.stands_for or param.fqn).rsplit(".", 1)[-1]


def _holder(param: ParamSpec) -> str:
    """Name of the module that holds the param, past what adapter libraries put in between."""
    path = (param.stands_for or param.fqn).split(".")[:-1]
    if len(path) > 2 and path[-2] == "modules_to_save":
        path = path[:-1]  # the last step is the name of the adapter
    return next((step for step in reversed(path) if step not in _ADAPTER_STEPS), "")


def low_rank(param: ParamSpec) -> str | None:
    step = next((step for step in param.fqn.split(".") if step.lower().startswith(_LORA_STARTS)), None)
    if step is None:
        return None
    return f"is one factor of a low-rank pair ({step!r}): only the product of the two is a matrix of the model"


def _scale(param: ParamSpec) -> str | None:
    if not param.is_scale:
        return None
    return f"is the scale that weight_norm sets apart from {param.stands_for!r}: lengths, one for each direction, not a matrix"


def _norm(param: ParamSpec) -> str | None:
    return f"belongs to a normalisation layer ({param.module_type})" if param.module_kind is ModuleKind.NORM else None


def _state_space(param: ParamSpec) -> str | None:
    leaf = _leaf(param)
    is_of_class = leaf in ("A", "D") and any(word in param.module_type for word in _STATE_SPACE_CLASSES)
    if param.module_kind is ModuleKind.OTHER and (leaf in _STATE_SPACE_NAMES or is_of_class):
        return f"is the {leaf!r} of a state-space layer: each entry is a rate or a gain of its own"
    return None


def _bias(param: ParamSpec) -> str | None:
    leaf = _leaf(param)
    if leaf == "bias":
        return "is a bias: added, not multiplied"
    names = [leaf] if param.module_kind is not ModuleKind.LINEAR else [leaf, _holder(param)]
    for name in names:  # bias_k, up_bias, bias_ih_l0, rel_pos_bias.weight
        if {"bias", "biases"} & set(re.split(r"[_\d]+", name)):
            return f"is a bias, going by its name {name!r}"
    return None


def _too_small(param: ParamSpec) -> str | None:
    if param.numel == 0:
        return "has no elements"
    if len(param.shape) == 0:
        return "is a scalar"
    return "is a vector, not a matrix" if len(param.shape) == 1 else None


def _embedding(param: ParamSpec) -> str | None:
    if param.module_kind is not ModuleKind.EMBEDDING and ModuleKind.EMBEDDING not in param.alias_kinds:
        return None
    if _leaf(param) != "weight":
        return None  # a class that is called so holds it: a name, which comes last
    tied = f", tied to {_first_tie(param)!r}" if param.aliases else ""
    return f"is an embedding table ({param.module_type}{tied}): its rows are looked up, not multiplied"


def _first_tie(param: ParamSpec) -> str:
    """The alias to name: an output head tells more than another table."""
    kinds = zip(param.aliases, param.alias_kinds, strict=False)
    return next((alias for alias, kind in kinds if kind is ModuleKind.LINEAR), param.aliases[0])


def _head(param: ParamSpec) -> str | None:
    if param.maps_to_vocabulary:
        return "is an output head: a linear layer onto the rows of an embedding"
    if param.maps_to_labels:
        return "is an output head: a linear layer onto the labels of the model's config"
    holder = _holder(param)
    is_pointwise = param.module_kind is ModuleKind.CONV and math.prod(param.shape[2:]) == 1
    if (
        (param.module_kind is ModuleKind.LINEAR or is_pointwise)
        and (holder in _HEAD_NAMES or holder.endswith("_head"))
        and not param.in_block
    ):
        return f"is an output head, going by its name {holder!r}"
    return None


def _router(param: ParamSpec) -> str | None:
    why = "its rows are scores that compete, and balance matters more than direction"
    if param.routes_to:
        return f"is a router that chooses among {param.routes_to} experts: {why}"
    holder = _holder(param)
    if param.module_kind is ModuleKind.LINEAR and holder in _ROUTER_NAMES:
        return f"is a router, going by its name {holder!r}: {why}"
    return None


def _one_sided(param: ParamSpec) -> str | None:
    if len(param.shape) != 2 or min(param.shape) != 1 or param.split:
        return None
    if param.module_kind is ModuleKind.LINEAR:
        side = "onto" if param.shape[0] == 1 else "from"
        return f"is a linear layer {side} one number (a gate or a score): a vector, not a matrix"
    return "has one row, or one column: a vector, not a matrix"


def _grouped_conv(param: ParamSpec) -> str | None:
    if param.module_kind is ModuleKind.CONV and param.conv_groups > 1:
        return f"is a convolution in {param.conv_groups} groups: its rows belong to different inputs"
    return None


def _one_channel_conv(param: ParamSpec) -> str | None:
    if param.module_kind is ModuleKind.CONV and min(param.shape[:2]) == 1:
        return "is a convolution with one channel: its rows are filters over a signal, no map between channels"
    return None


def _input_conv(param: ParamSpec) -> str | None:
    if param.module_kind is ModuleKind.CONV and param.reads_input:
        return f"is an input layer: a convolution that embeds the {param.shape[1]} channels of the input, as a table embeds tokens"
    return None


def _linear(param: ParamSpec) -> str | None:
    is_linear = param.module_kind is ModuleKind.LINEAR and (len(param.shape) <= 3 or param.split is not None)
    return f"is the weight of a {param.module_type}" if is_linear else None


def _conv(param: ParamSpec) -> str | None:
    return "is a convolution, flattened to rows x (columns * kernel)" if param.module_kind is ModuleKind.CONV else None


def _broadcast(param: ParamSpec) -> str | None:
    if len(param.shape) == 3 and param.shape[0] == 1 and param.split is None and _stack(param) is None:
        return "has a leading dim of 1, so it is one for all of a batch (a table of positions or tokens): no map"
    return None


def _table_by_name(param: ParamSpec) -> str | None:
    leaf = _leaf(param)
    found = next((word for word in _TABLE_WORDS if any(part.startswith(word) for part in leaf.split("_"))), None)
    if found:
        return f"looks like a table by its name ({found!r} in {leaf!r})"
    if param.module_kind is ModuleKind.EMBEDDING:
        return f"is held by {param.module_type}, a class of embeddings: a table of inputs, going by that name"
    return None


def _stack(param: ParamSpec) -> str | None:
    """Three dims alone say nothing: a grouped convolution or a table per head has them too."""
    if len(param.shape) != 3:
        return None
    if param.domain == EXPERT or _EXPERT_CLASS.search(param.module_type):
        return f"is a stack of {_matrices(param)}, one for each expert of {param.module_type or 'a module'}"
    step = next(filter(_EXPERT_STEP.search, param.fqn.split(".")), None)
    return None if step is None else f"is a stack of {_matrices(param)}, one for each expert, going by {step!r}"


def _matrices(param: ParamSpec) -> str:
    return "1 matrix" if param.shape[0] == 1 else f"{param.shape[0]} matrices"


def _declared(param: ParamSpec) -> str | None:
    if param.split is None:
        return None
    holder = param.module_type or "a module"
    return (
        f"is a weight of {holder}, {'whose splits are known' if param.split_is_known else 'which says how it splits'}"
    )


def _bare_matrix(param: ParamSpec) -> str | None:
    return f"is a 2-D param held directly by {param.module_type or 'a module'}" if len(param.shape) == 2 else None


def _uncovered(param: ParamSpec) -> str | None:
    return f"has {len(param.shape)} dims, which no matrix rule covers"


DEFAULT_RULES: tuple[DefaultRule, ...] = (
    DefaultRule("scales of weight_norm", "other", _scale),
    DefaultRule("norms", "other", _norm),
    DefaultRule("state-space params", "other", _state_space),
    DefaultRule("biases", "other", _bias),
    DefaultRule("embeddings", "other", _embedding),
    DefaultRule("scalars and vectors", "other", _too_small),
    DefaultRule("low-rank pairs", "other", low_rank),
    DefaultRule("routers", "other", _router),
    DefaultRule("output heads", "other", _head),
    DefaultRule("one-sided layers", "other", _one_sided),
    DefaultRule("grouped convolutions", "other", _grouped_conv),
    DefaultRule("one-channel convolutions", "other", _one_channel_conv),
    DefaultRule("input convolutions", "other", _input_conv),
    DefaultRule("linear layers", "matrix", _linear),
    DefaultRule("convolutions", "matrix", _conv),
    DefaultRule("broadcast tables", "other", _broadcast),
    DefaultRule("declared splits", "matrix", _declared),
    DefaultRule("tables by name", "other", _table_by_name, is_fallback=True),
    DefaultRule("stacks", "matrix", _stack),
    DefaultRule("bare matrices", "matrix", _bare_matrix, is_fallback=True),
    DefaultRule("everything else", "other", _uncovered, is_fallback=True),
)

"""How params split into matrices: by the word of their module, or by what is known of its class."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from torch import nn

from layerwise.models import names
from layerwise.models.kinds import place_of, weight_shape
from layerwise.models.known.classes import is_transposed_linear, known_splits
from layerwise.models.names import joined
from layerwise.routing.split import Split, row_blocks, transposed

_FUSED_NAMES = frozenset(
    {"in_proj_weight", "c_attn", "W_pack", "kv_a_proj_with_mqa", "kv_b_proj", "wkv_a", "wkv_b", "gateup", "w12", "w13"}
)
"""Names that modules give to weights which are several in one."""
_FUSED_WORD = re.compile(r"w?qkv[a-z]?|kv[a-z]?")
"""Words that say it within a name: qkv, kv, wqkv, qkvz."""
_FUSED_WORDS = (("key", "value"), ("gate", "up"))
"""Words that say it together, in this order: the gate of an up projection is called up_gate."""
_OTHER_WORDS = frozenset({
    "all", "and", "attention", "attn", "cross", "dense", "fc", "fused", "in", "layer", "lin", "linear", "merged", "mixed", "packed", "proj",
    "projection", "query", "self", "to", "w", "weight",
})  # fmt: skip
"""Words that may stand beside those: to_kv, linear_qkv, gate_and_up. With any other a name may mean one matrix: kv_down."""
_ADAPTER_PARTS = frozenset({"base_layer", "original_module"})
"""What adapter libraries put between a module and the weight that it had before."""


def method_of(module: nn.Module, name: str) -> Callable[[], object] | None:
    """A method by which a module tells us about its params, if it has one."""
    found = getattr(module, name, None)
    if found is not None and not callable(found):
        raise TypeError(f"{type(module).__name__}.{name} is a {type(found).__name__}: expected a method.")
    return found


class Splits(NamedTuple):
    """What is known of how params split, by fqn."""

    declared: dict[str, Split]
    """What a module's own `matrix_splits()` says."""
    known: dict[str, Split]
    """What is known of its class."""
    misfits: dict[str, str]
    """Why a module is not what is known of its class, for its params. No error yet: a user's rule may know better."""


def all_splits(modules: Mapping[str, nn.Module]) -> Splits:
    """Splits of fused weights. Of what is known the outermost module's word counts: attention knows more about its
    projection than the projection."""
    found = Splits({}, {}, {})
    for prefix, child in modules.items():
        known: Mapping[str, Split] = {}
        if not callable(getattr(child, "matrix_splits", None)):
            try:
                known = known_splits(child)
            except ValueError as error:
                found.misfits.update(dict.fromkeys(_in_doubt(child, prefix), str(error)))
        if is_transposed_linear(child) and not fused_name(prefix):
            known = {"weight": transposed(weight_shape(child))}
        for local, split in known.items():
            found.known.setdefault(_wrapped(child, prefix, local), split)
    for prefix, child in modules.items():
        found.declared.update(_declared_splits(child, prefix))
    return found


def _in_doubt(module: nn.Module, prefix: str) -> list[str]:
    """The weights of a module, or of its children, that may be several in one: those called so, or else all."""
    near = [name for name, param in names.named_parameters(module) if param.ndim > 1 and name.count(".") <= 1]
    return [joined(prefix, name) for name in [name for name in near if fused_name(name)] or near]


def _wrapped(module: nn.Module, prefix: str, local: str) -> str:
    """The fqn of a known param, also if an adapter has wrapped its module since."""
    path, _, leaf = local.rpartition(".")
    wrapped = path and hasattr(module.get_submodule(path), "base_layer")
    return ".".join(part for part in (prefix, path, "base_layer" if wrapped else "", leaf) if part)


def _declared_splits(module: nn.Module, prefix: str) -> dict[str, Split]:
    """What a module's own `matrix_splits()` says, by fqn."""
    declared = _declaration(module)
    if not declared:
        return {}
    found: dict[str, Split] = {}
    modules = dict(names.named_modules(module))
    params = {
        place.fqn: param
        for fqn, param in names.named_parameters(module)
        if not (place := place_of(modules, fqn)).is_scale
    }
    for local, split in declared.items():
        if local not in params:
            raise ValueError(
                f"{type(module).__name__}.matrix_splits() names {local!r}, which is no param of it. Its params: "
                f"{', '.join(sorted(params))}."
            )
        fqn = joined(prefix, local)
        if isinstance(split, Split):
            found[fqn] = split
        else:
            try:
                found[fqn] = row_blocks(tuple(params[local].shape), tuple(int(size) for size in split))
            except ValueError as error:
                where = f"{type(module).__name__}.matrix_splits() for param {fqn!r}"
                raise ValueError(f"{where}: {error} Fix matrix_splits().") from None
    return found


def _declaration(module: nn.Module) -> Mapping[str, Split | Sequence[int]]:
    splits = method_of(module, "matrix_splits")
    if splits is None:
        return {}
    declared = splits()
    if not isinstance(declared, Mapping):
        raise TypeError(
            f"{type(module).__name__}.matrix_splits() returned {type(declared).__name__}: expected a dict from param name "
            "to a Split or row block sizes."
        )
    return declared


def fused_name(fqn: str) -> str:
    """The part of a weight's name that says it is fused, or nothing."""
    parts = [part for part in fqn.split(".") if part not in _ADAPTER_PARTS and not part.isdecimal()]
    return next(filter(_says_fused, reversed(parts[-2:])), "")


@cache
def _says_fused(part: str) -> bool:
    words = part.lower().split("_")
    found = {word for word in words if _FUSED_WORD.fullmatch(word)}
    found.update(*(pair for pair in _FUSED_WORDS if tuple(word for word in words if word in pair) == pair))
    return part in _FUSED_NAMES or (bool(found) and {*words} - found <= _OTHER_WORDS)

"""What a module is, by its type or by what its class is called, and which of its weights a param is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from layerwise.models import names
from layerwise.models.known.classes import is_transposed_linear
from layerwise.models.names import joined
from layerwise.routing.spec import ModuleKind

_KINDS: tuple[tuple[tuple[type[nn.Module], ...], ModuleKind], ...] = (
    ((nn.Linear, nn.Bilinear), ModuleKind.LINEAR),
    ((nn.Embedding, nn.EmbeddingBag), ModuleKind.EMBEDDING),
    ((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase), ModuleKind.NORM),
    ((_ConvNd,), ModuleKind.CONV),
)
_NORM_CLASS = re.compile(r"Norm(?!al|ed)")
"""LlamaRMSNorm, T5LayerNorm, MambaRMSNormGated; not NormalizedLinear."""
_LINEAR_CLASS = re.compile(r"Linear(\d+bit\w*)?$")
"""ColumnParallelLinear, Linear4bit; not KimiLinearModel."""


def kind_of(module: nn.Module) -> ModuleKind:
    """By type; for classes of libraries that are not imported here, by what their class is called."""
    known = next((kind for types, kind in _KINDS if isinstance(module, types)), None)
    if known is not None:
        return known
    name = type_name(module)
    if is_transposed_linear(module) or _LINEAR_CLASS.search(name):
        return ModuleKind.LINEAR
    inside = [
        child for child in module.children() if not isinstance(child, nn.ModuleDict)
    ]  # parametrizations are in one
    if _NORM_CLASS.search(name) and not inside:
        return ModuleKind.NORM
    return ModuleKind.EMBEDDING if "Embed" in name else ModuleKind.OTHER


def weight_of(module: nn.Module) -> nn.Parameter | None:
    """A module's own param of that name, or what a parametrization makes it of. Asked for as an attribute, a parametrized
    weight would be computed, and what computes it may change: spectral_norm counts its iterations."""
    if "weight" in module._parameters:
        return module._parameters["weight"]
    modules = dict(names.named_modules(module))
    for fqn, param in names.named_parameters(module):
        if place_of(modules, fqn) == Place("", "weight", False):
            return param
    return None


class Place(NamedTuple):
    """Which weight of which module a param is, or what a parametrization makes it of."""

    holder: str
    name: str
    is_scale: bool

    @property
    def fqn(self) -> str:
        return joined(self.holder, self.name)


def place_of(modules: Mapping[str, nn.Module], fqn: str) -> Place:
    """Where a param is for its module: `parametrizations.weight.original1`, `weight_v` and `weight_orig` are its weight."""
    holder, _, leaf = fqn.rpartition(".")
    module = modules[holder]
    if isinstance(module, ParametrizationList):
        outer, _, name = f".{holder}".rpartition(".parametrizations.")
        return Place(outer.removeprefix("."), name, leaf == "original0" and isinstance(module[0], _WeightNorm))
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm | SpectralNorm) and leaf in (f"{hook.name}_{end}" for end in ("g", "v", "orig")):
            return Place(holder, hook.name, leaf == f"{hook.name}_g")
    return Place(holder, leaf, False)


def type_name(module: nn.Module) -> str:
    """What a module's class was called before a parametrization made another one of it."""
    return type_before_parametrizations(module).__name__


def weight_shape(module: nn.Module) -> tuple[int, int]:
    """(rows, cols) of a linear layer's weight; zeros if it has none of two dims."""
    weight = weight_of(module)
    if weight is None and isinstance(module, nn.Linear):  # parametrized
        return module.out_features, module.in_features
    if weight is None or weight.ndim != 2:
        return 0, 0
    return weight.shape[0], weight.shape[1]


def is_linear(module: nn.Module) -> bool:
    return kind_of(module) is ModuleKind.LINEAR and weight_shape(module) != (0, 0)

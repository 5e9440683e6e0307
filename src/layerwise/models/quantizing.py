"""Making a module's weights quantised: before it is wrapped, and in place."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from layerwise.errors import did_you_mean, listed
from layerwise.kernels.quantized import QuantizedTensor, Stored, recipe_of
from layerwise.layout.recipes import RECIPES, Recipe
from layerwise.models import names
from layerwise.models.table import param_table
from layerwise.routing.refusals import RefusedError
from layerwise.routing.rules import route_param
from layerwise.routing.spec import ModuleKind, ParamSpec


def quantize(module: nn.Module, recipe: str = "mxfp8", *, skip: Sequence[str] = ()) -> nn.Module:
    """Keep the weights of linear layers and of stacked experts as codes of eight bits, in place; returns the module.

    Embeddings, heads, routers, norms and biases stay as they are. Call it before `DataParallel`, on a module in bf16 that has
    its initial values: masters begin with these, and then they are let go.

    Args:
        module: the model.
        recipe: "mxfp8" (blocks of 32 along either direction, power-of-two scales) or "blockwise" (tiles of 128 x 128, fp32
            scales).
        skip: globs of params that stay as they are.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r}: expected a list of globs, as in skip=[{skip!r}].")
    chosen = _recipe_of(recipe)
    params = dict(names.named_parameters(module))
    wanted = [
        spec
        for spec in param_table(module)
        if _is_product(spec) and not any(fnmatchcase(spec.fqn, glob) for glob in skip)
    ]
    for glob in skip:
        if not any(fnmatchcase(fqn, glob) for fqn in params):
            raise ValueError(f"skip={glob!r} matches no param of {type(module).__name__}." + did_you_mean(glob, params))
    if not wanted:
        raise ValueError(
            f"{type(module).__name__} has no weight to quantise: expected linear layers or stacked experts that a matrix rule "
            "manages, in blocks, and not all of them skipped."
        )
    problems = [text for spec in wanted if (text := _problem(spec, params[spec.fqn], chosen))]
    if problems:
        raise ValueError(
            f"{recipe} cannot keep {listed(problems)}. Name what is to stay as it is in skip=, as in skip=[{wanted[0].fqn!r}]."
        )
    modules = dict(names.named_modules(module, remove_duplicate=False))
    for spec in wanted:
        old = params[spec.fqn]
        made = nn.Parameter(QuantizedTensor(Stored(chosen, old.detach().contiguous()), old.device))
        for fqn in (spec.fqn, *spec.aliases):
            holder, _, name = fqn.rpartition(".")
            setattr(modules[holder], name, made)
    return module


def _recipe_of(name: object) -> Recipe:
    found = RECIPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(
            f"recipe must be one of {', '.join(RECIPES)}, got {name!r}."
            + (did_you_mean(name, RECIPES) if isinstance(name, str) else "")
        )
    return found


def _is_product(spec: ParamSpec) -> bool:
    """Whether a param is the weight of a product that is worth it: what a matrix rule manages, and no router."""
    if not spec.trainable or spec.routes_to or spec.stands_for or len(spec.shape) not in (2, 3):
        return False
    is_linear = len(spec.shape) == 2 and spec.module_kind is ModuleKind.LINEAR
    try:
        found = route_param(spec)
    except RefusedError:  # how it splits is for a rule to say, and no matter here
        return is_linear
    return found.family == "matrix" and (is_linear or (len(spec.shape) == 3 and len(found.matrices) > 1))


def _problem(spec: ParamSpec, param: nn.Parameter, recipe: Recipe) -> str:
    """Why a param cannot be quantised, with its name; nothing if it can."""
    rows, cols = spec.shape[-2:]
    if type(param) is not nn.Parameter:
        what = f"quantised by {recipe_of(param)} already" if recipe_of(param) else f"a {type(param).__name__}"
        return f"{spec.fqn} (it is {what}, expected a plain param of a module that nobody has wrapped or cut)"
    if param.dtype is not torch.bfloat16:
        return f"{spec.fqn} (it is {param.dtype}, expected torch.bfloat16: call module.bfloat16() first)"
    if param.device.type == "meta":
        return f"{spec.fqn} (it is on the meta device and has no values: masters begin with them)"
    if rows % recipe.multiple or cols % recipe.multiple:
        return f"{spec.fqn} ({rows} x {cols}, expected multiples of {recipe.multiple}, the length of a block)"
    return ""

"""Making a module's weights quantised: before it is wrapped, and in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from layerwise.kernels.stored import Stored, recipe_of
from layerwise.layout.quantizing import block_problem, kept_as_codes, recipe_named
from layerwise.layout.recipes import Recipe
from layerwise.models import names
from layerwise.models.quantized import QuantizedTensor
from layerwise.models.table import param_table
from layerwise.routing.spec import ParamSpec


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
    if not isinstance(module, nn.Module):
        raise TypeError(f"quantize() takes a module, got {module!r}.")
    chosen = recipe_named(recipe)
    params = dict(names.named_parameters(module))
    wanted = kept_as_codes(
        param_table(module),
        chosen,
        skip,
        type(module).__name__,
        lambda spec: _problem(spec, params[spec.fqn], chosen),
    )
    put_params(
        module,
        {
            (spec.fqn, *spec.aliases): nn.Parameter(
                QuantizedTensor(Stored(chosen, params[spec.fqn].detach().contiguous()), params[spec.fqn].device)
            )
            for spec in wanted
        },
    )
    return module


def put_params(module: nn.Module, made: Mapping[tuple[str, ...], nn.Parameter]) -> None:
    """Have a module's params be these, which are kept as codes, under all their names."""
    modules = dict(names.named_modules(module, remove_duplicate=False))
    for fqns, param in made.items():
        for fqn in fqns:
            holder, _, name = fqn.rpartition(".")
            setattr(modules[holder], name, param)
            _made.setdefault(modules[holder], {})[name] = recipe_of(param)


_made: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""Names and recipes of the params that were made codes, by their module. torch's fully_shard() puts others in their place, with
what the codes stood for, and without a word."""


def first_quantized(module: nn.Module) -> tuple[str, str] | None:
    """The fqn and the recipe of a param that is kept as codes, or was before torch cut it; None where there is none."""
    for prefix, holder in names.named_modules(module):
        for name, param in holder._parameters.items():
            cut = _made.get(holder, {}).get(name, "") if hasattr(param, "placements") else ""
            if param is not None and (recipe := recipe_of(param) or cut):
                return names.joined(prefix, name), recipe
    return None


def _problem(spec: ParamSpec, param: nn.Parameter, recipe: Recipe) -> str:
    """Why a param cannot be quantised, with its name; nothing if it can."""
    if type(param) is not nn.Parameter:
        what = f"quantised by {recipe_of(param)} already" if recipe_of(param) else f"a {type(param).__name__}"
        return f"{spec.fqn} (it is {what}, expected a plain param of a module that nobody has wrapped or cut)"
    if param.dtype is not torch.bfloat16:
        return f"{spec.fqn} (it is {param.dtype}, expected torch.bfloat16: call module.bfloat16() first)"
    if param.device.type == "meta":
        return f"{spec.fqn} (it is on the meta device and has no values: masters begin with them)"
    return block_problem(spec, recipe)

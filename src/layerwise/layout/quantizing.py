"""Which params a recipe keeps as codes, and which it cannot: read off a table, so that it is known before there is a module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from layerwise.dtypes import DType
from layerwise.errors import did_you_mean, listed
from layerwise.layout.recipes import RECIPES, Recipe
from layerwise.layout.storage import ParamGather
from layerwise.routing.refusals import RefusedError
from layerwise.routing.rules import route_param
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable


def recipe_named(name: object) -> Recipe:
    """The recipe of that name; another is an error that says which there are."""
    found = RECIPES.get(name) if isinstance(name, str) else None
    if found is not None:
        return found
    if isinstance(name, str) and "fp4" in name.lower():
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}: there are no codes of four bits.")
    raise ValueError(
        f"recipe must be one of {', '.join(RECIPES)}, got {name!r}."
        + (did_you_mean(name, RECIPES) if isinstance(name, str) else "")
    )


def is_product(spec: ParamSpec) -> bool:
    """Whether a param is the weight of a product that is worth it: what a matrix rule manages, and no router."""
    if not spec.trainable or spec.routes_to or spec.stands_for or len(spec.shape) not in (2, 3):
        return False
    is_linear = len(spec.shape) == 2 and spec.module_kind is ModuleKind.LINEAR
    try:
        found = route_param(spec)
    except RefusedError:  # how it splits is for a rule to say, and no matter here
        return is_linear
    return found.family == "matrix" and (is_linear or (len(spec.shape) == 3 and len(found.matrices) > 1))


def kept_nbytes(spec: ParamSpec, param_gather: ParamGather) -> int:
    """Bytes of what every rank keeps of a param for forward to read, without padding. Nobody takes a master from one that is
    frozen, so it has the values that its codes were made of beside them.

    >>> spec = ParamSpec(fqn="a.weight", shape=(64, 64), dtype=DType.BF16, recipe="mxfp8", codes_nbytes=8448)
    >>> kept_nbytes(spec, "bf16"), kept_nbytes(spec, "quantized"), kept_nbytes(replace(spec, trainable=False), "quantized")
    (8192, 8448, 16640)
    """
    if not spec.recipe or (spec.trainable and param_gather == "bf16"):
        return spec.nbytes
    return spec.codes_nbytes if spec.trainable else spec.codes_nbytes + spec.nbytes


def block_problem(spec: ParamSpec, recipe: Recipe) -> str:
    """Why blocks do not fit a param, with its name; nothing if they do."""
    rows, cols = spec.shape[-2:]
    if rows % recipe.multiple or cols % recipe.multiple:
        return f"{spec.fqn} ({rows} x {cols}, expected multiples of {recipe.multiple}, the length of a block)"
    return ""


def kept_as_codes(
    table: ParamTable, recipe: Recipe, skip: Sequence[str], whose: str, problem_of: Callable[[ParamSpec], str]
) -> list[ParamSpec]:
    """The params that a recipe keeps; one error has all of those that it cannot keep, and `problem_of` says why."""
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r}: expected a list of globs, as in skip=[{skip!r}].")
    for glob in skip:
        if not any(fnmatchcase(name, glob) for name in table.by_name):
            raise ValueError(f"skip={glob!r} matches no param of {whose}." + did_you_mean(glob, table.by_name))
    wanted = [spec for spec in table if is_product(spec) and not any(fnmatchcase(spec.fqn, glob) for glob in skip)]
    if not wanted:
        raise ValueError(
            f"{whose} has no weight to quantise: expected linear layers or stacked experts that a matrix rule manages, in blocks, "
            "and not all of them skipped."
        )
    problems = {spec.fqn: text for spec in wanted if (text := problem_of(spec))}
    if problems:
        raise ValueError(
            f"{recipe.name} cannot keep {listed(list(problems.values()))}. Name what is to stay as it is in skip=, as in "
            f"skip=[{next(iter(problems))!r}]."
        )
    return wanted


def quantized_table(table: ParamTable, recipe: str, skip: Sequence[str] = (), whose: str = "the model") -> ParamTable:
    """The table as `layerwise.quantize()` leaves that of a module: what it would refuse is refused here, in the same words.

    >>> from layerwise.routing.spec import table_of
    >>> [spec.recipe for spec in quantized_table(table_of([("a.weight", (64, 64))]), "mxfp8")]
    ['mxfp8']
    """
    chosen = recipe_named(recipe)

    def problem_of(spec: ParamSpec) -> str:
        if spec.recipe:
            return f"{spec.fqn} (it is quantised by {spec.recipe} already)"
        if spec.dtype is not DType.BF16:
            return f"{spec.fqn} (it is {spec.dtype}, expected bf16)"
        return block_problem(spec, chosen)

    kept = {spec.fqn for spec in kept_as_codes(table, chosen, skip, whose, problem_of)}

    def quantized(spec: ParamSpec) -> ParamSpec:
        return replace(spec, recipe=chosen.name, codes_nbytes=chosen.nbytes(spec.shape))

    return ParamTable(tuple(quantized(spec) if spec.fqn in kept else spec for spec in table))

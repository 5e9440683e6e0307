"""`layerwise inspect MODEL --explain FQN`: which rules were tried for one param, and which one decided.

`--json` prints one object:

    {"fqn": str, "shape": [int], "tried": [{"rule": str, "answer": str}],
     "family": str, "reason": str, "matrices": [[rows, cols]]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from layerwise.cli.exits import OK
from layerwise.cli.folding import counted
from layerwise.errors import ConfigError, Problem
from layerwise.routing.refusals import RefusedError
from layerwise.routing.rules import RouteRule, explain, refuse_fallbacks, route_param, route_params

if TYPE_CHECKING:
    from torch import nn


def show(module: nn.Module, rules: Sequence[RouteRule], name: str, *, as_json: bool, strict: bool) -> int:
    """Which rules were tried for one param. It needs no plan, so it works where routing refuses the model."""
    from layerwise.models.table import param_table

    try:
        table = param_table(module)
        param = table.find(name)
    except KeyError as error:
        raise ConfigError([Problem("--explain", error.args[0])]) from None
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem("routing", str(error))]) from error
    tried = [{"rule": rule, "answer": answer} for rule, answer in explain(param, rules)]
    try:
        with suppress(RefusedError):  # of others, perhaps: the rules are checked against all params
            route_params(table, rules)
        route = route_param(param, rules)
        if strict:
            refuse_fallbacks([param], {param.fqn: route})
    except ValueError as error:
        _print_tried(param.fqn, param.shape, tried)
        raise ConfigError([Problem("routing", str(error))]) from error
    matrices = [matrix.logical_shape for matrix in route.matrices]
    if as_json:
        found = {"fqn": param.fqn, "shape": param.shape, "tried": tried}
        print(json.dumps({**found, "family": route.family, "reason": route.reason, "matrices": matrices}))
        return OK
    _print_tried(param.fqn, param.shape, tried)
    words = counted([f"{rows}x{cols}" for rows, cols in matrices])
    print(f"-> {route.family}{f', matrices: {words}' if words else ''}: {route.reason}")
    return OK


def _print_tried(fqn: str, shape: Sequence[int], tried: Sequence[Mapping[str, str]]) -> None:
    from layerwise.cli.console import print_table

    title = f"{fqn} {'x'.join(map(str, shape))}: the rules in order, the first that matches decides"
    print_table(title, ("rule", "answer"), [(step["rule"], step["answer"]) for step in tried])

"""`layerwise inspect MODEL --trace`: what following the forward shows of every param, beside what routing says.

`--json` prints one object:

    {"problem": str,                             why the forward could not be followed to its end; empty if it was
     "params": [{"fqn": str, "shape": [int],
                 "role": str,                    "map", "router", "head", "table", "added", "grouped", "input", "vector", "unseen"
                 "family": "matrix" | "other" | "",
                 "matrices": [[rows, cols]], "why": str,
                 "routing": "agrees" | "differs" | "refused" | "unseen"}],
     "rules": str}                               TOML that makes routing say what was seen, where it is silent or wrong
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.cli.exits import OK
from layerwise.cli.folding import counted, fold
from layerwise.cli.models import ModelKind, ModelSource, functions_inputs
from layerwise.errors import ConfigError, Problem
from layerwise.routing.compare import NOT_ROUTED, Disagreement, agrees, routes_and_refused, rules_for
from layerwise.routing.files import rules_to_toml
from layerwise.routing.matrices import matrices_of
from layerwise.routing.readings import Reading, Role
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import ParamSpec, ParamTable

if TYPE_CHECKING:
    from torch import nn

    from layerwise.models.forward.trace import Trace


@dataclass(frozen=True, slots=True)
class SeenRow:
    """A param, what was seen of it, and whether routing says the same."""

    param: ParamSpec
    reading: Reading
    routing: str

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        if self.reading.family != "matrix":
            return ()
        return tuple(matrix.logical_shape for matrix in matrices_of(self.param, self.reading.split))

    def to_json(self) -> dict[str, object]:
        return {
            "fqn": self.param.fqn,
            "shape": self.param.shape,
            "role": str(self.reading.role),
            "family": self.reading.family,
            "matrices": self.matrices,
            "why": self.reading.why,
            "routing": self.routing,
        }


def follow(module: nn.Module, source: ModelSource) -> Trace:
    """Follow a model's forward: on inputs from its config, of the trainer, or those that the user's code has."""
    from layerwise.models.forward.parts import trace_model
    from layerwise.models.forward.trace import trace

    match source.kind:
        case ModelKind.TRAINER:
            import torch

            return trace(module, (torch.zeros(2, 16, dtype=torch.long),))
        case ModelKind.FUNCTION:
            args, kwargs = functions_inputs(source.word, module)
            return trace(module, args, kwargs)
        case _:
            return trace_model(module)


def show(module: nn.Module, source: ModelSource, rules: Sequence[RouteRule], *, as_json: bool) -> int:
    """Print what was seen and return the exit code."""
    from layerwise.models.table import param_table

    table = param_table(module)
    found = follow(module, source)
    rows = rows_of(table, rules, found)
    wrong = [row for row in rows if row.routing in ("differs", "refused")]
    toml = rules_to_toml(rules_for([Disagreement(row.param, NOT_ROUTED, row.reading) for row in wrong], table.by_name))
    if as_json:
        print(json.dumps({"problem": found.problem, "params": [row.to_json() for row in rows], "rules": toml}))
        return OK
    _print(rows, found.problem, toml)
    return OK


def rows_of(table: ParamTable, rules: Sequence[RouteRule], found: Trace) -> list[SeenRow]:
    """Every trainable param of two or more dims, in model order."""
    try:
        routes, refused = routes_and_refused(table, rules)
    except ValueError as error:
        raise ConfigError([Problem("routing", str(error))]) from error
    rows = []
    for param in table:
        reading = found.readings.get(param.fqn)
        if reading is None or not param.trainable:
            continue
        if reading.role is Role.UNSEEN:
            said = "refused" if param.fqn in refused else "unseen"
            rows.append(SeenRow(param, reading, "unseen" if said == "refused" else said))
        elif param.fqn in refused:
            rows.append(SeenRow(param, reading, "refused"))
        else:
            is_right = agrees(param, routes[param.fqn], reading) or routes[param.fqn].rule > 0
            rows.append(SeenRow(param, reading, "agrees" if is_right else "differs"))
    return rows


def _print(rows: Sequence[SeenRow], problem: str, toml: str) -> None:
    from layerwise.cli.console import print_table

    kinds = [(row.param.shape, row.reading, row.routing) for row in rows]
    cells = []
    for name, positions in fold([row.param.fqn for row in rows], kinds):
        row = rows[positions[0]]
        shapes = counted([f"{height}x{width}" for height, width in row.matrices])
        cells.append((name, "x".join(map(str, row.param.shape)), row.routing, shapes or "-", row.reading.why))
    kinds_of = Counter(row.routing for row in rows)
    counts = ", ".join(f"{count} {'agree' if kind == 'agrees' else kind}" for kind, count in kinds_of.items())
    print_table(
        f"followed {len(rows)} params: {counts}",
        ("param", "shape", "routing", "matrices", "seen"),
        cells,
        optional=("matrices",),
    )
    if problem:
        print(f"\nthe forward could not be followed to its end: {problem}")
    if toml:
        print(f"\nrules that make routing say what was seen, for --rules FILE:\n\n{toml}", end="")

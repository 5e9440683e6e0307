"""The golden tables: a line for each param of a model, with its route, its matrices and the reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import nn

from layerwise.models.table import param_table
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import route_params

GOLDEN = Path(__file__).parent.parent / "golden" / "routes"


def _matrices(matrices: tuple[Matrix, ...]) -> str:
    """Logical (out, in) shapes, equal ones counted, in order of their first appearance."""
    counts = Counter(matrix.logical_shape for matrix in matrices)
    return " + ".join(f"{count} of {rows}x{cols}" for (rows, cols), count in counts.items()) or "-"


def table_of(model: nn.Module) -> str:
    """One line per param: fqn, shape, family, matrices, reason."""
    params = param_table(model)
    routes = route_params(params)
    rows = [
        (
            param.fqn,
            "x".join(map(str, param.shape)) or "scalar",
            routes[param.fqn].family,
            _matrices(routes[param.fqn].matrices),
            routes[param.fqn].reason,
        )
        for param in params
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) + "\n"
        for row in rows
    )

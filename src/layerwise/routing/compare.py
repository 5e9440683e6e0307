"""What a forward shows against what routing says: where the two differ, and rules that make routing say what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from layerwise.routing.defaults import low_rank
from layerwise.routing.matrices import Matrix, matrices_of
from layerwise.routing.readings import Reading, Readings, Role
from layerwise.routing.refusals import RefusedError, globs, starred
from layerwise.routing.rules import Route, RouteRule, route_params
from layerwise.routing.spec import ParamSpec, ParamTable

NOT_ROUTED = Route(family="other", reason="is refused")
"""Stands for the route of a param that routing refuses, in a `Disagreement`."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A param that routing and the forward read differently."""

    param: ParamSpec
    route: Route
    reading: Reading

    @property
    def sentence(self) -> str:
        """Both readings."""
        shapes = _shapes(self.route.matrices)
        said = f"{self.route.family}{f' ({shapes})' if shapes else ''}, since it {self.route.reason}"
        seen = _shapes(matrices_of(self.param, self.reading.split)) if self.reading.family == "matrix" else ""
        return f"routing says {said}; the forward says {self.reading.family}{f' ({seen})' if seen else ''}: {self.reading.why}"


def _shapes(matrices: Sequence[Matrix], limit: int = 4) -> str:
    words = [f"{rows}x{cols}" for rows, cols in (matrix.logical_shape for matrix in matrices[:limit])]
    return ", ".join(words) + (f" and {len(matrices) - limit} more" if len(matrices) > limit else "")


def compare(params: Iterable[ParamSpec], routes: Mapping[str, Route], readings: Readings) -> list[Disagreement]:
    """Params of which something else was seen than their route says. A user's rule is no reading: it has the last word."""
    found = []
    for param in params:
        route, reading = routes[param.fqn], readings.get(param.fqn)
        if reading is None or reading.role is Role.UNSEEN or route.family == "frozen" or route.rule:
            continue
        if not agrees(param, route, reading):
            found.append(Disagreement(param, route, reading))
    return found


def routes_and_refused(table: ParamTable, rules: Sequence[RouteRule]) -> tuple[Mapping[str, Route], set[str]]:
    """Routes by fqn, and the fqns of params that routing refuses, which have no route. Other errors of a rule are raised."""
    try:
        return route_params(table, rules), set()
    except RefusedError as error:
        refused = {param.fqn for param in error.params}
        return route_params(ParamTable(tuple(p for p in table if p.fqn not in refused)), rules), refused


def agrees(param: ParamSpec, route: Route, reading: Reading) -> bool:
    """Whether a route is what was seen: the same family, and the same matrices."""
    if low_rank(param) is not None:  # a choice, which no forward could show to be wrong
        return True
    seen = matrices_of(param, reading.split) if reading.family == "matrix" else ()
    if route.family == "other" and seen and all(min(matrix.rows, matrix.cols) == 1 for matrix in seen):
        return True  # a map onto one number is a vector, and routed as one
    if route.family != reading.family:
        return False
    return route.family != "matrix" or _elements(route.matrices) == _elements(seen)


def _elements(matrices: Sequence[Matrix]) -> set[tuple[object, ...]]:
    """Which elements make up each matrix, and which way round. A vector among them has no way round."""
    return {(matrix.grid, matrix.box, matrix.transposed and min(matrix.rows, matrix.cols) > 1) for matrix in matrices}


def rules_for(disagreements: Sequence[Disagreement], others: Iterable[str] = ()) -> list[RouteRule]:
    """Rules that make routing say what was seen, one for all layers of a kind; none of them matches one of the `others`."""
    groups: dict[tuple[object, ...], list[Disagreement]] = {}
    for item in disagreements:
        split = item.reading.split if item.reading.family == "matrix" else None
        groups.setdefault((starred(item.param.fqn), item.reading.family, split), []).append(item)
    patterns = globs([[item.param.fqn for item in items] for items in groups.values()], others)
    return [
        RouteRule(pattern=pattern, to="matrix", split=items[0].reading.split)
        if family == "matrix"
        else RouteRule(pattern=pattern, to="other")
        for ((_, family, _), items), found in zip(groups.items(), patterns, strict=True)
        for pattern, _ in found
    ]

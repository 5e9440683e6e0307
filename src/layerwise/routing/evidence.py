"""Routing with more to go by than types and names: rules and files of the user, a forward that was followed, recorded routes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from os.path import isfile
from typing import Any

from layerwise.routing.defaults import low_rank
from layerwise.routing.files import read_rules
from layerwise.routing.matrices import matrices_of
from layerwise.routing.readings import Readings, Role
from layerwise.routing.record import Recorded, is_recorded, read_routing
from layerwise.routing.rules import Route, RouteRule, route_params
from layerwise.routing.spec import ParamSpec, ParamTable

RulesArgument = Sequence[RouteRule | str | PathLike[str]] | str | PathLike[str] | None
"""Type of `rules=`; `rules_and_evidence` reads it."""


@dataclass(frozen=True)
class Evidence:
    """What else is known about the params of a model."""

    readings: Readings = field(default_factory=dict)
    """Params by fqn as the forward uses them."""
    recorded: Recorded | None = None
    """Routes of a file. They must be of this model, and come before the readings."""

    def route_of(self, param: ParamSpec) -> Route | None:
        """The route of what was seen of a param; None where nothing was."""
        reading = self.readings.get(param.fqn)
        if reading is None or reading.role is Role.UNSEEN or low_rank(param) is not None:
            return None
        reason = f"was followed in the forward: {reading.why}"
        if reading.role is not Role.MAP:
            return Route(family="other", reason=reason)
        return Route(family="matrix", reason=reason, matrices=matrices_of(param, reading.split), split=reading.split)


def route_by(
    table: ParamTable,
    rules: Sequence[RouteRule] | None,
    *,
    strict: bool = False,
    evidence: Evidence | None = None,
    elsewhere: Collection[str] = (),
) -> Mapping[str, Route]:
    """A route for every param. Rules of the user come first, then a recorded routing, or the readings of a forward."""
    if evidence is None:
        return route_params(table, rules, strict=strict, elsewhere=elsewhere)
    if evidence.recorded is not None:
        evidence.recorded.check(table)
        return route_params(table, rules, strict=strict, decide=evidence.recorded.route, elsewhere=elsewhere)
    return route_params(table, rules, strict=strict, decide=evidence.route_of, elsewhere=elsewhere)


def rules_and_evidence(given: object) -> tuple[Any, Evidence | None]:
    """Read the files that are named in `rules=`: a list of rules (None for none), and the recorded routing that comes after them.

    `given` is a list of `RouteRule`s and of paths, or one path, or None. A file holds either [[rule]] tables, which take the
    place of the path, or a routing that `layerwise inspect --record` wrote, which comes last. Other values are returned for
    `route_params` to refuse.
    """
    if isinstance(given, str | PathLike):
        given = [given]
    if not isinstance(given, list | tuple):
        return given, None
    rules: list[object] = []
    for number, item in enumerate(given, start=1):
        if not isinstance(item, str | PathLike):
            rules.append(item)
            continue
        path = fspath(item)
        if not isfile(path):
            raise ValueError(
                f"rules holds {path!r}, and there is no such file: expected layerwise.RouteRule(...), or the path of a file with [[rule]] "
                "tables or of a recorded routing."
            )
        if not is_recorded(path):
            rules += read_rules(path)
        elif number == len(given):
            return rules, Evidence(recorded=read_routing(path))
        else:
            raise ValueError(
                f"the recorded routing {path!r} is entry {number} of {len(given)} in rules: it decides about every param that is left, so "
                "nothing comes after it. Put it last."
            )
    return rules, None

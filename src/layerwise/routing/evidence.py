"""Routing with more to go by than types and names: a forward that was followed, or routes that were recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from layerwise.routing.compare import Disagreement, compare
from layerwise.routing.defaults import low_rank
from layerwise.routing.matrices import matrices_of
from layerwise.routing.readings import Readings, Role
from layerwise.routing.record import Recorded
from layerwise.routing.refusals import RefusedError, fold_refusals, starred
from layerwise.routing.rules import Route, RouteRule, route_params
from layerwise.routing.spec import ParamSpec, ParamTable


@dataclass(frozen=True)
class Evidence:
    """What else is known about the params of a model."""

    readings: Readings = field(default_factory=dict)
    """What its forward shows."""
    decides: bool = False
    """The readings decide. Otherwise routes that differ from them are refused."""
    recorded: Recorded | None = None
    """Routes that a file holds. They decide."""

    def route_of(self, param: ParamSpec) -> Route | None:
        """The route of what was seen of a param; None where nothing was."""
        reading = self.readings.get(param.fqn)
        if reading is None or reading.role is Role.UNSEEN or low_rank(param) is not None:
            return None
        reason = f"was followed in the forward: {reading.why}"
        if reading.role is not Role.MAP:
            return Route(family="other", reason=reason)
        return Route(family="matrix", reason=reason, matrices=matrices_of(param, reading.split), split=reading.split)


class DisagreementError(ValueError):
    """Routing and the forward read params differently. Both readings, and what to do."""

    def __init__(self, disagreements: Sequence[Disagreement]) -> None:
        self.disagreements = tuple(disagreements)
        folded: dict[tuple[str, str], list[Disagreement]] = {}
        for item in disagreements:
            folded.setdefault((starred(item.param.fqn), item.sentence), []).append(item)
        lines = [
            f"  {f'{len(items)} params {name!r}' if len(items) > 1 else f'param {items[0].param.fqn!r}'} of shape "
            f"{items[0].param.shape}: {sentence}"
            for (name, sentence), items in folded.items()
        ]
        super().__init__(
            f"routing and the forward read {len(disagreements)} params differently:\n"
            + "\n".join(lines)
            + "\nPass routing='trace' to go by the forward, or a RouteRule for each to say what it is."
        )


def route_by(
    table: ParamTable,
    rules: Sequence[RouteRule] | None,
    *,
    strict: bool = False,
    evidence: Evidence | None = None,
    elsewhere: Collection[str] = (),
) -> Mapping[str, Route]:
    """A route for every param. A user's rules come first, always; then what was recorded, or seen if that is to decide."""
    if evidence is None:
        return route_params(table, rules, strict=strict, elsewhere=elsewhere)
    if evidence.recorded is not None:
        evidence.recorded.check(table)
        return route_params(table, rules, strict=strict, decide=evidence.recorded.route, elsewhere=elsewhere)
    decide = evidence.route_of if evidence.decides else None
    try:
        routes = route_params(table, rules, strict=strict, decide=decide, elsewhere=elsewhere)
    except RefusedError as error:
        raise RefusedError(fold_refusals(error.params, evidence.readings, table.by_name)) from None
    differ = [] if evidence.decides else compare(table, routes, evidence.readings)
    if differ:
        raise DisagreementError(differ)
    return routes

"""Routing: an ordered list of rules, first match wins, every answer with its reason. The only place that decides what a
matrix rule manages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from layerwise.config.habits import OF_ROUTE_RULE, understands
from layerwise.config.rules import plain_option
from layerwise.errors import did_you_mean, listed
from layerwise.routing.defaults import DEFAULT_RULES, Family
from layerwise.routing.matrices import Matrix, default_split, matrices_of
from layerwise.routing.refusals import RefusedError, fold_refusals
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import Split, is_size, row_blocks, stack, whole

_SUSPICIOUS_SHARE = 0.1
"""Below this share of trainable elements under the matrix rule, a model is probably not routed as its user thinks."""


@understands(OF_ROUTE_RULE, in_order=("pattern", "to"))
@dataclass(frozen=True, kw_only=True)
class RouteRule:
    """A user's routing rule: params that match `pattern`, `module_type` and `when` go to `to`, with `options` over the
    rule's own. At least one of the three is given; of several rules the first that matches decides.

    >>> RouteRule(pattern="*.router.weight", to="other", options={"lr": 1e-4}).to
    'other'

    Args:
        to: "matrix" for the optimizer's `matrix=` rule, "other" for its `other=` rule. No default: that is what the rule says.
        pattern: glob on the fully qualified name of a param, such as "*.router.weight"; None takes any.
        module_type: glob on the class name of the module that holds the param; None takes any.
        when: predicate on the `ParamSpec`, all that is known about a param; None takes any.
        options: overrides for fields of the update rule, such as {"lr": 1e-4}: the matched params get a param group of their own.
        row_blocks: rows of each block of a fused weight, for `to="matrix"`: each block is a matrix. () does not cut.
        split: a `Split` that says how each matched param breaks into matrices, for `to="matrix"`; "whole" says that it does not;
            None leaves it to the module and the defaults.
    """

    to: Literal["matrix", "other"]
    pattern: str | None = None
    module_type: str | None = None
    when: Callable[[ParamSpec], bool] | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    row_blocks: tuple[int, ...] = ()
    split: Split | Literal["whole"] | None = None

    def __post_init__(self) -> None:
        if self.to not in ("matrix", "other"):
            raise ValueError(f"route rule {self.label}: to must be 'matrix' or 'other', got {self.to!r}.")
        for name in ("pattern", "module_type"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"route rule: {name} must be a glob, got {getattr(self, name)!r}.")
        if self.when is not None and not callable(self.when):
            raise TypeError(f"route rule: when must be a function of a ParamSpec, got {self.when!r}.")
        if not isinstance(self.options, Mapping):
            raise TypeError(
                f"route rule {self.label}: options must be a dict such as {{'lr': 1e-4}}, got {self.options!r}."
            )
        if not isinstance(self.row_blocks, list | tuple) or not all(map(is_size, self.row_blocks)):
            raise TypeError(
                f"route rule {self.label}: row_blocks must be whole numbers of rows, got {self.row_blocks!r}."
            )
        if self.pattern == "" or self.module_type == "":
            raise ValueError(
                "a route rule has an empty pattern: expected a glob on param names, such as '*.router.weight'."
            )
        if self.pattern is None and self.module_type is None and self.when is None:
            raise ValueError("a route rule has nothing to match by: give it a pattern, a module_type or a predicate.")
        if self.split is not None and self.split != "whole" and not isinstance(self.split, Split):
            raise TypeError(f"route rule {self.label}: split must be a layerwise.Split or 'whole', got {self.split!r}.")
        if self.row_blocks and self.split is not None:
            raise ValueError(f"route rule {self.label}: give row_blocks or split, not both.")
        if (self.row_blocks or self.split is not None) and self.to != "matrix":
            which = f"row_blocks={self.row_blocks}" if self.row_blocks else f"split={self.split!r}"
            raise ValueError(f"route rule {self.label}: {which} only makes sense with to='matrix'.")

    @property
    def label(self) -> str:
        """What the rule looks for, in a few words."""
        found = [repr(self.pattern)] if self.pattern is not None else []
        if self.module_type is not None:
            found.append(f"module {self.module_type!r}")
        if self.when is not None:
            found.append(f"when {getattr(self.when, '__name__', repr(self.when))}")
        return " and ".join(found) or "(no pattern)"

    def matches(self, param: ParamSpec) -> bool:
        names = (param.fqn, *param.aliases)
        if self.pattern is not None and not any(fnmatchcase(name, self.pattern) for name in names):
            return False
        if self.module_type is not None and not fnmatchcase(param.module_type, self.module_type):
            return False
        return self.when is None or bool(self.when(param))

    def split_for(self, param: ParamSpec) -> Split | None:
        """How this rule breaks the param up: its own word, or else the module's."""
        if self.row_blocks:
            if len(param.shape) == 3 and param.module_kind is not ModuleKind.CONV:
                return stack(param.shape, sizes=self.row_blocks)
            return row_blocks(param.shape, self.row_blocks)
        if self.split == "whole":
            return whole(param.shape)
        return self.split if isinstance(self.split, Split) else param.split


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a param goes, and why."""

    family: Family
    reason: str
    matrices: tuple[Matrix, ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    """Per-rule overrides, sorted by name."""
    rule: int = 0
    """Number of the user's rule that decided, from 1 on; 0 for the defaults."""
    is_fallback: bool = False
    """Only a last-resort rule took it."""
    split: Split | None = None
    """How its matrices lie in it."""


Decider = Callable[[ParamSpec], Route | None]
"""Says where a param goes, or None to leave it to the defaults."""


def _user_route(rule: RouteRule, number: int, param: ParamSpec) -> Route:
    reason = f"matches the user's rule {number} ({rule.label})"
    options = tuple(sorted((name, plain_option(value)) for name, value in rule.options.items()))
    if rule.to == "other":
        return Route(family="other", reason=reason, options=options, rule=number)
    try:
        split = rule.split_for(param)
        return Route(
            family="matrix",
            reason=_with_split(reason, split),
            matrices=matrices_of(param, split),
            options=options,
            rule=number,
            split=split or default_split(param),
        )
    except ValueError as error:
        raise ValueError(f"route rule {number} ({rule.label}) for param {param.fqn!r}: {error}") from None


def _with_split(reason: str, split: Split | None) -> str:
    words = split.describe() if split is not None else ""
    if split is None or not words:
        return reason
    return f"{reason}, {words}" if split.is_whole else f"{reason}, in {words}"


def _default_route(param: ParamSpec) -> Route | None:
    """Where the defaults send a param; None where nobody says how it splits, and guessing would be worse."""
    rule, reason = next((rule, reason) for rule in DEFAULT_RULES if (reason := rule.applies(param)) is not None)
    if rule.family != "matrix":
        return Route(family=rule.family, reason=reason, is_fallback=rule.is_fallback)
    if param.split is None and (param.misfit or param.looks_fused):
        return None
    return Route(
        family="matrix",
        reason=_with_split(reason, param.split),
        matrices=matrices_of(param, param.split),
        is_fallback=rule.is_fallback,
        split=param.split or default_split(param),
    )


def _checked(rules: object) -> tuple[RouteRule, ...]:
    if rules is None:
        return ()
    if not isinstance(rules, list | tuple) or not all(isinstance(rule, RouteRule) for rule in rules):
        raise TypeError(f"rules must be a list of layerwise.RouteRule, or the path of a rules file, got {rules!r}.")
    return tuple(rules)


def route_params(
    table: ParamTable,
    rules: Sequence[RouteRule] | None = None,
    *,
    strict: bool = False,
    decide: Decider | None = None,
    elsewhere: Collection[str] = (),
) -> dict[str, Route]:
    """A route for every param: the user's rules first, then `decide`, then the defaults. A user's rule that matches nothing
    is an error, unless what it looks for is `elsewhere`: it was meant for something. With `strict`, so is a param of two or more
    dims that only a fallback took."""
    rules = _checked(rules)
    unmatched = dict(enumerate(rules, start=1))
    routes: dict[str, Route] = {}
    refused = []
    for param in table:
        hit = _hit(param, rules)
        if hit is not None:
            unmatched.pop(hit[0], None)
        route = _route(param, hit, decide)
        if route is None:
            refused.append(param)
        else:
            routes[param.fqn] = route
    unmatched = {number: rule for number, rule in unmatched.items() if rule.label not in elsewhere}
    if unmatched:
        raise ValueError(_never_matched(unmatched, rules, table))
    if refused:
        raise RefusedError(fold_refusals(refused, others=routes))
    if strict:
        refuse_fallbacks(table, routes)
    return routes


def rules_in_use(table: ParamTable, rules: Sequence[RouteRule] | None) -> set[str]:
    """What the rules look for that decide about a param here."""
    checked = _checked(rules)
    hits = (_hit(param, checked) for param in table)
    return {hit[1].label for hit in hits if hit is not None}


def route_param(param: ParamSpec, rules: Sequence[RouteRule] | None = None) -> Route:
    """The route of one param, whatever becomes of the others of its model."""
    route = _route(param, _hit(param, _checked(rules)))
    if route is None:
        raise RefusedError(fold_refusals([param]))
    return route


def _hit(param: ParamSpec, rules: Sequence[RouteRule]) -> tuple[int, RouteRule] | None:
    """The first rule of the user that matches, and its number."""
    return next(((number, rule) for number, rule in enumerate(rules, start=1) if rule.matches(param)), None)


def _route(param: ParamSpec, hit: tuple[int, RouteRule] | None, decide: Decider | None = None) -> Route | None:
    if not param.trainable:
        return Route(family="frozen", reason="does not require a gradient")
    if hit is not None:
        return _user_route(hit[1], hit[0], param)
    decided = decide(param) if decide is not None else None
    return decided if decided is not None else _default_route(param)


def refuse_fallbacks(table: Iterable[ParamSpec], routes: Mapping[str, Route]) -> None:
    """Raise for params of two or more dims that only a fallback took."""
    caught = [param for param in table if len(param.shape) >= 2 and routes[param.fqn].is_fallback]
    if caught:
        first = caught[0]
        raise ValueError(
            f"strict routing: {len(caught)} param{'s' if len(caught) != 1 else ''} with two or more dims went by a fallback: "
            f"{listed([param.fqn for param in caught])}. The first {routes[first.fqn].reason} and would go to "
            f"{routes[first.fqn].family!r}. Add a RouteRule for each."
        )


def suspicion(routes: Mapping[str, Route], table: ParamTable) -> str | None:
    """A sentence if so little is under the matrix rule that something probably went wrong, or None."""
    total = sum(param.numel for param in table if routes[param.fqn].family != "frozen")
    own = {fqn for fqn, route in routes.items() if route.rule}  # as the user said: nothing went wrong there
    others = [
        param
        for param in table
        if routes[param.fqn].family == "other" and len(param.shape) >= 2 and param.fqn not in own
    ]
    matrix = sum(param.numel for param in table if routes[param.fqn].family == "matrix")
    if not others or matrix >= _SUSPICIOUS_SHARE * total:
        return None
    largest = sorted(others, key=lambda param: (-param.numel, param.fqn))
    return (
        f"only {100 * matrix / total:.1f} % of the trainable elements are under the matrix rule. The largest that are not: "
        + "; ".join(f"{param.fqn!r} {routes[param.fqn].reason}" for param in largest[:3])
        + ". See `layerwise inspect` or optimizer.plan.route(name).reason."
    )


def _never_matched(unmatched: Mapping[int, RouteRule], rules: Sequence[RouteRule], table: ParamTable) -> str:
    number, rule = next(iter(unmatched.items()))
    shadowing = [
        earlier
        for earlier, other in enumerate(rules[: number - 1], start=1)
        if any(other.matches(p) and rule.matches(p) for p in table)
    ]
    if shadowing:
        return (
            f"route rule {number} ({rule.label}) never applies: every param it matches is taken by earlier rules, first rule {shadowing[0]} "
            f"({rules[shadowing[0] - 1].label}). Reorder the rules or remove one."
        )
    return f"route rule {number} ({rule.label}) matches no param." + did_you_mean(rule.pattern or "", table.by_name)


def explain(param: ParamSpec, rules: Sequence[RouteRule] | None = None) -> Iterable[tuple[str, str]]:
    """The rules tried for a param, in order, each with what it said; ends with the one that matched."""
    if not param.trainable:
        yield "frozen params", "matched: does not require a gradient"
        return
    for number, rule in enumerate(rules or (), start=1):
        if rule.matches(param):
            yield f"user rule {number} {rule.label}", f"matched: goes to {rule.to}"
            return
        yield f"user rule {number} {rule.label}", "no match"
    for default in DEFAULT_RULES:
        reason = default.applies(param)
        if reason is not None:
            yield default.name, f"matched: {reason}; goes to {default.family}"
            return
        yield default.name, "no match"


def summarise(routes: Mapping[str, Route], table: ParamTable) -> str:
    """One line: how many params and elements each family has, and which 2-D params are not under the matrix rule."""
    parts = []
    for family in ("matrix", "other", "frozen"):
        members = [param for param in table if routes[param.fqn].family == family]
        if members:
            count = f"{len(members)} param{'s' if len(members) != 1 else ''}"
            parts.append(f"{family} {count}, {sum(param.numel for param in members):,} elements")
    aside = [param.fqn for param in table if routes[param.fqn].family == "other" and len(param.shape) >= 2]
    tail = f"; not orthogonalised though 2-D: {listed(aside, 3)}" if aside else ""
    return "; ".join(parts) + tail

"""Routing: an ordered list of rules, first match wins, every answer with its reason. The only place that decides what a
matrix rule manages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from layerwise.errors import did_you_mean, listed
from layerwise.routing.matrices import Matrix, matrices_of
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable

Family = Literal["matrix", "other", "frozen"]

_HEAD_NAMES = frozenset({"lm_head", "head", "output", "unembed", "unembedding", "classifier", "score", "embed_out"})
_TABLE_WORDS = ("embed", "pos", "token")


@dataclass(frozen=True, kw_only=True)
class RouteRule:
    """A user's routing rule: params whose fqn matches `pattern` (a glob) go to `to`, with `options` over the rule's
    own.

    >>> RouteRule(pattern="*.router.weight", to="other", options={"lr": 1e-4}).to
    'other'
    """

    pattern: str
    to: Literal["matrix", "other"]
    options: Mapping[str, object] = field(default_factory=dict)
    """Overrides for the fields of the rule that updates the matched params: lr, weight_decay, ns_dtype ..."""
    row_blocks: tuple[int, ...] = ()
    """Row blocks of a fused weight, for `to="matrix"`."""

    def __post_init__(self) -> None:
        if self.to not in ("matrix", "other"):
            raise ValueError(f"route rule {self.pattern!r}: to must be 'matrix' or 'other', got {self.to!r}.")
        if not self.pattern:
            raise ValueError(
                "a route rule has an empty pattern: expected a glob on param names, such as '*.router.weight'."
            )
        if self.row_blocks and self.to != "matrix":
            raise ValueError(
                f"route rule {self.pattern!r}: row_blocks={self.row_blocks} only makes sense with to='matrix'."
            )

    def matches(self, param: ParamSpec) -> bool:
        return any(fnmatchcase(name, self.pattern) for name in (param.fqn, *param.aliases))


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where a param goes, and why."""

    family: Family
    reason: str
    matrices: tuple[Matrix, ...] = ()
    options: tuple[tuple[str, object], ...] = ()
    """Per-rule overrides, sorted by name."""


@dataclass(frozen=True, slots=True)
class _Default:
    """A default rule: its name, and a function that says yes with a reason or None."""

    name: str
    family: Family
    applies: Callable[[ParamSpec], str | None]


def _frozen(param: ParamSpec) -> str | None:
    return None if param.trainable else "does not require a gradient"


def _too_small(param: ParamSpec) -> str | None:
    if param.numel == 0:
        return "has no elements"
    if len(param.shape) == 0:
        return "is a scalar"
    return "is a vector (bias, norm or gate), not a matrix" if len(param.shape) == 1 else None


def _embedding(param: ParamSpec) -> str | None:
    if param.module_kind is ModuleKind.EMBEDDING or ModuleKind.EMBEDDING in param.alias_kinds:
        tied = f", tied to {param.aliases[0]!r}" if param.aliases else ""
        return f"is an embedding table ({param.module_type}{tied}): its rows are looked up, not multiplied"
    return None


def _norm(param: ParamSpec) -> str | None:
    return f"belongs to a normalisation layer ({param.module_type})" if param.module_kind is ModuleKind.NORM else None


def _head(param: ParamSpec) -> str | None:
    if param.maps_to_vocabulary:
        return "is an output head: a linear layer onto the rows of an embedding"
    holder = param.fqn.split(".")[-2] if "." in param.fqn else ""
    if param.module_kind is ModuleKind.LINEAR and holder in _HEAD_NAMES:
        return f"is an output head, going by its name {holder!r}"
    return None


def _grouped_conv(param: ParamSpec) -> str | None:
    if param.module_kind is ModuleKind.CONV and param.conv_groups > 1:
        return f"is a convolution in {param.conv_groups} groups: its rows belong to different inputs"
    return None


def _linear(param: ParamSpec) -> str | None:
    return f"is the weight of a {param.module_type}" if param.module_kind is ModuleKind.LINEAR else None


def _conv(param: ParamSpec) -> str | None:
    return "is a convolution, flattened to rows x (columns * kernel)" if param.module_kind is ModuleKind.CONV else None


def _stack(param: ParamSpec) -> str | None:
    return f"is a stack of {param.shape[0]} matrices (experts)" if len(param.shape) == 3 else None


def _table_by_name(param: ParamSpec) -> str | None:
    leaf = param.fqn.rsplit(".", 1)[-1]
    word = next((word for word in _TABLE_WORDS if word in leaf), None)
    return f"looks like a table by its name ({word!r} in {leaf!r})" if word else None


def _bare_matrix(param: ParamSpec) -> str | None:
    return f"is a 2-D param held directly by {param.module_type or 'a module'}" if len(param.shape) == 2 else None


DEFAULT_RULES: tuple[_Default, ...] = (
    _Default("scalars and vectors", "other", _too_small),
    _Default("embeddings", "other", _embedding),
    _Default("norms", "other", _norm),
    _Default("output heads", "other", _head),
    _Default("grouped convolutions", "other", _grouped_conv),
    _Default("linear layers", "matrix", _linear),
    _Default("convolutions", "matrix", _conv),
    _Default("stacks", "matrix", _stack),
    _Default("tables by name", "other", _table_by_name),
    _Default("bare matrices", "matrix", _bare_matrix),
    _Default("everything else", "other", lambda param: f"has {len(param.shape)} dims, which no matrix rule covers"),
)


def _user_route(rule: RouteRule, number: int, param: ParamSpec) -> Route:
    reason = f"matches the user's rule {number} ({rule.pattern!r})"
    matrices = matrices_of(param, rule.row_blocks or param.row_blocks) if rule.to == "matrix" else ()
    return Route(family=rule.to, reason=reason, matrices=matrices, options=tuple(sorted(rule.options.items())))


def _default_route(param: ParamSpec) -> Route:
    for rule in DEFAULT_RULES:
        reason = rule.applies(param)
        if reason is not None:
            if rule.family == "matrix":
                matrices = matrices_of(param, param.row_blocks)
                if param.row_blocks:
                    reason += f", in row blocks of {', '.join(map(str, param.row_blocks))}"
                return Route(family="matrix", reason=reason, matrices=matrices)
            return Route(family=rule.family, reason=reason)
    raise AssertionError("the last default rule takes every param")


def _checked(rules: object) -> tuple[RouteRule, ...]:
    if rules is None:
        return ()
    if not isinstance(rules, list | tuple) or not all(isinstance(rule, RouteRule) for rule in rules):
        raise TypeError(f"rules must be a list of layerwise.RouteRule, got {rules!r}.")
    return tuple(rules)


def route_params(table: ParamTable, rules: Sequence[RouteRule] | None = None) -> dict[str, Route]:
    """A route for every param. A user's rule that matches nothing is an error: it was meant for something."""
    rules = _checked(rules)
    unmatched = dict(enumerate(rules, start=1))
    routes: dict[str, Route] = {}
    for param in table:
        frozen = _frozen(param)
        hit = next(((number, rule) for number, rule in enumerate(rules, start=1) if rule.matches(param)), None)
        if hit is not None:
            unmatched.pop(hit[0], None)
        if frozen is not None:
            routes[param.fqn] = Route(family="frozen", reason=frozen)
        else:
            routes[param.fqn] = _user_route(hit[1], hit[0], param) if hit is not None else _default_route(param)
    if unmatched:
        raise ValueError(_never_matched(unmatched, rules, table))
    return routes


def _never_matched(unmatched: Mapping[int, RouteRule], rules: Sequence[RouteRule], table: ParamTable) -> str:
    number, rule = next(iter(unmatched.items()))
    shadowing = [
        earlier
        for earlier, other in enumerate(rules[: number - 1], start=1)
        if any(other.matches(p) and rule.matches(p) for p in table)
    ]
    if shadowing:
        return (
            f"route rule {number} ({rule.pattern!r}) never applies: every param it matches is taken by earlier rules, first rule {shadowing[0]} "
            f"({rules[shadowing[0] - 1].pattern!r}). Reorder the rules or remove one."
        )
    return f"route rule {number} ({rule.pattern!r}) matches no param." + did_you_mean(rule.pattern, table.by_name)


def explain(param: ParamSpec, rules: Sequence[RouteRule] | None = None) -> Iterable[tuple[str, str]]:
    """The rules tried for a param, in order, each with what it said; ends with the one that matched."""
    if not param.trainable:
        yield "frozen params", "matched: does not require a gradient"
        return
    for number, rule in enumerate(rules or (), start=1):
        if rule.matches(param):
            yield f"user rule {number} {rule.pattern!r}", f"matched: goes to {rule.to}"
            return
        yield f"user rule {number} {rule.pattern!r}", "no match"
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

"""Param groups: every trainable param with its rule and its live options, in the shape torch's LR schedulers expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from layerwise.config.gone import GONE
from layerwise.config.rules import RULES_BY_KIND, Rule, plain_option, tp_mode_of
from layerwise.errors import StateError, did_you_mean, shown
from layerwise.layout.blocks import count_blocks
from layerwise.layout.plan import Plan
from layerwise.routing.defaults import Family

PLANNED = {
    "ns_dtype": "the exchange was planned with another dtype",
    "tp_mode": "matrices were planned whole, or in blocks",
}
"""Options that a plan was made with, and what was: they stay as they are, in param groups and across state dicts."""


@dataclass(frozen=True)
class GroupPlan:
    """The params that share a rule and its options."""

    name: str
    """"matrix" or "other" for those that go by the optimizer's own rules, "rule 2" for those of the second route rule."""
    rule: Rule
    fqns: tuple[str, ...]

    def as_param_group(self, params: Mapping[str, nn.Parameter]) -> dict[str, object]:
        """The group as torch.optim.Optimizer holds it; the optimizer reads options back from there at every step."""
        return {
            "params": [params[fqn] for fqn in self.fqns],
            "name": self.name,
            "rule": self.rule.kind,
            "fqns": list(self.fqns),
            "param_names": list(self.fqns),  # torch's own word for it, for state dicts whose keys are names
            **self.rule.options(),
        }


def plan_groups(plan: Plan, *, matrix: Rule, other: Rule) -> tuple[GroupPlan, ...]:
    """One group for each family, matrix first, then one for each route rule that has options, in the order of the rules;
    those without params are left out, unless nobody has any. Values of options decide nothing: a schedule per group outlives a change of them."""
    given: dict[str, object] = {"matrix": matrix, "other": other}
    for name, rule in given.items():
        if not isinstance(rule, Rule):
            raise TypeError(f"{name} must be a rule such as {_rule_like(rule, name)}, got {_in_short(rule)}.")
    if other.is_matrix_rule:
        raise ValueError(
            f"other={type(other).__name__}(...) is a matrix rule: it cannot update vectors and embeddings. Use AdamW or Lion, and give "
            f"{type(other).__name__} as matrix=."
        )
    members: dict[tuple[int, Family], list[str]] = {}
    for param in plan.table:
        route = plan.routes[param.fqn]
        if route.family != "frozen":
            members.setdefault((route.rule if route.options else 0, route.family), []).append(param.fqn)
    groups = []
    for (number, family), fqns in sorted(members.items()):
        base = matrix if family == "matrix" else other
        rule = _with_options(base, fqns[0], dict(plan.routes[fqns[0]].options))
        groups.append(GroupPlan(f"rule {number}" if number else family, rule, tuple(fqns)))
    # torch wants one, and a scheduler finds its options there: a pipeline stage may train nothing.
    return tuple(groups) or (GroupPlan("other", other, ()),)


def _rule_like(given: object, name: str) -> str:
    """The rule to write in place of a torch optimizer or of its class: the rule of that name, with the optimizer's options."""
    kind = given if isinstance(given, type) else type(given)
    rule = {rule.__name__: rule for rule in RULES_BY_KIND.values()}.get(kind.__name__)
    if rule is None:
        return f"layerwise.{'Muon' if name == 'matrix' else 'AdamW'}(lr=...)"
    defaults = given.defaults if isinstance(given, torch.optim.Optimizer) else {}
    known = [f"{option}={defaults[option]!r}" for option in rule.option_names() if option in defaults]
    return f"layerwise.{rule.__name__}({', '.join(known) or 'lr=...'})"


def _in_short(given: object) -> str:
    """An optimizer or a class by its name, which says it all; its repr is a wall of text."""
    kind = given if isinstance(given, type) else type(given)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(given, type):
        return f"the class {name}"
    return f"a {name}" if isinstance(given, torch.optim.Optimizer) else shown(given)


def _with_options(rule: Rule, fqn: str, options: dict[str, object]) -> Rule:
    known = set(rule.option_names())
    for name in options:
        if name not in known:
            raise ValueError(
                f"the route rule that matched {fqn!r} sets {name!r}, which {type(rule).__name__} does not have."
                + (f" It is gone: {GONE[name]}." if name in GONE else did_you_mean(name, known))
            )
    try:
        return dataclasses.replace(rule, **options) if options else rule  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"the route rule that matched {fqn!r}: {error}") from None


def uncut(plan: Plan, groups: Iterable[GroupPlan]) -> str | None:
    """A sentence where somebody asked for blocks of tensor parallelism, and none of the params that were meant is cut by it."""
    asked = [group for group in groups if tp_mode_of(group.rule) == "blockwise"]
    names = [group.name for group in asked if not count_blocks(plan.routes[fqn] for fqn in group.fqns)]
    if not names:
        return None
    return (
        f"tp_mode='blockwise' of param group {' and '.join(map(repr, names))} changes nothing: tensor parallelism has cut none of its "
        "matrices, and each is orthogonalised whole."
    )


class Arranged(NamedTuple):
    """What of param groups stays as it was: which there are, in what order, with which params, and what a plan goes by."""

    names: list[str]
    """What each is called, and its rule."""
    fqns: list[tuple[object, ...]]
    """The rule and the params of each, by name."""
    params: list[tuple[nn.Parameter, ...]]
    planned: dict[str, list[object]]

    @classmethod
    def of(cls, groups: Iterable[Mapping[str, Any]]) -> Arranged:
        groups = list(groups)
        return cls(
            [f"{group.get('name')} ({group.get('rule')})" for group in groups],
            [(group.get("rule"), *group.get("fqns", ())) for group in groups],
            [tuple(group["params"]) for group in groups],
            {name: [group.get(name) for group in groups] for name in PLANNED},
        )

    def check(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise if that was changed: a step goes by where params lie, and would update them by the options of others."""
        now = Arranged.of(groups)
        if now.fqns != self.fqns:
            raise StateError(
                f"param groups are {', '.join(now.names) or 'none'}, and were {', '.join(self.names)}: expected the same ones in the same "
                "order. Change their options in place; which params are under which rule is said by rules= of a new Optimizer."
            )
        for name, kept, params in zip(now.names, self.params, now.params, strict=True):
            if len(kept) != len(params) or not all(map(is_, kept, params)):
                raise StateError(
                    f"the params of group {name} were changed after construction: expected the {len(kept)} that it had, in their order. "
                    "Which params are under which rule is said by rules= of a new Optimizer."
                )
        for option, values in now.planned.items():
            if values != self.planned[option]:
                raise StateError(f"{option} was changed after construction: {PLANNED[option]}. Build a new Optimizer.")


def in_words(group: Mapping[str, object]) -> dict[str, str]:
    """The options of a live param group. Its name is no option: a tied weight may be under another rule elsewhere."""
    return {
        name: repr(plain_option(value))
        for name, value in sorted(group.items())
        if name not in ("params", "fqns", "param_names", "name")
    }


def all_in_words(groups: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """The options of all live param groups, each under what a message calls it."""
    return {"groups": [{"label": f"param group {index}", **in_words(group)} for index, group in enumerate(groups)]}


def ties_in_words(
    groups: Iterable[Mapping[str, Any]],
    copies: Mapping[str, Mapping[int, str]],
    stage: int,
    norm_group_of: Mapping[str, str],
) -> dict[str, dict[str, str]]:
    """How each tied weight of a pipeline stage is updated here, by tie; `copies` names its copy on every stage."""
    here = {tie: of_stages[stage] for tie, of_stages in copies.items() if stage in of_stages}
    group_of = {fqn: group for group in groups for fqn in group["fqns"]} if here else {}
    return {tie: {**in_words(group_of[fqn]), "norm group": norm_group_of[fqn]} for tie, fqn in here.items()}


def live_rule(index: int, group: Mapping[str, object]) -> Rule:
    """The rule that the options of a param group make now, whoever put them there; raises if they make none."""
    rule = RULES_BY_KIND[str(group["rule"])]
    names = rule.option_names()
    lacking = [name for name in names if name not in group]
    if lacking:
        raise ValueError(f"param group {index} ({rule.kind}) lacks {', '.join(map(repr, lacking))}.")
    try:
        return rule(**{name: group[name] for name in names})  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"param group {index} ({rule.kind}) is not valid: {error}") from None

"""What update rules mean for a plan: the dtype updates travel in, the collectives of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerwise.config.rules import AdamW, Muon, Rule
from layerwise.dtypes import DType
from layerwise.layout.cost import NewtonSchulz, cost_of
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommSchedule
from layerwise.layout.stats import stats_sizes
from layerwise.layout.wire import wire_dtypes

_FAMILIES = 2
"""Norm groups that an optimizer has without names of its own: matrices, and the others."""

_MUON, _ADAMW = Muon(lr=0.0), AdamW(lr=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The optimizer's two rules. Of their numbers only those count that change bytes or FLOPs: learning rates do not."""

    matrix: Rule = _MUON
    other: Rule = _ADAMW

    def of(self, family: str) -> Rule:
        """The rule of a family's params."""
        return self.matrix if family == "matrix" else self.other

    @property
    def cost(self) -> NewtonSchulz:
        """What a matrix costs under these rules."""
        return cost_of(self.matrix)


def wire_dtypes_for(plan: Plan, rules: Rules) -> dict[tuple[str, int], DType]:
    """How each (domain, cohort) travels under these rules and the options of the plan's routes."""
    matrices = ((fqn, route.options) for fqn, route in plan.routes.items() if route.family == "matrix")
    return wire_dtypes(plan.works, {fqn: _wire_dtype(rules.matrix, options) for fqn, options in matrices})


def _wire_dtype(rule: Rule, options: tuple[tuple[str, object], ...]) -> DType:
    if not options or not rule.is_matrix_rule:  # an element-wise rule sends none, whatever was asked of the others
        return rule.wire_dtype
    return replace(rule, **dict(options)).wire_dtype  # type: ignore[arg-type]


def schedule_for(plan: Plan, rules: Rules) -> CommSchedule:
    """The collectives of one step of an optimizer with these rules and no norm groups of its own, on one pipeline stage."""
    trainable = sum(route.family != "frozen" for route in plan.routes.values())
    return plan.schedule(
        stats_numel=stats_sizes(
            norm_groups=_FAMILIES,
            stages=1,
            ties=0,
            params=trainable,
            parted=sum(len(shard.fqns) for shard in plan.copied_in_parts),
        ).numel,
        wire_dtypes=wire_dtypes_for(plan, rules),
        exchange=rules.matrix.is_matrix_rule,
    )

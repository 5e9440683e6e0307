"""What update rules mean for a plan: the state they keep, the dtype updates travel in, the collectives of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from layerwise.config.rules import AdamW, Muon, Rule
from layerwise.dtypes import DType
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommSchedule

STATE_TENSORS: Mapping[str, int] = {"muon": 1, "normuon": 1, "adamuon": 1, "adamw": 2, "lion": 1}
"""fp32 numbers that each rule keeps for every element it owns: momentum, first and second moment."""

_STATS_OF_STEP = 10
"""Numbers of the statistics vector beside those of every param, for one pipeline stage: two norms, counts of zeros, of
problems and of losses that were and were not scaled, two words of the settings' hash and their squares."""
_STATS_OF_PARAM = 3
"""Whether its gradient came late, was missing or was not finite."""


_MUON, _ADAMW = Muon(lr=0.0), AdamW(lr=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The optimizer's two rules. Of their numbers only those count that change bytes or FLOPs: learning rates do not."""

    matrix: Rule = _MUON
    other: Rule = _ADAMW

    def of(self, family: str) -> Rule:
        """The rule of a family's params."""
        return self.matrix if family == "matrix" else self.other


def home_state_numel(kind: str, rows: int, cols: int) -> int:
    """fp32 numbers that a rule keeps at the home of a matrix of this logical shape."""
    match kind:
        case "normuon":
            return rows
        case "adamuon":
            return rows * cols
        case _:
            return 0


def wire_dtypes(plan: Plan, rules: Rules) -> dict[tuple[str, int], DType]:
    """How each (domain, cohort) travels: in fp32 as soon as one of its matrices needs that, else in bf16."""
    usual = _wire_dtype(rules.matrix, ())
    found = {(work.domain, cohort): usual for work in plan.works for cohort in range(work.num_cohorts)}
    changed = {
        fqn: _wire_dtype(rules.matrix, route.options)
        for fqn, route in plan.routes.items()
        if route.family == "matrix" and route.options
    }
    if not changed:
        return found
    wide = {
        (work.domain, item.cohort)
        for work in plan.works
        for item in work.items
        if changed.get(item.matrix.fqn, usual) is DType.FP32
    }
    return {cohort: DType.FP32 if cohort in wide else DType.BF16 for cohort in found}


def _wire_dtype(rule: Rule, options: tuple[tuple[str, object], ...]) -> DType:
    if not isinstance(rule, Muon):
        return DType.BF16
    return replace(rule, **dict(options)).wire_dtype if options else rule.wire_dtype  # type: ignore[arg-type]


def schedule_for(plan: Plan, rules: Rules) -> CommSchedule:
    """The collectives of one step of an optimizer with these rules and no norm groups of its own."""
    trainable = sum(route.family != "frozen" for route in plan.routes.values())
    return plan.schedule(
        stats_numel=_STATS_OF_STEP + _STATS_OF_PARAM * trainable,
        wire_dtypes=wire_dtypes(plan, rules),
        exchange=rules.matrix.is_matrix_rule,
    )

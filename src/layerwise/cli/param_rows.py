"""The table of `layerwise inspect`: a row for every param of a plan, and sums by update rule.

`--json` prints one object; new keys may be added, these stay:

    {"digest": str, "world": int, "layout": str,
     "params": [{"fqn": str, "aliases": [str], "shape": [int], "dtype": "fp32" | "bf16" | "fp16",
                 "recipe": str,                  "mxfp8" or "blockwise" where it is kept as codes; or ""
                 "family": "matrix" | "other" | "frozen",
                 "rule": str,                    the update rule: "muon", "adamw" ...; "frozen" where there is none
                 "options": {str: value},        what a user's rule changes about it
                 "reason": str,
                 "matrices": [[rows, cols]],     as Newton-Schulz and scale factors see them, (out, in)
                 "homes": [int | "all"],         per matrix the rank that orthogonalises it; "all": every rank its copy
                 "bucket": int | null,
                 "bytes": int}],                 of what every rank keeps of it for forward
     "totals": {"params": int, "elements": int, "bytes": int,
                "rules": {rule: {"params": int, "elements": int, "bytes": int, "matrices": int,
                                 "newton_schulz_flops": int}}},     of one step, over all ranks
     "plan": the whole plan}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerwise.config.resolve import matrix_rule, other_rule
from layerwise.config.rules import Muon, Rule
from layerwise.config.schema import TrainConfig
from layerwise.layout.cost import NewtonSchulz
from layerwise.layout.plan import Plan
from layerwise.layout.quantizing import kept_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRow:
    """One param of the table."""

    fqn: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    recipe: str
    """How its values are kept, where that is as codes."""
    family: str
    rule: str
    options: tuple[tuple[str, object], ...]
    reason: str
    matrices: tuple[tuple[int, int], ...]
    homes: tuple[int | str, ...]
    """Per matrix, the rank that orthogonalises it; -1 where every rank does."""
    bucket: int | None
    numel: int
    nbytes: int
    flops: int
    """Of orthogonalising its matrices once."""

    @property
    def route(self) -> str:
        """The rule and what the user changed about it."""
        changes = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.rule} ({changes})" if changes else self.rule

    def to_json(self) -> dict[str, object]:
        return {
            "fqn": self.fqn,
            "aliases": self.aliases,
            "shape": self.shape,
            "dtype": self.dtype,
            "recipe": self.recipe,
            "family": self.family,
            "rule": self.rule,
            "options": dict(self.options),
            "reason": self.reason,
            "matrices": self.matrices,
            "homes": self.homes,
            "bucket": self.bucket,
            "bytes": self.nbytes,
        }


@dataclass(slots=True)
class RuleTotal:
    """What one update rule has to do."""

    params: int = 0
    elements: int = 0
    nbytes: int = 0
    matrices: int = 0
    flops: int = 0

    def add(self, row: ParamRow) -> None:
        self.params += 1
        self.elements += row.numel
        self.nbytes += row.nbytes
        self.matrices += len(row.matrices)
        self.flops += row.flops

    def to_json(self) -> dict[str, int]:
        return {
            "params": self.params,
            "elements": self.elements,
            "bytes": self.nbytes,
            "matrices": self.matrices,
            "newton_schulz_flops": self.flops,
        }


def rows_of(plan: Plan, config: TrainConfig) -> list[ParamRow]:
    """The table, in model order."""
    rule_by_fqn = _rules_by_fqn(plan, config)
    homes_by_fqn: dict[str, list[int | str]] = {}
    for work in plan.works:
        for item in sorted(work.items, key=lambda item: (item.matrix.fqn, item.matrix.index)):
            homes_by_fqn.setdefault(item.matrix.fqn, []).append(_called(item.homes, work.world))
    rows = []
    for param in plan.table:
        route, rule = plan.routes[param.fqn], rule_by_fqn.get(param.fqn)
        matrices = tuple(matrix.logical_shape for matrix in route.matrices)
        rows.append(
            ParamRow(
                fqn=param.fqn,
                aliases=param.aliases,
                shape=param.shape,
                dtype=str(param.dtype),
                recipe=param.recipe,
                family=route.family,
                rule="frozen" if rule is None else rule.kind,
                options=route.options,
                reason=route.reason,
                matrices=matrices,
                homes=tuple(homes_by_fqn.get(param.fqn, ())),
                bucket=plan.bucket_of.get(param.fqn),
                numel=param.numel,
                nbytes=kept_nbytes(param, plan.options.param_gather),
                flops=sum(count * _flops(rule, *shape) for shape, count in Counter(matrices).items()),
            )
        )
    return rows


def _rules_by_fqn(plan: Plan, config: TrainConfig) -> Mapping[str, Rule]:
    """The update rule of every trainable param, with the options of the user's rules in it."""
    from layerwise.engine.param_groups import plan_groups

    groups = plan_groups(plan, matrix=matrix_rule(config.optim), other=other_rule(config.optim))
    return {fqn: group.rule for group in groups for fqn in group.fqns}


def _flops(rule: Rule | None, rows: int, cols: int) -> int:
    if not isinstance(rule, Muon):  # an element-wise rule may have the matrices too
        return 0
    return NewtonSchulz(steps=rule.steps).flops(rows, cols)


def totals_of(rows: Sequence[ParamRow]) -> dict[str, RuleTotal]:
    """Sums by update rule, in order of appearance."""
    totals: dict[str, RuleTotal] = {}
    for row in rows:
        totals.setdefault(row.rule, RuleTotal()).add(row)
    return totals


def _called(homes: Sequence[int], world: int) -> int | str:
    """Who orthogonalises a matrix: a rank, or all of them; some of them by their numbers."""
    if len(homes) == world:
        return "all"
    return homes[0] if len(homes) == 1 else "+".join(map(str, homes))


def as_json(plan: Plan, rows: Sequence[ParamRow]) -> dict[str, object]:
    """The object that `--json` prints; see the top of this file."""
    return {
        "digest": plan.digest,
        "world": plan.world,
        "layout": plan.layout_label,
        "params": [row.to_json() for row in rows],
        "totals": {
            "params": len(rows),
            "elements": sum(row.numel for row in rows),
            "bytes": sum(row.nbytes for row in rows),
            "rules": {rule: total.to_json() for rule, total in totals_of(rows).items()},
        },
        "plan": plan.to_json(),
    }

"""Layouts of one model side by side: every figure of each, and which one is best.

Nothing is decided here. `layout/plan.py` makes the plans, `planner/choice.py` says which is best, and `column_of` reads a plan, be it
one of several made for a table or that of a model that trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from layerwise.config.layouts import FACTS_BY_LAYOUT
from layerwise.dtypes import DType
from layerwise.layout.options import DEFAULT_OPTIONS, Options
from layerwise.layout.placing import MeshSizes, placements_for
from layerwise.layout.plan import Plan, compare_plans, make_plan
from layerwise.planner.choice import Choice, best_layouts
from layerwise.planner.memory import Memory, lagging_nbytes, worst_memory
from layerwise.planner.rules import Rules, schedule_for
from layerwise.planner.sharded import sharding_hint
from layerwise.planner.timing import Traffic, Work, traffic_of, work_of
from layerwise.routing.rules import suspicion
from layerwise.routing.spec import DENSE, ParamSpec, ParamTable, table_of

SIDE_BY_SIDE = ("flat", "padded", "compact", "replicated")
"""What is compared unless somebody asks for something else."""

_DEFAULT_RULES = Rules()


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One layout of a model, in figures of the rank for which it is worst."""

    layout: str
    """The name of the layout; of a mixture the layouts of its matrices."""
    is_chosen: bool
    """Whether it is the best of the layouts that are compared."""
    memory: Memory
    """Of the rank that holds most."""
    at_most_nbytes: int
    """What it may hold where reductions lag behind backward: more only with `shard_grads`."""
    padding_percent: float
    """Padding over elements of params."""
    buckets: int
    work: Work
    traffic: Traffic

    def to_json(self) -> dict[str, object]:
        return {
            "layout": self.layout,
            "chosen": self.is_chosen,
            "memory_bytes": self.memory.to_json(),
            "memory_at_most_bytes": self.at_most_nbytes,
            "padding_percent": self.padding_percent,
            "buckets": self.buckets,
            "newton_schulz": self.work.to_json(),
            "sent": self.traffic.to_json(),
        }


def column_of(plan: Plan, *, rules: Rules = _DEFAULT_RULES, is_chosen: bool = False) -> Column:
    """The figures of a plan: a planned one, or `model.plan`.

    >>> from layerwise.layout.options import Options
    >>> from layerwise.layout.plan import make_plan
    >>> from layerwise.planner.presets import preset
    >>> column = column_of(make_plan(preset("gpt2"), Options(layout="replicated"), world=8))
    >>> column.traffic.nbytes_by_kind["all_reduce"] > column.memory.grads
    True
    """
    schedule = schedule_for(plan, rules)
    memory = worst_memory(plan, schedule, rules)
    return Column(
        layout=plan.layout_label,
        is_chosen=is_chosen,
        memory=memory,
        at_most_nbytes=memory.total + lagging_nbytes(plan),
        padding_percent=100 * plan.padding_ratio,
        buckets=len(plan.buckets),
        work=work_of(plan, rules),
        traffic=traffic_of(plan, schedule),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all layouts of a comparison have in common."""

    world: int
    worlds: Mapping[str, int] = field(default_factory=dict)
    """Ranks of domains that are smaller than the dense one."""
    options: Options = DEFAULT_OPTIONS
    """All but the layout, which is each of those that are compared, and the cost, which the rules say."""
    rules: Rules = _DEFAULT_RULES
    sizes: MeshSizes | None = None
    """The mesh over which torch cuts the model, if it does."""

    def plans(self, table: ParamTable, layouts: Sequence[str]) -> dict[str, Plan]:
        """The plans of these layouts."""
        options = replace(self.options, cost=self.rules.cost)
        placed = None
        if self.sizes is not None:
            options, placed = replace(options, memory="params"), placements_for(table, self.sizes)
        return compare_plans(table, layouts, options, world=self.world, worlds=self.worlds, placed=placed)

    def mixture(self, table: ParamTable, layouts: Mapping[str, str]) -> Plan:
        """The plan in which each buffer has a layout of its own."""
        options = replace(self.options, cost=self.rules.cost, layout=layouts)
        return make_plan(table, options, world=self.world, worlds=self.worlds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Layouts of one model side by side."""

    table: ParamTable
    setting: Setting
    columns: tuple[Column, ...]
    choices: tuple[Choice, ...]
    """Which layout is best for the matrices of each domain, and why; empty where there is nothing to choose."""
    left_out: Mapping[str, str]
    """Layouts that cannot be combined with the setting, and why."""
    matrices: int
    doubt: str | None
    """What is odd about the routes, as a sentence."""
    hint: str | None
    """What would help a layout that the model does not fit, as a sentence."""


def compare(table: ParamTable, setting: Setting, layouts: Sequence[str] | None = None) -> Comparison:
    """A column for each layout, `None` for the usual ones that the setting allows.

    Of several, the best is marked; where another one is best for each domain, their mixture is, in a column of its own.
    """
    left_out: dict[str, str] = {}
    if setting.sizes is not None:
        layouts = ["flat"]  # there is nothing to choose: params lie as they were cut
    if layouts is None:
        refusals = {layout: _refusal(table, setting, layout) for layout in SIDE_BY_SIDE}
        left_out = {layout: why for layout, why in refusals.items() if why is not None}
        layouts = [layout for layout in SIDE_BY_SIDE if layout not in left_out]
        if not layouts:
            raise ValueError(f"no layout can be combined with these settings. {next(iter(left_out.values()))}")
    plans = setting.plans(table, layouts)
    first = next(iter(plans.values()))
    choices = best_layouts(plans)
    shown = list(plans.values())
    best = {choice.layout for choice in choices}
    marked: Plan | None = None
    if len(best) > 1:
        marked = setting.mixture(table, {choice.buffer: choice.layout for choice in choices})
        shown.append(marked)
    elif best:
        marked = plans[best.pop()]
    elif len(shown) > 1 and all(work.world == 1 for work in first.works):  # layouts differ in nothing
        marked = first
    columns = tuple(column_of(plan, rules=setting.rules, is_chosen=plan is marked) for plan in shown)
    return Comparison(
        table=table,
        setting=setting,
        columns=columns,
        choices=choices,
        left_out=left_out,
        matrices=sum(len(work.items) for work in first.works),
        doubt=suspicion(first.routes, table),
        hint=_expert_hint(first, list(plans)) if setting.sizes is None else sharding_hint(table, setting.sizes),
    )


def _refusal(table: ParamTable, setting: Setting, layout: str) -> str | None:
    """Why a layout cannot be combined with a setting. That does not depend on the model, so the smallest one will do."""
    smallest = table_of([("weight", (2, 2))], dtype=next((param.dtype for param in table), DType.BF16))
    try:
        setting.plans(smallest, [layout])
    except ValueError as error:
        return str(error)
    return None


def _expert_hint(plan: Plan, layouts: Sequence[str]) -> str | None:
    """A sentence where a stack of experts is more than a rank's share of the model, and a layout keeps it whole."""
    whole = [layout for layout, facts in FACTS_BY_LAYOUT.items() if layout in layouts and facts.keeps_params_whole]
    matrices = [param for param in plan.table if plan.routes[param.fqn].family == "matrix" and param.domain == DENSE]
    stacks = [param for param in matrices if len(param.shape) == 3 and len(plan.routes[param.fqn].matrices) > 1]
    if not whole or not stacks:
        return None
    largest: ParamSpec = max(stacks, key=lambda param: param.numel)
    experts, world = largest.shape[0], plan.world
    if largest.numel * world <= sum(param.numel for param in matrices) or math.gcd(experts, world) == 1:
        return None
    return (
        f"{' and '.join(whole)} keep{'s' if len(whole) == 1 else ''} a stack of {experts} experts whole on one rank. Spread "
        f"the experts over ranks first: --ep with a divisor of {math.gcd(experts, world)}."
    )

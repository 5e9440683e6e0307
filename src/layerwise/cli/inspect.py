"""`layerwise inspect MODEL`: any model, planned for any number of ranks, as a table of params. Starts no ranks.

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

and with `--explain FQN`:

    {"fqn": str, "shape": [int], "tried": [{"rule": str, "answer": str}],
     "family": str, "reason": str, "matrices": [[rows, cols]]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, OK, complain, note
from layerwise.cli.folding import counted, fold, ranges
from layerwise.cli.models import MissingPackage, ModelKind, ModelSource, build_model, find_model
from layerwise.cli.settings import load_settings
from layerwise.config.load import Override
from layerwise.config.resolve import matrix_rule, other_rule
from layerwise.config.rules import Muon, Rule
from layerwise.config.schema import TrainConfig, is_sharded
from layerwise.errors import ConfigError, Problem, listed
from layerwise.layout.cost import NewtonSchulz
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.quantizing import kept_nbytes, quantized_table
from layerwise.routing.evidence import Evidence
from layerwise.routing.files import read_rules, rules_to_toml
from layerwise.routing.readings import Role
from layerwise.routing.record import read_routing, routing_to_json
from layerwise.routing.refusals import RefusedError, fold_refusals
from layerwise.routing.rules import RouteRule, explain, refuse_fallbacks, route_param, route_params, suspicion
from layerwise.units import format_count, format_nbytes

if TYPE_CHECKING:
    from torch import nn

_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """What the user asked for."""

    model: str | None
    overrides: Sequence[Override]
    world: int
    explain: str | None = None
    as_json: bool = False
    every_row: bool = False
    places: bool = False
    """Show homes and buckets."""
    trace: bool = False
    """Follow the forward and show what it says."""
    record: str = ""
    """A file to write the routing to."""


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


def run(request: InspectRequest) -> int:
    """Print the plan and return the exit code."""
    try:
        source, config = _settings(request)
        rules = read_rules(config.routing.rules_file)
        module = build_model(source, config)
        if request.explain is not None:
            return _explain(module, rules, request.explain, as_json=request.as_json, strict=config.routing.strict)
        if request.trace and not request.record:
            from layerwise.cli import seen

            return seen.show(module, source, rules, as_json=request.as_json)
        evidence = _evidence(module, source, config, follow=request.trace)
        plan, rows = _plan_and_rows(module, config, rules, request.world, evidence)
        if request.record:
            _record(plan, request.record)
    except ConfigError as error:
        if isinstance(error.__cause__, RefusedError) and request.explain is None:
            _offer_rules(module, source, error.__cause__)
        complain(str(error))
        return BAD_INPUT
    except MissingPackage as error:
        complain(str(error))
        return ENVIRONMENT
    except ImportError as error:
        complain(f"inspect needs a package that cannot be imported: {error}. Run: pip install layerwise")
        return ENVIRONMENT
    doubt = suspicion(plan.routes, plan.table)
    if doubt is not None:
        note(f"warning: {doubt}")
    if request.as_json:
        print(json.dumps(as_json(plan, rows)))
    else:
        _print_rows(plan, rows, every_row=request.every_row, places=request.places)
    return OK


def _settings(request: InspectRequest) -> tuple[ModelSource, TrainConfig]:
    """What to build and with which settings, after everything that can be checked without torch."""
    problems = []
    if not 1 <= request.world <= _MOST_RANKS:
        problems.append(Problem("--world", f"expected a number of ranks from 1 to {_MOST_RANKS}, got {request.world}."))
    try:
        source = find_model(request.model)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if source.kind is ModelKind.TRAINER:
        return source, load_settings(source.path or source.word or None, request.overrides, problems).config
    what = f"is about the trainer's own model, and MODEL is {request.model!r}. Leave it out."
    senseless = [override for override in request.overrides if override.flag.startswith("--model.")]
    problems += [Problem(override.flag, what) for override in senseless]
    overrides = [override for override in request.overrides if override not in senseless]
    return source, load_settings(None, overrides, problems).config


def _evidence(module: nn.Module, source: ModelSource, config: TrainConfig, *, follow: bool) -> Evidence | None:
    """What routing has to go by beside types and names: the forward, or a recorded routing."""
    if config.routing.recorded:
        return Evidence(recorded=read_routing(config.routing.recorded))
    if not follow:
        return None
    from layerwise.cli import seen

    found = seen.follow(module, source)
    unseen = [fqn for fqn, reading in found.readings.items() if reading.role is Role.UNSEEN]
    if unseen:
        note(f"{len(unseen)} params were not seen in the forward, and go by their types and names: {listed(unseen)}")
    return Evidence(readings=found.readings, decides=True)


def _record(plan: Plan, path: str) -> None:
    try:
        Path(path).write_text(routing_to_json(plan.table, plan.routes), encoding="utf-8")
    except OSError as error:
        raise ConfigError([Problem(path, f"cannot be written: {error.strerror or error}.")]) from None
    note(
        f"recorded the routing of {len(plan.table)} params in {path}; a run that is to go by it has routing.recorded = {path!r}"
    )


def _plan_and_rows(
    module: nn.Module, config: TrainConfig, rules: Sequence[RouteRule], world: int, evidence: Evidence | None = None
) -> tuple[Plan, list[ParamRow]]:
    try:
        plan = plan_for(module, config, rules, world, evidence)
        return plan, rows_of(plan, config)
    except (
        ValueError,
        TypeError,
        NotImplementedError,
    ) as error:  # a rule, a dtype or a fused weight that nobody explains
        raise ConfigError([Problem("routing", str(error))]) from error


def _offer_rules(module: nn.Module, source: ModelSource, error: RefusedError) -> None:
    """TOML to paste that covers every refused param: as its forward shows it, where that can be followed."""
    from layerwise.cli import seen
    from layerwise.models.table import param_table

    try:
        readings = seen.follow(module, source).readings
    except ConfigError:  # without inputs
        readings = {}
    refusals = fold_refusals(error.params, readings, param_table(module).by_name)
    rules = [RouteRule(pattern=refusal.pattern, to="matrix", split=refusal.split or "whole") for refusal in refusals]
    guessed = [refusal.pattern for refusal in refusals if refusal.split is None]
    doubt = f"; not seen there, so that 'whole' is a guess: {listed(guessed)}" if guessed else ""
    note(f"rules for --rules FILE, as the forward uses these params{doubt}:\n\n{rules_to_toml(rules)}")


def plan_for(
    module: nn.Module, config: TrainConfig, rules: Sequence[RouteRule], world: int, evidence: Evidence | None = None
) -> Plan:
    """The plan that the trainer would make of the module on `world` ranks, or on those of the mesh that torch cuts it over."""
    from layerwise.dtypes import DType
    from layerwise.engine import engine
    from layerwise.layout.options import Options, bucket_numel_of
    from layerwise.layout.placing import MeshSizes, placements_for
    from layerwise.models.table import param_table

    parallel = config.parallel
    if is_sharded(parallel):
        sizes = MeshSizes(parallel.replicate, parallel.fsdp, parallel.tp, parallel.ep)
        options = Options(
            rules=rules, strict=config.routing.strict, evidence=evidence, memory="params", gradients="params"
        )
        placed = placements_for(param_table(module), sizes)
        return engine.plan_for((module,), options, world=sizes.world, placed=placed)
    dtype = DType(parallel.grad_dtype)
    options = Options(
        layout=parallel.layout,
        rules=rules,
        strict=config.routing.strict,
        evidence=evidence,
        grad_dtype=dtype,
        bucket_numel=bucket_numel_of(parallel.bucket_mib, dtype),
        gradients="params" if parallel.ddp else "buckets",
    )
    recipe = config.precision.param_gather
    if recipe != "none":  # modules of shapes alone have no values to make codes of
        table = quantized_table(param_table(module), recipe, whose=type(module).__name__)
        return make_plan(table, options, world=world)
    return engine.plan_for((module,), options, world=world)


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
                flops=sum(_flops(rule, *shape) for shape in matrices),
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
    return NewtonSchulz(steps=rule.steps, method=rule.method).flops(rows, cols)


def totals_of(rows: Sequence[ParamRow]) -> dict[str, RuleTotal]:
    """Sums by update rule, in order of appearance."""
    totals: dict[str, RuleTotal] = {}
    for row in rows:
        totals.setdefault(row.rule, RuleTotal()).add(row)
    return totals


# -- what is printed -------------------------------------------------------------------------------


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


_COLUMNS = ("param", "shape", "route", "matrices", "size", "why")
_PLACES = ("home", "bucket")


def _print_rows(plan: Plan, rows: Sequence[ParamRow], *, every_row: bool, places: bool) -> None:
    from layerwise.cli.console import print_table

    columns = (*_COLUMNS[:-1], *(_PLACES if places else ()), _COLUMNS[-1])
    cells = [_cells(name, members, places=places) for name, members in _folded(rows, every_row=every_row)]
    print_table(plan.describe(), columns, cells, right=("bucket", "size"), optional=("size", "matrices"))
    print()
    sums = ("params", "elements", "size", "matrices", "newton-schulz flops a step")
    print_table("", ("totals", *sums), _total_cells(rows), right=sums)


def _folded(rows: Sequence[ParamRow], *, every_row: bool) -> list[tuple[str, list[ParamRow]]]:
    if every_row:
        return [(row.fqn, [row]) for row in rows]
    kinds = [(row.shape, row.dtype, row.recipe, row.route, row.reason, row.matrices) for row in rows]
    return [
        (name, [rows[position] for position in positions]) for name, positions in fold([row.fqn for row in rows], kinds)
    ]


def _cells(name: str, members: Sequence[ParamRow], *, places: bool) -> tuple[str, ...]:
    """One line of the table: a param, or several that differ in their layer number alone."""
    first = members[0]
    homes = first.homes if len(members) == 1 else tuple(dict.fromkeys(home for row in members for home in row.homes))
    buckets = sorted({row.bucket for row in members if row.bucket is not None})
    return (
        name,
        "x".join(map(str, first.shape)),
        first.route,
        counted([f"{rows}x{cols}" for rows, cols in first.matrices]),
        format_nbytes(sum(row.nbytes for row in members)),
        *((_homes(homes, is_sorted=len(members) > 1), ranges(buckets)) if places else ()),
        first.reason,
    )


def _called(homes: Sequence[int], world: int) -> int | str:
    """Who orthogonalises a matrix: a rank, or all of them; some of them by their numbers."""
    if len(homes) == world:
        return "all"
    return homes[0] if len(homes) == 1 else "+".join(map(str, homes))


def _homes(homes: Sequence[int | str], *, is_sorted: bool, limit: int = 6) -> str:
    if "all" in homes:
        return "all"
    if is_sorted:
        return ranges(sorted(home for home in homes if isinstance(home, int)))
    shown = ",".join(map(str, homes[:limit]))
    return f"{shown},.." if len(homes) > limit else shown


def _total_cells(rows: Sequence[ParamRow]) -> list[tuple[str, ...]]:
    totals = totals_of(rows)
    everything = RuleTotal()
    for row in rows:
        everything.add(row)
    return [
        (
            rule,
            str(total.params),
            f"{total.elements:,}",
            format_nbytes(total.nbytes),
            str(total.matrices),
            format_count(total.flops),
        )
        for rule, total in [*totals.items(), ("all", everything)]
    ]


# -- one param -------------------------------------------------------------------------------------


def _explain(module: nn.Module, rules: Sequence[RouteRule], name: str, *, as_json: bool, strict: bool) -> int:
    """Which rules were tried for one param. It needs no plan, so it works where routing refuses the model."""
    from layerwise.models.table import param_table

    try:
        table = param_table(module)
        param = table.find(name)
    except KeyError as error:
        raise ConfigError([Problem("--explain", error.args[0])]) from None
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem("routing", str(error))]) from error
    tried = [{"rule": rule, "answer": answer} for rule, answer in explain(param, rules)]
    try:
        with suppress(RefusedError):  # of others, perhaps: the rules are checked against all params
            route_params(table, rules)
        route = route_param(param, rules)
        if strict:
            refuse_fallbacks([param], {param.fqn: route})
    except ValueError as error:
        _print_tried(param.fqn, param.shape, tried)
        raise ConfigError([Problem("routing", str(error))]) from error
    matrices = [matrix.logical_shape for matrix in route.matrices]
    if as_json:
        found = {"fqn": param.fqn, "shape": param.shape, "tried": tried}
        print(json.dumps({**found, "family": route.family, "reason": route.reason, "matrices": matrices}))
        return OK
    _print_tried(param.fqn, param.shape, tried)
    words = counted([f"{rows}x{cols}" for rows, cols in matrices])
    print(f"-> {route.family}{f', matrices: {words}' if words else ''}: {route.reason}")
    return OK


def _print_tried(fqn: str, shape: Sequence[int], tried: Sequence[Mapping[str, str]]) -> None:
    from layerwise.cli.console import print_table

    title = f"{fqn} {'x'.join(map(str, shape))}: the rules in order, the first that matches decides"
    print_table(title, ("rule", "answer"), [(step["rule"], step["answer"]) for step in tried])

"""`layerwise inspect MODEL`: any model, planned for any number of ranks, as a table of params. Starts no ranks.

What `--json` prints is said in `param_rows.py`, for `--explain FQN` in `explaining.py` and for `--trace` in `seen.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerwise.cli.collector import without_collector
from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, OK, complain, note
from layerwise.cli.folding import counted, fold, ranges
from layerwise.cli.models import MissingPackage, ModelKind, ModelSource, build_model, find_model
from layerwise.cli.param_rows import ParamRow, RuleTotal, as_json, rows_of, totals_of
from layerwise.cli.settings import load_settings
from layerwise.config.load import Override
from layerwise.config.parallelism import RECORDED_PARTS, has_parts, least_world, whole_model, world_problems
from layerwise.config.resolve import matrix_rule
from layerwise.config.rules import tp_mode_of
from layerwise.config.schema import TrainConfig, is_sharded
from layerwise.errors import ConfigError, Problem, listed
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.quantizing import quantized_table
from layerwise.routing.evidence import Evidence
from layerwise.routing.files import read_rules, rules_to_toml
from layerwise.routing.readings import Role
from layerwise.routing.record import read_routing, routing_to_json
from layerwise.routing.refusals import RefusedError, fold_refusals
from layerwise.routing.rules import RouteRule, suspicion
from layerwise.units import format_count, format_nbytes

if TYPE_CHECKING:
    from torch import nn

_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """What the user asked for."""

    model: str | None
    overrides: Sequence[Override]
    world: int | None
    explain: str | None = None
    as_json: bool = False
    every_row: bool = False
    places: bool = False
    """Show homes and buckets."""
    trace: bool = False
    """Follow the forward and show what it says."""
    record: str | None = None
    """A file to write the routing to."""

    def ranks_of(self, config: TrainConfig) -> int:
        """How many ranks to plan for."""
        return self.world or least_world(config.parallel)


def run(request: InspectRequest) -> int:
    """Print the plan and return the exit code."""
    with without_collector():
        return _run(request)


def _run(request: InspectRequest) -> int:
    try:
        source, config = _settings(request)
        rules = read_rules(config.routing.rules_file)
        module = build_model(source, config)
        if request.explain is not None:
            from layerwise.cli import explaining

            return explaining.show(
                module, rules, request.explain, as_json=request.as_json, strict=config.routing.strict
            )
        if request.trace and request.record is None:
            from layerwise.cli import seen

            return seen.show(module, source, rules, as_json=request.as_json)
        evidence = _evidence(module, source, config, follow=request.trace)
        plan, rows = _plan_and_rows(module, config, rules, request.ranks_of(config), evidence)
        if request.record is not None:
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
    if config.parallel.pp > 1:
        note(whole_model(config.parallel))
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
    if request.world is not None and not 1 <= request.world <= _MOST_RANKS:
        problems.append(Problem("--world", f"expected a number of ranks from 1 to {_MOST_RANKS}, got {request.world}."))
    if request.record == "":
        problems.append(Problem("--record", "is empty: expected a file to write, such as routing.json."))
    try:
        source = find_model(request.model)
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from None
    if source.kind is ModelKind.TRAINER:
        config = load_settings(source.path or source.word or None, request.overrides, problems).config
        misfits = world_problems(config.parallel, request.ranks_of(config))
        if misfits:
            raise ConfigError(misfits)
        if request.record is not None and has_parts(config.parallel):
            raise ConfigError([Problem("--record", RECORDED_PARTS)])
        return source, config
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
    return Evidence(readings=found.readings)


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
    from layerwise.layout.cost import DEFAULT_COST, cost_of
    from layerwise.layout.options import Options, bucket_numel_of
    from layerwise.layout.placing import MeshSizes, placements_for
    from layerwise.models.table import param_table

    parallel, rule = config.parallel, matrix_rule(config.optim)
    if is_sharded(parallel):
        sizes = MeshSizes(parallel.replicate, parallel.fsdp, parallel.tp, parallel.ep)
        options = Options(
            rules=rules,
            tp_mode=tp_mode_of(rule),
            cost=cost_of(rule),
            strict=config.routing.strict,
            evidence=evidence,
            memory="params",
            gradients="params",
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
        cost=cost_of(rule) if parallel.ddp else DEFAULT_COST,  # a DataParallel is laid out before it has an optimizer
    )
    recipe = config.precision.param_gather
    if recipe != "none":  # modules of shapes alone have no values to make codes of
        table = quantized_table(param_table(module), recipe, whose=type(module).__name__)
        return make_plan(table, options, world=world)
    return engine.plan_for((module,), options, world=world)


# -- what is printed -------------------------------------------------------------------------------


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

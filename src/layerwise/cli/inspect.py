"""`layerwise inspect`: the trainer's model, planned for any number of ranks, as a table of params. Starts no ranks."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, OK, complain
from layerwise.cli.settings import load_settings
from layerwise.config.load import Override
from layerwise.config.schema import TrainConfig, resolve_model
from layerwise.dtypes import DType
from layerwise.errors import ConfigError, Problem
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.work import EVERY_RANK
from layerwise.routing.rules import explain
from layerwise.units import MIB, format_nbytes

if TYPE_CHECKING:
    from layerwise.routing.spec import ParamTable

_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """What the user asked for."""

    config: str | None
    overrides: Sequence[Override]
    world: int
    explain: str | None
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamRow:
    """One param of the table."""

    fqn: str
    shape: tuple[int, ...]
    route: str
    """The rule that updates it."""
    reason: str
    matrices: tuple[tuple[int, int], ...]
    homes: tuple[int, ...]
    """Per matrix, the rank that orthogonalises it; -1 where every rank does."""
    bucket: int | None
    nbytes: int


def run(request: InspectRequest) -> int:
    """Print the plan and return the exit code."""
    problems = []
    if not 1 <= request.world <= _MOST_RANKS:
        problems.append(Problem("--world", f"expected a number of ranks from 1 to {_MOST_RANKS}, got {request.world}."))
    try:
        config = load_settings(request.config, request.overrides, problems).config
        plan = plan_for(config, request.world)
        if request.explain is not None:
            return _explain(plan, request.explain, request.as_json)
    except ConfigError as error:
        complain(str(error))
        return BAD_INPUT
    except ImportError as error:
        complain(f"inspect needs a package that cannot be imported: {error}. Run: pip install layerwise")
        return ENVIRONMENT
    rows = rows_of(plan, config)
    if request.as_json:
        print(json.dumps({"digest": plan.digest, "params": [_row_json(row) for row in rows], "plan": plan.to_json()}))
    else:
        _print_rows(plan, rows)
    return OK


def plan_for(config: TrainConfig, world: int) -> Plan:
    """The plan that `layerwise train` would make on `world` ranks, from a model that has shapes and no memory."""
    grad_dtype = DType(config.parallel.grad_dtype)
    bucket_mib = config.parallel.bucket_mib
    return make_plan(
        _table_of(config),
        world=world,
        layout=config.parallel.layout,
        grad_dtype=grad_dtype,
        bucket_numel=None if bucket_mib is None else max(1, int(bucket_mib * MIB) // grad_dtype.itemsize),
    )


def _table_of(config: TrainConfig) -> ParamTable:
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here uses it
    import torch

    from layerwise.buffers.bind import param_table, torch_dtype
    from layerwise.train.model import GPT

    with torch.device("meta"):
        return param_table(GPT(resolve_model(config.model)).to(torch_dtype(DType(config.train.precision))))


def rows_of(plan: Plan, config: TrainConfig) -> list[ParamRow]:
    """The table, in model order."""
    rule_by_family = {"matrix": config.optim.rule, "other": config.optim.other_rule, "frozen": "frozen"}
    homes_by_fqn: dict[str, list[int]] = {}
    for work in plan.works:
        for item in sorted(work.items, key=lambda item: (item.matrix.fqn, item.matrix.index)):
            homes_by_fqn.setdefault(item.matrix.fqn, []).append(item.home)
    return [
        ParamRow(
            fqn=param.fqn,
            shape=param.shape,
            route=rule_by_family[plan.routes[param.fqn].family],
            reason=plan.routes[param.fqn].reason,
            matrices=tuple((matrix.rows, matrix.cols) for matrix in plan.routes[param.fqn].matrices),
            homes=tuple(homes_by_fqn.get(param.fqn, ())),
            bucket=plan.bucket_of.get(param.fqn),
            nbytes=param.nbytes,
        )
        for param in plan.table
    ]


def _row_json(row: ParamRow) -> dict[str, object]:
    return {name: getattr(row, name) for name in row.__slots__}


def _print_rows(plan: Plan, rows: Sequence[ParamRow]) -> None:
    from layerwise.cli.console import print_table

    columns = ("param", "shape", "route", "matrices", "home", "bucket", "size", "why")
    cells = [
        (
            row.fqn,
            "x".join(map(str, row.shape)),
            row.route,
            _counted([f"{rows}x{cols}" for rows, cols in row.matrices]),
            _homes(row.homes),
            "" if row.bucket is None else str(row.bucket),
            format_nbytes(row.nbytes),
            row.reason,
        )
        for row in rows
    ]
    print_table(plan.describe(), columns, cells, right=("bucket", "size"))


def _counted(words: Sequence[str]) -> str:
    """`a, 2 of b`: equal neighbours of a long list need no repetition."""
    counts = Counter(words)
    return ", ".join(word if count == 1 else f"{count} of {word}" for word, count in counts.items())


def _homes(homes: Sequence[int], limit: int = 6) -> str:
    if EVERY_RANK in homes:
        return "all"
    shown = ",".join(map(str, homes[:limit]))
    return f"{shown},.." if len(homes) > limit else shown


def _explain(plan: Plan, name: str, as_json: bool) -> int:
    try:
        param = plan.table.find(name)
    except KeyError as error:
        complain(f"--explain: {error.args[0]}")
        return BAD_INPUT
    tried = [{"rule": rule, "answer": answer} for rule, answer in explain(param)]
    if as_json:
        print(json.dumps({"fqn": param.fqn, "shape": param.shape, "tried": tried}))
        return OK
    from layerwise.cli.console import print_table

    title = f"{param.fqn} {'x'.join(map(str, param.shape))}: the rules in order, the first that matches decides"
    print_table(title, ("rule", "answer"), [(step["rule"], step["answer"]) for step in tried])
    return OK

"""`layerwise plan --model MODEL --world N`: what every layout would cost each rank, side by side. Starts no ranks, and for
presets and the Hugging Face families of `planner/hf_config.py` needs no torch.

docs/planning.md says how to read the table, and which keys `--json` has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from layerwise.cli.collector import without_collector
from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, OK, announce_torch, complain, note
from layerwise.cli.models import MissingPackage, ModelKind, ModelSource, build_model, find_model
from layerwise.cli.plan_request import PlanRequest, checked_layouts
from layerwise.cli.settings import load_settings
from layerwise.config.parallelism import whole_model
from layerwise.config.resolve import resolve_model
from layerwise.config.rules import RULES_BY_KIND
from layerwise.config.schema import TrainConfig
from layerwise.dtypes import DType
from layerwise.errors import ConfigError, Problem, did_you_mean
from layerwise.layout.options import Options, bucket_numel_of
from layerwise.layout.placing import MeshSizes, is_stack
from layerwise.layout.quantizing import is_product, quantized_table
from layerwise.layout.schedule import Phase
from layerwise.planner.codes import Codes, codes_of
from layerwise.planner.hf_config import UnknownFamilyError, hf_table
from layerwise.planner.presets import PRESETS, preset
from layerwise.planner.report import Column, Comparison, Setting, compare
from layerwise.planner.rules import Rules
from layerwise.planner.sharded import TorchTraffic, torch_traffic
from layerwise.planner.timing import KINDS, PHASES
from layerwise.routing.spec import DENSE, ParamTable
from layerwise.units import format_count, format_nbytes

_SHOWN_MS = 0.005
"""Phases that take less are not in the table: statistics are a few kilobytes."""
_MANY_RANKS = 10_000
"""Plans for as many take seconds."""


def run(request: PlanRequest) -> int:
    """Print the comparison and return the exit code."""
    try:
        with without_collector():
            layouts = checked_layouts(request)
            if request.ranks >= _MANY_RANKS:
                note(f"planning for {request.ranks} ranks")
            table = _quantized(_table_for(request), request)
            comparison = _compared(table, request, layouts)
    except ConfigError as error:
        complain(str(error))
        return BAD_INPUT
    except MissingPackage as error:
        complain(str(error))
        return ENVIRONMENT
    except ImportError as error:
        complain(f"plan needs a package that cannot be imported: {error}. Run: pip install layerwise")
        return ENVIRONMENT
    if request.as_json:
        print(json.dumps(as_json(request, comparison)))
    else:
        _print(request, comparison)
    return OK


# -- what was asked --------------------------------------------------------------------------------


def _table_for(request: PlanRequest) -> ParamTable:
    """The params of the model that was named, as one rank holds them."""
    word, experts = request.model, request.local_experts
    if word in PRESETS:
        return _blamed_on(word, lambda: preset(word, expert_parallel=experts, dtype=request.param_dtype or DType.BF16))
    source = find_model(word)
    if source.kind is ModelKind.HF_TYPE:
        what = f"is no preset.{did_you_mean(word, PRESETS)} Or give a config.json, its folder, or module:function."
        raise ConfigError([Problem(f"--model {word}", what)])
    if source.kind is ModelKind.HF_CONFIG:
        try:
            return _blamed_on(word, lambda: _hf_table(source, request))
        except UnknownFamilyError:
            pass  # transformers may know it
    return _live_table(source, request)


def _hf_table(source: ModelSource, request: PlanRequest) -> ParamTable:
    document = json.loads(Path(source.path).read_text(encoding="utf-8"))
    return hf_table(document, source.word, expert_parallel=request.local_experts, dtype=request.param_dtype)


def _blamed_on(word: str, make: Callable[[], ParamTable]) -> ParamTable:
    try:
        return make()
    except UnknownFamilyError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError([Problem(f"--model {word}", str(error))]) from error


def _live_table(source: ModelSource, request: PlanRequest) -> ParamTable:
    """The params of a module that is built on the meta device: the trainer's as one rank of `--ep` has it, a user's as it
    is."""
    if source.kind is ModelKind.TRAINER:
        config = load_settings(source.path or source.word, ()).config
        table = _blamed_on(source.word, lambda: _trainer_table(config, request))
    else:
        module = build_model(source, TrainConfig())
        from layerwise.models.table import param_table  # imports torch, which is there by now

        table = _blamed_on(source.word, lambda: param_table(module))
    if request.local_experts > 1 and all(param.domain == DENSE for param in table):
        what = (
            f"--ep {request.expert_parallel} needs experts with a domain of their own: none of its modules names any in "
            "param_domains(). Leave --ep out."
        )
        raise ConfigError([Problem(f"--model {source.word}", what)])
    if request.param_dtype is None:
        return table
    return ParamTable(tuple(replace(param, dtype=request.param_dtype) for param in table))


def _trainer_table(config: TrainConfig, request: PlanRequest) -> ParamTable:
    announce_torch()
    from layerwise.cli.meta import shapes_only
    from layerwise.comm.dispatch import ExpertRanks
    from layerwise.models.table import param_table, torch_dtype
    from layerwise.train.model import GPT

    if config.parallel.pp > 1:
        note(whole_model(config.parallel))
    with shapes_only():
        module = GPT(resolve_model(config.model), experts=ExpertRanks(group=None, rank=0, world=request.local_experts))
    table = param_table(module.to(torch_dtype(DType(config.train.precision))))
    recipe = config.precision.param_gather
    is_asked = request.quantize is not None or request.param_dtype is not None or request.sizes is not None
    return table if recipe == "none" or is_asked else quantized_table(table, recipe)


def _quantized(table: ParamTable, request: PlanRequest) -> ParamTable:
    """The table with what `--quantize` keeps as codes."""
    if request.quantize is None:
        return table
    found = sorted({str(param.dtype) for param in table if is_product(param) and param.dtype is not DType.BF16})
    if found:
        what = f"codes are made of bf16, and params are {' and '.join(found)}. Add --param-dtype bf16."
        raise ConfigError([Problem("--quantize", what)])
    try:
        return quantized_table(table, request.quantize, request.skip, request.model)
    except ValueError as error:
        raise ConfigError(
            [Problem("--quantize", f"{error} Here that is --skip, with commas between globs.")]
        ) from error


def _check_experts(table: ParamTable, request: PlanRequest) -> None:
    """Raise unless a mesh can share out the experts that the model has."""
    ep = request.expert_parallel
    if request.sizes is None or ep == 1:
        return
    counts = {param.shape[0] for param in table if is_stack(param)}
    if not counts or any(count % ep for count in counts):
        found = f"has {', '.join(map(str, sorted(counts)))} experts" if counts else "has no stack of experts"
        what = f"{found}: --ep {ep} needs a number of them that it divides."
        raise ConfigError([Problem(f"--model {request.model}", what)])


def _compared(table: ParamTable, request: PlanRequest, layouts: Sequence[str] | None) -> Comparison:
    _check_experts(table, request)
    setting = Setting(
        world=request.ranks,
        worlds={param.domain: request.ranks // request.local_experts for param in table if param.domain != DENSE},
        sizes=request.sizes,
        options=Options(
            tp_mode=request.tp_mode,
            grad_dtype=request.grad_dtype,
            bucket_numel=bucket_numel_of(request.bucket_mib, request.grad_dtype),
            reducer=request.reducer,
            shard_grads=request.shard_grads,
            hardware=request.hardware,
        ),
        rules=Rules(matrix=RULES_BY_KIND[request.rule](lr=0.0)),
    )
    if not any(param.trainable for param in table):
        raise ConfigError(
            [Problem(f"--model {request.model}", "has no trainable param: there is nothing to optimise.")]
        )
    try:
        comparison = compare(table, setting, layouts)
    except (ValueError, TypeError) as error:  # a combination that is refused, or a fused weight that nobody explains
        raise ConfigError([Problem("plan", str(error))]) from error
    if comparison.doubt is not None:
        note(f"warning: {comparison.doubt}")
    return comparison


# -- what is printed -------------------------------------------------------------------------------


def as_json(request: PlanRequest, comparison: Comparison) -> dict[str, object]:
    """The object that `--json` prints; docs/planning.md lists its keys."""
    setting, table = comparison.setting, comparison.table
    return {
        "model": request.model,
        "world": setting.world,
        "domains": {param.domain: setting.worlds.get(param.domain, setting.world) for param in table},
        "params": len(table),
        "elements": sum(param.numel for param in table),
        "matrices": comparison.matrices,
        "settings": {
            "param_dtypes": sorted({str(param.dtype) for param in table}),
            "grad_dtype": str(setting.options.grad_dtype),
            "rule": setting.rules.matrix.kind,
            "tp_mode": setting.options.tp_mode,
            "other_rule": setting.rules.other.kind,
            "reducer": setting.options.reducer,
            "shard_grads": setting.options.shard_grads,
            "bucket_mib": request.bucket_mib,
        },
        "hardware": {"tflops": setting.options.hardware.ns_tflops, "link_gb_s": setting.options.hardware.link_gb_s},
        "quantized": None if (codes := codes_of(table)) is None else codes.to_json(),
        "mesh": None if setting.sizes is None else setting.sizes._asdict(),
        "sent_by_torch": None if setting.sizes is None else _torch_traffic(comparison, setting.sizes).to_json(),
        "layouts": [column.to_json() for column in comparison.columns],
        "reasons": [
            {"buffer": choice.buffer, "layout": choice.layout, "reason": choice.reason} for choice in comparison.choices
        ],
        "left_out": dict(comparison.left_out),
        "hint": comparison.hint,
    }


def _torch_traffic(comparison: Comparison, sizes: MeshSizes) -> TorchTraffic:
    return torch_traffic(comparison.table, sizes, comparison.setting.options.grad_dtype)


def _print(request: PlanRequest, comparison: Comparison) -> None:
    from layerwise.cli.console import print_table

    columns = comparison.columns
    names = [f"{column.layout} *" if column.is_chosen and len(columns) > 1 else column.layout for column in columns]
    print_table(_title(request, comparison), ("on the worst rank", *names), _rows(columns), right=names)
    print()
    for line in _notes(comparison):
        print(line)


def _title(request: PlanRequest, comparison: Comparison) -> str:
    setting, table = comparison.setting, comparison.table
    elements = sum(param.numel for param in table)
    domains = "".join(f", each {domain} param on {size} of them" for domain, size in sorted(setting.worlds.items()))
    dtypes = " and ".join(sorted({str(param.dtype) for param in table}))
    extras = [
        "cut by torch: " + " x ".join(f"{name} {size}" for name, size in setting.sizes._asdict().items() if size > 1)
        if setting.sizes is not None
        else "",
        "matrices in blocks of tp" if setting.options.tp_mode == "blockwise" else "",
        f"{setting.options.reducer} sums" if setting.options.reducer != "collective" else "",
        "gradients released once reduced" if setting.options.shard_grads else "",
        f"buckets of {request.bucket_mib:g} MiB" if request.bucket_mib is not None else "",
        f"weights kept as {codes.recipe}" if (codes := codes_of(table)) is not None else "",
    ]
    return (
        f"{request.model}: {len(table)} params, {format_count(elements)} elements, {comparison.matrices} matrices on "
        f"{setting.world} rank{'s' if setting.world != 1 else ''}{domains}\n"
        f"{dtypes} params, {setting.options.grad_dtype} gradients, {setting.rules.matrix.kind} and {setting.rules.other.kind}"
        + "".join(f", {extra}" for extra in extras if extra)
    )


def _rows(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """The table: a total, then its parts."""

    def row(name: str, cell: Callable[[Column], str]) -> tuple[str, ...]:
        return name, *(cell(column) for column in columns)

    def nbytes_of(kind: str) -> Callable[[Column], str]:
        return lambda column: _cell(column.traffic.nbytes_by_kind.get(kind), format_nbytes)

    def ms_of(phase: Phase) -> Callable[[Column], str]:
        return lambda column: _cell(column.traffic.ms_by_phase.get(phase), format_ms)

    kinds = [kind for kind in KINDS if any(kind in column.traffic.nbytes_by_kind for column in columns)]
    phases = [
        phase for phase in PHASES if any(column.traffic.ms_by_phase.get(phase, 0.0) >= _SHOWN_MS for column in columns)
    ]
    at_most = [row("  at most", lambda column: format_nbytes(column.at_most_nbytes))] if _lags(columns) else []
    return [
        row("memory without activations", lambda column: format_nbytes(column.memory.total)),
        *at_most,
        row("  at rest", lambda column: format_nbytes(column.memory.at_rest)),
        row("  params", lambda column: format_nbytes(column.memory.params)),
        row("  grads", lambda column: format_nbytes(column.memory.grads)),
        row("  masters", lambda column: format_nbytes(column.memory.masters)),
        row("  state", lambda column: format_nbytes(column.memory.state)),
        row("  slots", lambda column: format_nbytes(column.memory.slots)),
        row("  workspace", lambda column: format_nbytes(column.memory.workspace)),
        row("padding", lambda column: f"{column.padding_percent:.2f} %"),
        row("buckets", lambda column: str(column.buckets)),
        row("sent in a step", lambda column: format_nbytes(column.traffic.nbytes)),
        *(row(f"  {kind}", nbytes_of(kind)) for kind in kinds),
        row("wire", lambda column: format_ms(column.traffic.ms)),
        *(row(f"  {phase}", ms_of(phase)) for phase in phases),
        row("  waited for", lambda column: format_ms(column.traffic.waited_ms)),
        row("newton-schulz", lambda column: format_ms(column.work.ms)),
        row("  imbalance", lambda column: f"{column.work.imbalance:.2f}"),
        row("  idle ranks", lambda column: str(column.work.idle_ranks)),
    ]


def _lags(columns: Sequence[Column]) -> bool:
    return any(column.at_most_nbytes > column.memory.total for column in columns)


def _cell(value: float | None, show: Callable[[float], str]) -> str:
    return "-" if value is None else show(value)


def format_ms(ms: float) -> str:
    """`0.4` -> `0.40 ms`, `12345.6` -> `12.3 s`."""
    if ms >= 9999.5:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 99.5 else f"{ms:.1f} ms" if ms >= 9.95 else f"{ms:.2f} ms"


def _notes(comparison: Comparison) -> Iterator[str]:
    """What the figures mean and what follows from them, a line each."""
    choices = comparison.choices
    for choice in choices:
        yield f"* best for {choice.buffer}: {choice.layout}, {choice.reason}"
    if len({choice.layout for choice in choices}) > 1:
        yield f"* the mixture is layout={ {choice.buffer: choice.layout for choice in choices} }"
    if choices:
        yield _beside_the_table(comparison)
    elif any(column.is_chosen for column in comparison.columns):
        yield "* all layouts are the same: no matrix is held by more than one rank"
    for layout, why in comparison.left_out.items():
        yield f"without {layout}: {why}"
    codes = codes_of(comparison.table)
    if codes is not None:
        yield _saving(codes)
    sizes = comparison.setting.sizes
    if sizes is not None:
        sent = _torch_traffic(comparison, sizes)
        yield (
            f"beside that fully_shard() itself sends, for each microbatch and rank: {format_nbytes(sent.all_gather)} of params, in "
            f"forward and in backward, {format_nbytes(sent.reduce_scatter)} of gradients"
            + (f", {format_nbytes(sent.all_reduce)} between replicas" if sizes.replicate > 1 else "")
        )
        yield "not counted: the block that is whole for the moment"
    if _lags(comparison.columns):
        yield "at most: with the gradients that wait while reductions lag behind backward; as much must fit"
    hardware = comparison.setting.options.hardware
    yield (
        f"assumed: {hardware.ns_tflops:g} TFLOP/s in Newton-Schulz (--tflops), {hardware.link_gb_s:g} GB/s from each rank "
        "(--link-gb-s), no latency, and a backward that makes gradients as fast as the wire reduces them"
    )
    if comparison.hint is not None:
        yield f"hint: {comparison.hint}"


def _beside_the_table(comparison: Comparison) -> str:
    """Say in a line which parts of the model the figures of a choice count, and which parts the table counts besides."""
    chosen = next(column for column in comparison.columns if column.is_chosen)
    return (
        "these figures are of the matrices alone: ms waited for the wire and for Newton-Schulz; memory of params, whole gradients, "
        f"masters and momentum. The table has the whole model, with the other params, slots and workspace: {chosen.layout} "
        f"{format_nbytes(chosen.memory.total)}, waited for {format_ms(chosen.traffic.waited_ms)} of {format_ms(chosen.traffic.ms)} on the wire, newton-schulz {format_ms(chosen.work.ms)}"
    )


def _saving(codes: Codes) -> str:
    """What codes cost and save, as a line: against a replica from which they are made at use, and one that has them too."""

    def against(other: int) -> str:
        apart = f"{format_nbytes(abs(other - codes.nbytes))} {'less' if codes.nbytes <= other else 'more'}"
        return f"{apart} than the {format_nbytes(other)} of"

    return (
        f"{codes.recipe} keeps {format_count(codes.elements)} elements of {codes.params} params as codes, {codes.nbytes / codes.elements:.2f} "
        f"bytes each: {format_nbytes(codes.nbytes)}, {against(codes.bf16_nbytes)} a bf16 replica that is quantised at every use, and "
        f"{against(codes.cached_nbytes)} one with the codes beside it"
    )

"""The `layerwise` command: which subcommand with which flags. The only importer of tyro.

Dotted flags (`--section.field value`) are declared here, so that `--help` lists every setting, but they are read by
`config.load`: it reports the problems of file and flags together, and a flag cannot mean something else than the file.
A setting always takes a value (`--x.y {True,False}`, not `--x.no-y`), as it does in a file. Nothing here imports torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from layerwise._version import __version__
from layerwise.cli.exits import (
    BAD_INPUT,
    ENVIRONMENT,
    FAILED,
    INTERRUPTED,
    NO_ROOM,
    announce_torch,
    complain,
    write_nowhere,
)
from layerwise.config.gone import GONE, GONE_VALUES
from layerwise.config.load import Override, split_overrides
from layerwise.config.schema import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RoutingConfig,
    ScheduleConfig,
)

_DESCRIPTION = f"layerwise {__version__}: training with Muon and other matrix optimizers across many ranks."


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """Train a GPT on bytes of text; without any argument, on the source of Python's standard library."""

    config: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")] = None
    """TOML file with settings, the config.json of an earlier run, or a config of this package: tiny, moe, pipeline."""
    nproc: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Start this many ranks on this machine with torchrun, whose command is printed."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Check everything, print the resolved settings and where each comes from, and stop."""
    trace: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a timeline of steps 4 and 5 for ui.perfetto.dev: buckets, collectives, cohorts, hooks. Other ranks write
    theirs beside it: out.rank1.json and so on."""
    model: tyro.conf.FlagConversionOff[ModelConfig] = field(default_factory=ModelConfig)
    data: tyro.conf.FlagConversionOff[DataConfig] = field(default_factory=DataConfig)
    optim: tyro.conf.FlagConversionOff[OptimConfig] = field(default_factory=OptimConfig)
    routing: tyro.conf.FlagConversionOff[RoutingConfig] = field(default_factory=RoutingConfig)
    schedule: tyro.conf.FlagConversionOff[ScheduleConfig] = field(default_factory=ScheduleConfig)
    parallel: tyro.conf.FlagConversionOff[ParallelConfig] = field(default_factory=ParallelConfig)
    precision: tyro.conf.FlagConversionOff[PrecisionConfig] = field(default_factory=PrecisionConfig)
    train: tyro.conf.FlagConversionOff[LoopConfig] = field(default_factory=LoopConfig)
    checkpoint: tyro.conf.FlagConversionOff[CheckpointConfig] = field(default_factory=CheckpointConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectCommand:
    """Show what would happen to every param: its route and why, its matrices, their homes, its bucket, its bytes.

    Takes every setting of `layerwise train`; listed here are those that change the answer.
    """

    target: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """A config of the trainer, a Hugging Face config.json or model type (llama), or module:function that returns a
    module. Nothing: the trainer's defaults."""
    world: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of ranks to plan for; none are started. None: 2, or the fewest that the config can be spread over."""
    layout: Annotated[str | None, tyro.conf.arg(metavar="LAYOUT")] = None
    """Short for --parallel.layout."""
    rules: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Short for --routing.rules-file: TOML with [[rule]] tables."""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Short for --routing.strict true."""
    explain: Annotated[str | None, tyro.conf.arg(metavar="FQN")] = None
    """Say which routing rules were tried for the param of this name, and which one decided."""
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Give every param a line of its own, also where only the layer number differs."""
    places: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also show the ranks that orthogonalise each matrix, and the bucket of each param."""
    trace: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Follow the model's forward without values and show what each param is there, with rules for what routing gets
    wrong. With --record, the forward decides."""
    record: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write where every param goes to a file, which a run can pin: routing.recorded."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""
    model: tyro.conf.FlagConversionOff[ModelConfig] = field(default_factory=ModelConfig)
    routing: tyro.conf.FlagConversionOff[RoutingConfig] = field(default_factory=RoutingConfig)
    parallel: tyro.conf.FlagConversionOff[ParallelConfig] = field(default_factory=ParallelConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCommand:
    """Compare layouts before anything runs: memory, padding, bytes on the wire, balance and time on the worst rank.

    Needs no torch for presets and the common Hugging Face families.
    """

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """A preset (llama3-8b, deepseek-v3 ...), a Hugging Face config.json or its folder, a config of the trainer, or
    module:function that returns a module."""
    world: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of data-parallel ranks, those of expert parallelism included; none are started. None: those of the mesh that
    --fsdp, --replicate and --tp make."""
    ep: Annotated[int, tyro.conf.arg(metavar="E")] = 1
    """Ranks over which routed experts are spread; N / E ranks hold copies of each."""
    fsdp: Annotated[int, tyro.conf.arg(metavar="F")] = 1
    """Ranks over which torch's fully_shard() cuts every param, in place of a layout of ours."""
    replicate: Annotated[int, tyro.conf.arg(metavar="R")] = 1
    """Groups of these that hold the same shards (HSDP)."""
    tp: Annotated[int, tyro.conf.arg(metavar="T")] = 1
    """Ranks over which torch's parallelize_module() cuts linear layers, by their usual names."""
    layout: Annotated[str, tyro.conf.arg(metavar="LAYOUT")] = "all"
    """flat, padded, compact or replicated; several with commas between them. all: the four side by side, and which of
    them is best."""
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of all params. None: the model's own, bf16 for presets."""
    quantize: Literal["mxfp8", "blockwise"] | None = None
    """Keep the weights of linear layers and of experts as codes of eight bits, as layerwise.quantize() does. None: as a
    config of the trainer has it."""
    skip: Annotated[str, tyro.conf.arg(metavar="GLOBS")] = ""
    """Params that --quantize leaves as they are, with commas between them."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are accumulated and reduced."""
    bucket_mib: Annotated[float | None, tyro.conf.arg(metavar="MIB")] = None
    """Size of a communication bucket. None: the library's choice."""
    rule: Literal["muon", "normuon", "adamuon"] = "muon"
    """Rule of the matrices; everything else has AdamW."""
    tp_mode: Literal["auto", "blockwise"] = "auto"
    """Matrices that --tp has cut. auto: orthogonalised whole. blockwise: each rank's block by itself."""
    reducer: Literal["collective", "ordered"] = "collective"
    """How gradients are summed over ranks."""
    shard_grads: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Release full gradients once they are reduced."""
    tflops: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """What a rank reaches in Newton-Schulz, in TFLOP/s. None: that of an H200, printed below the table."""
    link_gb_s: Annotated[float | None, tyro.conf.arg(metavar="X")] = None
    """What a rank can send, in GB/s. None: a 400 Gb/s network card, printed below the table."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCommand:
    """Measure Newton-Schulz (ns) or a whole optimizer step (step) on this machine, beside what the machine could do."""

    what: Annotated[Literal["ns", "step"], tyro.conf.Positional]
    """ns: batches of matrices alone. step: ours and torch's optimizers over the matrices of a GPT."""
    width: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Width of that GPT. None: 1024 on a GPU, 64 without one."""
    layers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Its layers. None: 24 on a GPU, 2 without one."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorCommand:
    """Report versions, devices and optional parts, and let two ranks train three steps together."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptCommand:
    """List, inspect, verify and compare checkpoints, export their weights to safetensors, and import others.

    ls FOLDER | inspect PATH | verify PATH | diff PATH PATH | export PATH --to FILE | import WEIGHTS [STATES ...] --to PATH
    """

    action: Annotated[Literal["ls", "inspect", "verify", "diff", "export", "import"], tyro.conf.Positional]
    """What to do. import takes a safetensors file, and state dicts of torch.optim.Muon and AdamW over the same params."""
    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH")] = ()
    """Checkpoints, or the folder that they are in."""
    to: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """Where the result of export or import goes."""
    masters: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Export fp32 masters in place of weights, where there are any."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print JSON instead of a table."""


Command = (
    Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[InspectCommand, tyro.conf.subcommand("inspect")]
    | Annotated[CkptCommand, tyro.conf.subcommand("ckpt")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[DoctorCommand, tyro.conf.subcommand("doctor")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        print(f"layerwise {__version__}")
        return 0
    _open_what_is_closed()
    # A path may hold bytes that are no text; showing it must not be what fails.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # while an error of it can still be told
        return code
    except SystemExit as stop:  # tyro's way of ending after --help (0) and after a flag it does not know (2)
        return stop.code if isinstance(stop.code, int) else BAD_INPUT
    except KeyboardInterrupt:  # while something is imported, say
        complain("aborted.")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        write_nowhere(sys.stdout.fileno())
        return FAILED
    except OSError as error:
        if error.filename is not None or error.errno not in NO_ROOM:
            raise
        write_nowhere(sys.stdout.fileno())
        complain(f"stdout cannot be written: {error.strerror or error}.")
        return ENVIRONMENT


def _open_what_is_closed() -> None:
    """Whoever starts a process may leave it without streams (`>&-`): what goes there is lost, and not written into the next file
    that is opened, which would have their number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _dispatch(words: list[str]) -> int:
    overrides, rest = split_overrides(words)
    for word, following in zip(rest, [*rest[1:], ""], strict=False):
        flag, is_joined, value = word.partition("=")
        name, value = flag.removeprefix("--").replace("-", "_"), value if is_joined else following
        if flag.startswith("--") and name in GONE:
            complain(f"{flag} is gone: {GONE[name]}.")
            return BAD_INPUT
        if flag.startswith("--") and (name, value) in GONE_VALUES:
            complain(f"{flag} {value} is gone: {GONE_VALUES[name, value]}.")
            return BAD_INPUT
    # No argument: show what there is to choose from.
    command: TrainCommand | PlanCommand | InspectCommand | CkptCommand | BenchCommand | DoctorCommand = tyro.cli(
        Command, prog="layerwise", description=_DESCRIPTION, args=rest or ["--help"]
    )
    match command:
        case TrainCommand():
            return _train(command, overrides, words)
        case InspectCommand():
            return _inspect(command, overrides)
        case PlanCommand() | CkptCommand() | BenchCommand() | DoctorCommand() if overrides:
            name = type(command).__name__.removesuffix("Command").lower()
            complain(f"{name} takes no settings, got {overrides[0].flag}.")
            return BAD_INPUT
        case PlanCommand():
            return _plan(command)
        case CkptCommand():
            return _ckpt(command)
        case BenchCommand():
            return _bench(command)
        case DoctorCommand():
            return _doctor(command)


def _train(command: TrainCommand, overrides: Sequence[Override], words: Sequence[str]) -> int:
    from layerwise.cli import train

    request = train.TrainRequest(
        config=command.config,
        overrides=overrides,
        nproc=command.nproc,
        dry_run=command.dry_run,
        trace=command.trace,
        argv=words,
    )
    return train.run(request)


def _inspect(command: InspectCommand, overrides: Sequence[Override]) -> int:
    from layerwise.cli import inspect

    request = inspect.InspectRequest(
        model=command.target,
        overrides=[*overrides, *_shorthands(command)],
        world=command.world,
        explain=command.explain,
        as_json=command.json,
        every_row=command.all,
        places=command.places,
        trace=command.trace,
        record=command.record,
    )
    return inspect.run(request)


def _plan(command: PlanCommand) -> int:
    from layerwise.cli import plan
    from layerwise.cli.plan_request import PlanRequest
    from layerwise.dtypes import DType
    from layerwise.layout.cost import DEFAULT_HARDWARE

    given = {"ns_tflops": command.tflops, "link_gb_s": command.link_gb_s}
    request = PlanRequest(
        model=command.model,
        world=command.world,
        expert_parallel=command.ep,
        fsdp=command.fsdp,
        replicate=command.replicate,
        tensor_parallel=command.tp,
        layout=command.layout,
        param_dtype=DType(command.param_dtype) if command.param_dtype is not None else None,
        quantize=command.quantize,
        skip=tuple(filter(None, (glob.strip() for glob in command.skip.split(",")))),
        grad_dtype=DType(command.grad_dtype),
        bucket_mib=command.bucket_mib,
        rule=command.rule,
        tp_mode=command.tp_mode,
        reducer=command.reducer,
        shard_grads=command.shard_grads,
        hardware=replace(DEFAULT_HARDWARE, **{name: value for name, value in given.items() if value is not None}),
        as_json=command.json,
    )
    return plan.run(request)


def _shorthands(command: InspectCommand) -> list[Override]:
    """Short flags as the settings they stand for."""
    found = []
    if command.layout is not None:
        found.append(Override("--parallel.layout", (command.layout,)))
    if command.rules is not None:
        found.append(Override("--routing.rules-file", (command.rules,)))
    if command.strict:
        found.append(Override("--routing.strict", ("true",)))
    return found


def _ckpt(command: CkptCommand) -> int:
    from layerwise.cli import ckpt

    request = ckpt.CkptRequest(
        action=command.action,
        paths=command.paths,
        to=command.to,
        masters=command.masters,
        as_json=command.json,
    )
    return ckpt.run(request)


def _bench(command: BenchCommand) -> int:
    for name, value in (("--width", command.width), ("--layers", command.layers)):
        if value is not None and value < 1:
            complain(f"{name} must be 1 or more, got {value}.")
            return BAD_INPUT
        if value is not None and command.what == "ns":
            complain(f"bench ns takes no {name}: its matrices are given. bench step does.")
            return BAD_INPUT
    announce_torch()
    try:
        from layerwise.cli import bench
    except ImportError as error:
        complain(f"bench needs a package that cannot be imported: {error}. Run: pip install layerwise")
        return ENVIRONMENT
    return bench.run(
        bench.BenchRequest(what=command.what, width=command.width, layers=command.layers, as_json=command.json)
    )


def _doctor(command: DoctorCommand) -> int:
    from layerwise.cli import doctor

    return doctor.run(as_json=command.json)

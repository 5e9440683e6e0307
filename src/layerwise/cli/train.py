"""`layerwise train`: check everything, then train here or hand over to torchrun."""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, OK, announce_torch, complain, note, rank_from_environment
from layerwise.cli.parent import LAUNCHER, end_with_launcher
from layerwise.cli.settings import load_settings
from layerwise.config.load import Override, dump_toml
from layerwise.config.parallelism import world_problems
from layerwise.config.schema import TrainConfig, stop_signals_of
from layerwise.config.validate import trace_problems
from layerwise.errors import ConfigError, Problem
from layerwise.train.stop import stop_numbers

_MOST_RANKS_HERE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What the user asked for."""

    config: str | None
    overrides: Sequence[Override]
    nproc: int | None
    dry_run: bool
    trace: str | None
    """Where to write a timeline."""
    argv: Sequence[str]
    """The words after `layerwise`, to repeat them to torchrun."""


def run(request: TrainRequest) -> int:
    """Everything that can be wrong is found before torch is imported and before any process is started."""
    try:
        loaded = load_settings(request.config, request.overrides, _nproc_problems(request.nproc))
        _check_world(loaded.config, request)
        _check_trace(loaded.config, request.trace)
    except ConfigError as error:
        if rank_from_environment("LOCAL_RANK") == 0:  # once per machine: files may differ between machines
            complain(str(error))
        return BAD_INPUT
    if request.dry_run:
        print(dump_toml(loaded), end="")
        return OK
    if request.nproc is not None and request.nproc > 1:
        return _launch(request.nproc, loaded.config, request.argv)
    return _train_here(loaded.config, request.trace)


def _nproc_problems(nproc: int | None) -> list[Problem]:
    if nproc is None:
        return []
    if not 1 <= nproc <= _MOST_RANKS_HERE:
        return [Problem("--nproc", f"expected a number of ranks from 1 to {_MOST_RANKS_HERE}, got {nproc}.")]
    if "RANK" in os.environ:
        what = "this process was started by a launcher already (RANK is set), which decides the number of ranks."
        return [Problem("--nproc", f"{what} Leave --nproc out.")]
    return []


def _check_world(config: TrainConfig, request: TrainRequest) -> None:
    """Refuse a number of ranks that the config cannot be spread over, in every process of them alike and before any of
    them has met another."""
    launched = rank_from_environment("WORLD_SIZE") if "RANK" in os.environ else 0
    world = request.nproc or launched or (None if request.dry_run else 1)  # a dry run may be of any number of ranks
    problems = [] if world is None else world_problems(config.parallel, world)
    if problems:
        raise ConfigError(problems)


def _check_trace(config: TrainConfig, trace: str | None) -> None:
    problems = trace_problems(trace, config.train.steps)
    if problems:
        raise ConfigError(problems)


def torchrun_words(nproc: int, signals: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The torchrun arguments that start `layerwise` with the same words on `nproc` ranks of this machine."""
    words: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 2 if word == "--nproc" else 1
        if word != "--nproc" and not word.startswith("--nproc="):
            words.append(word)
    start = ["--standalone", "--nproc-per-node", str(nproc), "--signals-to-handle", ",".join(signals)]
    return [*start, "-m", "layerwise", *words]


def _launch(nproc: int, config: TrainConfig, argv: Sequence[str]) -> int:
    """Run torchrun in this process. Its summary is printed where a rank failed, its traceback after a signal is not."""
    if find_spec("torch") is None:
        complain("training needs torch, which is not installed. Run: pip install layerwise")
        return ENVIRONMENT
    # torchrun passes on its own default and the signals that stop a run.
    numbers = stop_numbers(
        tuple(dict.fromkeys(("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", *stop_signals_of(config.train))))
    )
    words = torchrun_words(nproc, [number.name for number in numbers], argv)
    # Without it every rank would start as many threads as there are cores.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // nproc))
    note(f"+ OMP_NUM_THREADS={threads} torchrun {shlex.join(words)}")
    # torchrun itself would complain that numpy is missing, which nothing here uses
    quiet = "ignore:Failed to initialize NumPy:UserWarning"
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), quiet)))
    os.environ["OMP_NUM_THREADS"] = threads
    os.environ[LAUNCHER] = str(os.getpid())
    note(f"starting {nproc} ranks")
    try:
        from layerwise.comm import launching
    except ImportError as error:
        return _lacks_a_package(error)
    code, summary = launching.launch(words, numbers)
    if summary:
        complain(summary)
    return code


def _train_here(config: TrainConfig, trace: str | None) -> int:
    """Train as the one rank that this process is."""
    end_with_launcher()
    if trace is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would tell every rank's user when it starts
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here uses it
    announce_torch()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # nothing writes into logits
    try:
        from layerwise.cli.rank import train_as_rank  # the first import of torch
    except ImportError as error:
        return _lacks_a_package(error)
    return train_as_rank(config, trace)


def _lacks_a_package(error: ImportError) -> int:
    complain(f"training needs a package that cannot be imported: {error}. Run: pip install layerwise")
    return ENVIRONMENT

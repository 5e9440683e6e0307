"""One rank of a training run: join the others, train, leave. Imports torch, so it is imported last."""

from __future__ import annotations

import os
import traceback
from contextlib import suppress

from layerwise.cli.console import TrainConsole
from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, FAILED, NO_ROOM, OK, complain, note
from layerwise.comm import joining
from layerwise.config.schema import TrainConfig
from layerwise.config.validate import TRACED_STEPS, corpus_files
from layerwise.errors import CheckpointError, ConfigError, PlanMismatchError
from layerwise.train.loop import train
from layerwise.train.metrics import MetricsFile
from layerwise.train.rundir import ConfigFile, RunDir, create_run_dir, write_report
from layerwise.units import format_nbytes


def train_as_rank(config: TrainConfig, trace: str | None = None) -> int:
    """Train and return the exit code; only rank 0 says anything but errors. With `trace` every rank writes a timeline."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts, and not later
    try:
        ranks = joining.init(device=config.train.device)
    except (ValueError, RuntimeError) as error:
        complain(f"this rank could not be started: {error}")
        return ENVIRONMENT
    try:
        if ranks.rank == 0:
            _train_and_tell(config, ranks, trace)
        else:
            train(config, ranks, trace=trace)
    except (CheckpointError, ConfigError, PlanMismatchError) as error:
        complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        complain("aborted.")
        return FAILED
    except Exception as error:
        # A full disk, a folder that cannot be made.
        if isinstance(error, OSError) and _is_of_run(error, config):
            complain(
                f"{error.filename or config.train.out_dir}: {error.strerror or error}. The run needs it and ends here."
            )
            return ENVIRONMENT
        # A bug, here or in what the user plugged in: all of it must be seen.
        complain(traceback.format_exc())
        return FAILED
    joining.stop()  # only after success: when another rank is gone, leaving in order would wait for it
    return OK


def _is_of_run(error: OSError, config: TrainConfig) -> bool:
    """Whether it is about a file of the run's folder, or of one beside it with a number. A file that is open already has no name
    in an error."""
    folder = config.train.out_dir
    if error.filename is None:
        return error.errno in NO_ROOM
    return str(error.filename).startswith((folder, os.path.abspath(folder)))


def _train_and_tell(config: TrainConfig, ranks: joining.Ranks, trace: str | None) -> None:
    """Rank 0's part: the same training, with a console, metrics and a report."""
    run_dir = create_run_dir(config)
    with run_dir.claimed():
        if run_dir.begin_anew(config):
            note(f"{run_dir.root}: the run in it came to no checkpoint, and is begun anew.")
        try:
            _train_in(run_dir, config, ranks, trace)
        except ConfigError:
            run_dir.discard()
            raise


def _announce_text(path: str) -> None:
    """Say how much text is read next, which may take seconds."""
    with suppress(OSError):  # the loader says what is wrong with it
        nbytes = sum(file.stat().st_size for file in corpus_files(path))
        note(f"reading {format_nbytes(nbytes)} of text")


def _train_in(run_dir: RunDir, config: TrainConfig, ranks: joining.Ranks, trace: str | None) -> None:
    metrics = MetricsFile(run_dir.metrics)
    console = TrainConsole(config.train.steps)
    _announce_text(config.data.path)
    try:
        watchers = (ConfigFile(run_dir, config), metrics, console)
        end = train(config, ranks, watchers, trace, run_dir.checkpoints)
    finally:
        console.close()
        metrics.close()
    if metrics.failure is not None:
        note(f"warning: {metrics.failure}")
    write_report(run_dir)
    if trace is not None and end.step >= TRACED_STEPS[0]:
        print(f"trace: {trace} (open it at https://ui.perfetto.dev)", flush=True)
    print(f"report: {run_dir.report} (beside it loss.svg, metrics.jsonl, config.json)", flush=True)

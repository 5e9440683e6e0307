"""One rank of a training run: join the others, train, leave. Imports torch, so it is imported last."""

from __future__ import annotations

import os
import traceback

from layerwise.cli.console import TrainConsole
from layerwise.cli.exits import BAD_INPUT, ENVIRONMENT, FAILED, OK, complain, note
from layerwise.comm import launch
from layerwise.config.schema import TrainConfig
from layerwise.errors import ConfigError, PlanMismatchError
from layerwise.train.loop import train
from layerwise.train.metrics import MetricsFile
from layerwise.train.rundir import create_run_dir, write_report


def train_as_rank(config: TrainConfig) -> int:
    """Train and return the exit code; only rank 0 says anything but errors."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts, and not later
    try:
        ranks = launch.start(device=config.train.device)
    except (ValueError, RuntimeError) as error:
        complain(f"this rank could not be started: {error}")
        return ENVIRONMENT
    try:
        if ranks.rank == 0:
            _train_and_tell(config, ranks)
        else:
            train(config, ranks)
    except (ConfigError, PlanMismatchError) as error:
        complain(str(error))
        return BAD_INPUT
    except KeyboardInterrupt:
        complain("aborted.")
        return FAILED
    except Exception:  # a bug, here or in what the user plugged in: all of it must be seen
        complain(traceback.format_exc())
        return FAILED
    launch.stop()  # only after success: when another rank is gone, leaving in order would wait for it
    return OK


def _train_and_tell(config: TrainConfig, ranks: launch.Ranks) -> None:
    """Rank 0's part: the same training, with a console, metrics and a report."""
    run_dir = create_run_dir(config)
    metrics = MetricsFile(run_dir.metrics)
    console = TrainConsole(config.train.steps)
    try:
        train(config, ranks, (metrics, console))
    finally:
        console.close()
        metrics.close()
    if metrics.failure is not None:
        note(f"warning: {metrics.failure}")
    write_report(run_dir)
    print(f"report: {run_dir.report} (beside it loss.svg, metrics.jsonl, config.json)", flush=True)

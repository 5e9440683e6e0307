"""The folder of a run: a fresh one, so that no run ever overwrites another, and the report that ends up in it."""

from __future__ import annotations

import fcntl
import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from layerwise.checkpoint.disk import PARTIAL
from layerwise.checkpoint.folder import found
from layerwise.config.load import dump_json
from layerwise.config.schema import TrainConfig
from layerwise.errors import ConfigError, Problem, warn
from layerwise.train.metrics import Record, RunRecord, read_metrics, replace_text
from layerwise.train.report import html_report, loss_curve


@dataclass(frozen=True, slots=True)
class RunDir:
    """Where the files of a run are."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """No other run writes in here meanwhile. A process that ends, however it does, claims nothing any more."""
        with open(self._lock, "a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = f"another run is at work in {str(self.root)!r}: expected one at a time. Wait for it, stop it, or name another folder."
                raise ConfigError([Problem("train.out_dir", what)]) from None
            except OSError:
                pass  # a file system without locks
            yield

    @property
    def came_to_nothing(self) -> bool:
        """Whether a run began in here, did not end, and left no checkpoint: nothing that another one could go on from."""
        if not self._lock.exists() or not self.config.exists():
            return False
        if any(
            PARTIAL not in path.name for path in self.checkpoints.glob("step_*")
        ):  # those that were set aside count, too
            return False
        return not self.metrics.exists() or not any(map(_is_worth_keeping, read_metrics(self.metrics)))

    def begin_anew(self, config: TrainConfig) -> bool:
        """Take away what a run left that came to nothing, and say whether it had begun. Only the process that claims the folder
        calls it."""
        if not self.came_to_nothing:
            return False
        had_begun = self.metrics.exists()
        self.metrics.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)  # holds parts of a checkpoint at most
        replace_text(self.config, dump_json(config))
        return had_begun

    def discard(self) -> None:
        """Leave nothing of a run that was refused before it began."""
        if self.metrics.exists() and not self.metrics.stat().st_size and not found(self.checkpoints):
            for path in (self.config, self.metrics, self._lock):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody has put something beside it
                self.root.rmdir()

    @property
    def _lock(self) -> Path:
        return self.root / ".lock"

    @property
    def curve(self) -> Path:
        return self.root / "loss.svg"

    @property
    def report(self) -> Path:
        return self.root / "report.html"


def _is_worth_keeping(record: Mapping[str, object]) -> bool:
    """Whether it is the end of a run, or the beginning of one that saves nothing, whose records are all that there is of it."""
    config = record.get("config")
    saves = config.get("checkpoint") if isinstance(config, Mapping) else None
    return record.get("kind") == "end" or (isinstance(saves, Mapping) and not saves.get("every"))


def create_run_dir(config: TrainConfig) -> RunDir:
    """Make the folder and put the resolved config in it. The first of `out_dir`, `out_dir-2`, ... that holds no run; or, with
    checkpoints, one to go on from, whose config is replaced once it does (see `ConfigFile`), or one to begin anew, where a run
    was killed before its first checkpoint (see `begin_anew`)."""
    goes_on = config.checkpoint.every and config.checkpoint.resume
    wanted = Path(config.train.out_dir)
    wanted = wanted if wanted.name else wanted.absolute()  # "." has no name to put a number behind
    for number in itertools.count(1):
        run = RunDir(wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}"))
        if goes_on and (found(run.checkpoints) or run.came_to_nothing):
            return run
        run.root.mkdir(parents=True, exist_ok=True)
        try:
            if not run.config.exists():
                run._lock.touch()  # before the config: the folder of whoever is killed in between is known as that of a run
            # "x": of two runs that start at once, one gets the name
            with run.config.open("x", encoding="utf-8") as file:
                file.write(dump_json(config))
        except FileExistsError:
            continue
        except OSError:  # a full disk: what is there would keep the name
            run.config.unlink(missing_ok=True)
            raise
        return run
    raise AssertionError("unreachable: there is always a next number")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Puts the config of a run that goes on in the place of the one before, once it was found to fit its checkpoints."""

    run: RunDir
    config: TrainConfig

    def write(self, record: Record) -> None:
        if isinstance(record, RunRecord) and record.first_step:
            try:
                replace_text(self.run.config, dump_json(self.config))
            except OSError as error:  # one rank alone must not end here
                warn(f"{self.run.config} is that of the run before: {error}. Training goes on.")


def write_report(run: RunDir) -> None:
    """Draw the loss curve and the summary page from what the run wrote down."""
    records = read_metrics(run.metrics)
    replace_text(run.curve, loss_curve(records) + "\n")
    replace_text(run.report, html_report(records))

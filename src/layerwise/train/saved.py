"""The checkpoints of a training run: how far it was, and how another run of the same command goes on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import nn

import layerwise
from layerwise.comm import joining
from layerwise.config.load import dump_json
from layerwise.config.schema import TrainConfig
from layerwise.errors import ConfigError, Problem, a_few


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    data: str
    """What decides which sample comes when, in words."""
    step: int = 0
    """Steps taken, skipped ones too."""
    samples: int = 0
    """Samples read, over all ranks."""
    first_val_bpb: float = math.nan
    """Validation before the first step."""
    world: int = 0
    """Number of ranks; 0 where an older checkpoint does not say."""
    tokens_per_step: int = 0
    """Over all ranks and microbatches; 0 where an older checkpoint does not say."""


@dataclass(frozen=True)
class Resumed:
    """The progress that a run resumes from, and the settings that changed since."""

    progress: Progress
    changes: tuple[str, ...] = ()
    """Settings, and sizes that follow from them, that the run before had otherwise: `optim.lr 0.01 -> 0.02`."""


@dataclass(frozen=True)
class Saved:
    """Where a run's checkpoints are, and what goes into them."""

    config: TrainConfig
    model: nn.Module
    optimizer: layerwise.Optimizer
    checkpoints: layerwise.Checkpoints | None
    """None where none are asked for."""

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        ranks: joining.Ranks,
        model: nn.Module,
        optimizer: layerwise.Optimizer,
        folder: Path | None,
    ) -> Saved:
        """The first rank says in which folder."""
        told = joining.from_first("" if folder is None else str(folder), ranks)
        asked = config.checkpoint
        checkpoints = None
        if asked.every and told:
            checkpoints = layerwise.Checkpoints(told, keep=asked.keep, background=asked.background)
        return cls(config, model, optimizer, checkpoints)

    def resume(self, start: Progress) -> Resumed:
        """Load the last checkpoint, and say how far its run was; the start, where there is none."""
        found = None
        if self.checkpoints is not None and self.config.checkpoint.resume:
            found = self.checkpoints.load(self.model, self.optimizer)
        if found is None:
            return Resumed(start)
        progress = Progress(**found.extra["progress"])
        if progress.data != start.data:
            what = (
                f"the checkpoint is of a run on other samples ({progress.data}; here {start.data}): expected the same."
            )
            raise ConfigError([Problem("data", f"{what} Set checkpoint.resume=false to begin a new run.")])
        differ = _differences(found.extra["config"], self.config)
        if differ:
            what = f"the checkpoint is of another model: {a_few(differ)}."
            raise ConfigError([Problem("model", f"{what} Set checkpoint.resume=false to begin a new run.")])
        steps = self.config.train.steps
        if progress.step > steps:
            what = f"the checkpoint is of step {progress.step}, past train.steps={steps}: expected as many or more."
            raise ConfigError([Problem("train.steps", f"{what} Set checkpoint.resume=false to begin a new run.")])
        return Resumed(progress, (*_changes(found.extra["config"], self.config), *_size_changes(progress, start)))

    def is_due(self, step: int) -> bool:
        return self.checkpoints is not None and step % self.config.checkpoint.every == 0

    @property
    def has_failed(self) -> bool:
        """Whether this rank knows that a checkpoint was not written. The next save says why, on every rank."""
        return self.checkpoints is not None and self.checkpoints.has_failed

    def finish(self) -> None:
        """Wait for the last one."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def save(self, progress: Progress) -> None:
        if self.checkpoints is not None:
            extra = {"progress": asdict(progress), "config": dump_json(self.config)}
            self.checkpoints.save(self.model, self.optimizer, step=progress.step, extra=extra)


def _differences(saved: str, config: TrainConfig) -> list[str]:
    """In which settings of the model two configs differ. Shapes are not all: as many weights may be of fewer heads."""
    theirs, ours = json.loads(saved)["model"], json.loads(dump_json(config))["model"]
    return [f"model.{name} was {theirs[name]}, here {ours[name]}" for name in theirs if theirs[name] != ours.get(name)]


def _changes(saved: str, config: TrainConfig) -> list[str]:
    """Settings that a saved config has otherwise. A setting that is newer than the checkpoint had its default."""
    theirs, ours, defaults = (json.loads(text) for text in (saved, dump_json(config), dump_json(TrainConfig())))
    pairs = [
        (f"{section}.{name}", theirs.get(section, {}).get(name, defaults[section][name]), value)
        for section, settings in ours.items()
        for name, value in settings.items()
    ]
    return [f"{path} {_shown(before)} -> {_shown(now)}" for path, before, now in pairs if before != now]


def _size_changes(before: Progress, now: Progress) -> list[str]:
    """Ranks and tokens of a step, where a checkpoint knows them and they are others now."""
    pairs = (("ranks", before.world, now.world), ("tokens per step", before.tokens_per_step, now.tokens_per_step))
    return [f"{what} {then} -> {today}" for what, then, today in pairs if then not in (0, today)]


def _shown(value: object) -> str:
    """A value as it is written in a config file, without quotes."""
    return "none" if value is None else value if isinstance(value, str) and value else json.dumps(value)

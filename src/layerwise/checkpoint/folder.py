"""A folder of checkpoints, one for every step that was saved: where the last one is, and which ones go."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from layerwise.checkpoint.contents import Contents
from layerwise.checkpoint.disk import PARTIAL, Presence, partial_of, read_manifest, sync_folder, write_files
from layerwise.checkpoint.loading import Loaded, load
from layerwise.checkpoint.saving import Saving, on_first, save_and_then
from layerwise.comm.groups import Groups, share
from layerwise.engine.engine import Engine
from layerwise.errors import CheckpointError, a_few, listed, warn
from layerwise.optim.optimizer import Optimizer

LATEST = "latest"
"""A file with the name of the last checkpoint, for people and scripts. Nobody here goes by it."""
ASIDE = "aside"
"""What checkpoints are called, behind their names, that are of no run that goes on."""
_NAME = re.compile(r"step_(\d{8,})")


class Checkpoints:
    """Checkpoints of one run, `step_00000100` and so on, of which the last few are kept.

    One that is there is whole: it gets its name when all of it is on disk. Deleting takes the name away first, and never the
    last one that is whole.

    Args:
        folder: where they are, a folder that all ranks share; made when it is not there.
        keep: number of checkpoints that stay, None for all of them. 3, since the last may be of a run that went wrong.
        background: training goes on while they are written, as in `layerwise.save`. False: `save()` returns when they are on disk.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | None = 3, background: bool = False) -> None:
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
            raise ValueError(f"keep must be a number of checkpoints, 1 or more, or None for all, got {keep!r}.")
        self.folder = Path(folder).absolute()  # one folder, wherever the process goes
        self.keep = keep
        self.background = background
        self._saving: Saving | None = None
        self._presence = Presence(self.folder)
        self._own: set[int] = set()
        """The steps that were saved here."""
        self._has_told = False
        self._there: set[int] = set()
        """The steps of which there was a checkpoint when this rank last looked: the first rank does."""
        self._last: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()
        """The step that each model has come to, as far as it was saved or loaded here."""

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint."""
        return sorted(found(self.folder))

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def save(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None = None,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """`layerwise.save` under the name of a step; older ones than are to be kept go. Call it on every rank. The step that was
        loaded or saved last is left as it is. After going back to an earlier step, checkpoints behind it are of a run that was
        given up: they are set aside under another name, with a warning."""
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step must be a number of steps, 0 or more, got {step!r}.")
        engine, path = Contents.of(model, optimizer).engine, self.path_of(step)
        groups = engine.groups
        engine.finish_errands()  # it may be of this step
        last = self._last.get(engine)
        since = step - 1 if last is None or step < last else last

        def make_way() -> None:
            self._warn_of_lost(step)
            if self._may_tidy(path):
                self._clean()
                self._set_aside(
                    since, "has loaded none of them" if last is None else f"went back before them, to step {since}"
                )

        if not _first_says(groups, path.exists() and step <= since):
            self._saving = save_and_then(
                path, model, optimizer, extra, partial(self._tidy, path), before=make_way, background=self.background
            )
        else:
            on_first(groups, make_way)
            on_first(groups, partial(self._tidy, path))
        self._last[engine] = step
        self._own.add(step)
        return path

    def wait(self) -> None:
        """Return when the last checkpoint is on disk, on every rank; raise if it cannot be."""
        if self._saving is not None:
            self._saving.wait()

    @property
    def has_failed(self) -> bool:
        """Whether saving the last one has ended in an error, which the next call raises. Ranks may come to know one after
        another."""
        return self._saving is not None and self._saving.has_failed

    def load(
        self,
        model: nn.Module | None,
        optimizer: Optimizer | None = None,
        *,
        step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        rename: Mapping[str, str] | None = None,
        missing: Sequence[str] = (),
        unused: Sequence[str] = (),
        reset: Sequence[str] = (),
    ) -> Loaded | None:
        """`layerwise.load` of a step, or of the last one that there is; None where there is none. Call it on every rank."""
        engine = Contents.of(model, optimizer).engine
        groups = engine.groups
        engine.finish_errands()
        steps = self.steps()
        last = _first_says(groups, steps[-1] if steps else None)
        if step is None and last is None:
            return None
        chosen = last if step is None else step
        self._there.update(steps)
        loaded = load(
            self.path_of(chosen),
            model,
            optimizer,
            extra=extra,
            rename=rename,
            missing=missing,
            unused=unused,
            reset=reset,
        )
        self._last[engine] = chosen
        return loaded

    def _set_aside(self, since: int, why: str) -> None:
        """Rename checkpoints of later steps, which are not of this run: `load()` would take one of them for its last, and the
        place of the coming one may be taken."""
        aside = []
        for number, path in sorted(found(self.folder).items()):
            if number > since:
                names = (f"{path.name}.{ASIDE}{count or ''}" for count in itertools.count())
                target = next(self.folder / name for name in names if not (self.folder / name).exists())
                os.rename(path, target)
                aside.append(target.name)
        if not aside:
            return
        left = found(self.folder)
        if left:
            self._point_at(left[max(left)])
        else:
            (self.folder / LATEST).unlink(missing_ok=True)
        sync_folder(self.folder)
        warn(
            f"{self.folder} had checkpoints of step {since + 1} or later, and this run {why}: they are called {listed(aside)} now. "
            "Delete what nobody needs."
        )

    def _point_at(self, path: Path) -> None:
        """Say which is the last."""
        pointer, text = self.folder / LATEST, f"{path.name}\n".encode()
        if pointer.is_file() and pointer.read_bytes() == text:
            return
        self._unnamed_pointer.unlink(missing_ok=True)
        try:
            write_files(self.folder, {self._unnamed_pointer.name: text})
            os.rename(self._unnamed_pointer, pointer)
        except OSError:
            self._unnamed_pointer.unlink(missing_ok=True)
            raise
        sync_folder(self.folder)

    @property
    def _unnamed_pointer(self) -> Path:
        return self.folder / f".{LATEST}{PARTIAL}"

    def _warn_of_lost(self, step: int) -> None:
        """Say that checkpoints are gone which were there a while ago: deleted, or on a disk that is not mounted any more."""
        lost = self._there - set(found(self.folder))
        if lost and lost == self._there:
            self._there = set()
            steps = a_few([str(number) for number in sorted(lost)])
            where = "they are gone" if self.folder.is_dir() else "it is gone"
            warn(
                f"{self.folder} had checkpoints of steps {steps}, and {where}: expected nobody to delete them while this run saves there. "
                f"Look whether its disk is still mounted. Step {step} is saved there all the same."
            )

    def _may_tidy(self, path: Path) -> bool:
        """Whether what else is in the folder is this run's to delete and rename. Another run that saves there now has checkpoints to
        keep that this one knows nothing of."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._presence.is_alone():
            return True
        if partial_of(path).exists() and not path.exists():
            raise CheckpointError(
                f"{partial_of(path)} is there, and another run saves into {self.folder}: expected one run to save under a name. Give every "
                "run a folder of its own."
            )
        if not self._has_told:
            self._has_told = True
            warn(
                f"another run saves into {self.folder} too: what it has written stays, and only what this run has saved is deleted as it "
                "gets old. Give every run a folder of its own."
            )
        return False

    def _clean(self) -> None:
        """Delete what was begun in the folder and not finished: it takes the room of what is written next."""
        with suppress(OSError):  # what does not go is no reason not to save
            self._unnamed_pointer.unlink(missing_ok=True)
        for path in _left_behind(self.folder):
            shutil.rmtree(path, ignore_errors=True)

    def _tidy(self, newest: Path) -> None:
        """Say which is the last, and let go of the oldest, once it is certain that the newest is whole. It has its name: what goes
        wrong with anything else is no error of saving it."""
        _check_sizes(newest)
        try:
            with suppress(OSError):  # on a full disk there is room for it once the oldest are gone
                self._point_at(newest)
            self._let_go(newest)
            self._point_at(newest)
        except OSError as error:
            warn(f"{newest} is saved; what else was to be done in its folder failed: {error}.")
        self._there = set(found(self.folder))

    def _let_go(self, newest: Path) -> None:
        """Delete the oldest, and what was not finished."""
        is_alone = self._presence.is_alone()
        if is_alone:
            self._clean()
        if self.keep is None:
            return
        older = [
            path for step, path in found(self.folder).items() if path != newest and (is_alone or step in self._own)
        ]
        for path in sorted(older)[: max(0, len(older) + 1 - self.keep)]:
            going = partial_of(path)
            os.rename(
                path, going
            )  # whoever is killed in the middle of this leaves nothing that looks like a checkpoint
            sync_folder(self.folder)
            shutil.rmtree(going)


def found(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step."""
    if not folder.is_dir():
        return {}
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in matches if match is not None and path.is_dir()}


def _left_behind(folder: Path) -> list[Path]:
    """What those who were killed have not finished, writing or deleting."""
    return [
        path
        for path in folder.iterdir()
        if path.name.endswith(PARTIAL) and _NAME.fullmatch(path.name.removesuffix(PARTIAL)) and path.is_dir()
    ]


def _check_sizes(path: Path) -> None:
    for name, facts in read_manifest(path).files.items():
        nbytes = (path / name).stat().st_size
        if nbytes != facts.nbytes:
            raise CheckpointError(
                f"{path / name} has {nbytes} bytes, expected {facts.nbytes}: older checkpoints are kept."
            )


def _first_says(groups: Groups, value: Any) -> Any:
    """The first rank's word: folders that ranks share may look different to each for a while."""
    return share(groups, lambda: {"value": value})[0]["value"]

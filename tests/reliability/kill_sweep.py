"""S1, kill_sweep: kill -9 of one rank or of all of them, at every event on the file system while a checkpoint is saved, in the middle of writes, and at random
times. The checkpoint before it is whole, to the bit; the new one is whole or not there; and the next save works.

Two ranks have a folder with steps 1 and 2 and save step 3, after which step 1 goes; once while they wait for it, and once in the background, while they take
another step. The folders that killed ranks leave behind are looked at by ranks that are new. With sabotage the saver writes over step 2 in place.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

import layerwise
from layerwise.checkpoint.folder import ASIDE
from layerwise.errors import CheckpointError
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.reliability.training import Training, small

WORLD = 2
OLD, LAST, NEW = 1, 2, 3
"""Steps: what goes, what is there, what is being saved."""
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree", "os.truncate")
WRITE = "write"
RANDOM_TIMES = 40
WRITES = 12
"""In the middle of how many writes, on each rank."""
AT_ONCE = 4
"""Trials that run beside each other: most of the time they wait."""


class Kill(NamedTuple):
    """Who is killed, and when."""

    rank: int
    event: int | None
    """Before which of its events, or in the middle of it if that is a write; None for a time."""
    everyone: bool
    at: float = 0.0
    """Seconds after the save has begun."""
    what: str = ""
    background: bool = False
    """Whether training goes on meanwhile."""

    @property
    def name(self) -> str:
        who = f"all ranks by rank {self.rank}" if self.everyone else f"rank {self.rank}"
        who += ", saving in the background," if self.background else ""
        when = f"after {self.at:.4f} s" if self.event is None else f"at event {self.event}, {self.what}"
        return f"kill -9 of {who} {when}"


class Events:
    """Counts what this process does to a folder, and ends it at one of these events."""

    def __init__(self, folder: str, kill: Kill | None, pids: Sequence[int]) -> None:
        self.folder, self.kill, self.pids = folder, kill, pids
        self.seen: list[str] = []
        self.active = False

    def is_due(self, what: str) -> bool:
        if not self.active:
            return False
        self.seen.append(what)
        return self.kill is not None and self.kill.event == len(self.seen) - 1

    def end(self) -> None:
        assert self.kill is not None
        for pid in (*self.pids, os.getpid()) if self.kill.everyone else (os.getpid(),):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What happens in here counts."""
        real_write, real_fsync = os.writev, os.fsync

        def hook(event: str, args: tuple[Any, ...]) -> None:
            # Names alone are of folders that are being deleted.
            is_ours = event in EVENTS and (str(args[0]).startswith(self.folder) or "/" not in str(args[0]))
            if is_ours and self.is_due(event):
                self.end()

        def write(descriptor: int, parts: Sequence[bytes | memoryview]) -> int:
            if self.is_due(WRITE):
                data = b"".join(parts)
                real_write(descriptor, [data[: len(data) // 2]])
                self.end()
            return real_write(descriptor, parts)

        def fsync(descriptor: int) -> None:
            if self.is_due("fsync"):
                self.end()
            real_fsync(descriptor)

        sys.addaudithook(hook)
        with mock.patch.object(os, "writev", write), mock.patch.object(os, "fsync", fsync):
            self.active = True
            yield
            self.active = False


def save_and_die(
    rank: int, world: int, folder: str, kill: Kill | None, in_place: bool, background: bool = False
) -> tuple[list[str], float]:
    """Save step 3; who lives on says what events there were, and how long it took."""
    training = _at(rank, NEW)
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    mine = kill if kill is not None and kill.rank == rank else None
    events = Events(folder, mine, [pid for pid in pids if pid != os.getpid()])
    begin = time.monotonic()
    if mine is not None and mine.event is None and not os.fork():
        time.sleep(mine.at)  # the child does the killing: whatever its parent does meanwhile
        for pid in pids if mine.everyone else (pids[rank],):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)
    with events.watched():
        if in_place:
            _save_in_place(Path(folder), training)
        elif background:
            checkpoints = layerwise.Checkpoints(folder, keep=2, background=True)
            checkpoints.save(training.model, training.optimizer, step=NEW)
            training.step(rank, NEW)
            checkpoints.wait()
        else:
            _save(Path(folder), training)
    return events.seen, time.monotonic() - begin


def _at(rank: int, step: int) -> Training:
    training = small()
    for number in range(step):
        training.step(rank, number)
    return training


def _save(folder: Path, training: Training, step: int = NEW, keep: int | None = 2) -> None:
    layerwise.Checkpoints(folder, keep=keep).save(training.model, training.optimizer, step=step)


def _save_in_place(folder: Path, training: Training) -> None:
    """What is new is written over what is there, file by file."""
    last = layerwise.Checkpoints(folder).path_of(LAST)
    layerwise.save(folder.with_name(f"{folder.name} aside"), training.model, training.optimizer)
    if dist.get_rank() == 0:
        for file in sorted(folder.with_name(f"{folder.name} aside").iterdir()):
            shutil.copyfile(file, last / file.name)


def begin(rank: int, world: int, folder: str) -> None:
    """Steps 1 and 2."""
    for step in (OLD, LAST):
        _save(Path(folder), _at(rank, step), step, keep=None)


def look(rank: int, world: int, folders: Sequence[str]) -> list[str]:
    """What is wrong with what was left behind."""
    expected = {step: _at(rank, step).hash() for step in (OLD, LAST, NEW)}
    training = small()
    return ["; ".join(_faults(rank, Path(folder), training, expected)) for folder in folders]


def _faults(rank: int, folder: Path, training: Training, expected: dict[int, str]) -> Iterator[str]:
    checkpoints = layerwise.Checkpoints(folder, keep=2)
    steps = checkpoints.steps()
    dist.barrier()
    if LAST not in steps or not set(steps) <= set(expected):
        yield f"there are steps {steps}"
        return
    for step in steps:
        try:
            loaded = checkpoints.load(training.model, training.optimizer, step=step)
        except CheckpointError as error:
            yield f"step {step} is lost: {str(error)[:150]}"
            return
        if loaded is None or loaded.step != step or training.hash() != expected[step]:
            yield f"step {step} is not what was saved"
            return
    checkpoints.load(training.model, training.optimizer, step=LAST)
    training.step(rank, LAST)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was whole at the kill is of a run that went on without us
        checkpoints.save(training.model, training.optimizer, step=NEW)
    for aside in folder.glob(f"*.{ASIDE}") if rank == 0 and NEW in steps else ():
        shutil.rmtree(aside)
    dist.barrier()
    after = checkpoints.load(training.model, training.optimizer)
    if after is None or after.step != NEW or training.hash() != expected[NEW]:
        yield "the next save is not what was saved"
    if checkpoints.steps() != [LAST, NEW]:
        yield f"after the next save there are steps {checkpoints.steps()}"
    left = sorted(path.name for path in folder.iterdir())
    if left != ["latest", *(checkpoints.path_of(step).name for step in (LAST, NEW))]:
        yield f"after the next save there are {left}"
    dist.barrier()


def kills(seen: Sequence[Sequence[str]], seconds: float, *, background: bool, quick: bool) -> list[Kill]:
    """Every event of every rank, some writes, random times; each for one rank, and for all of them."""
    found = []
    for rank, events in enumerate(seen):
        writes = [place for place, what in enumerate(events) if what == WRITE]
        few = set(writes[:: max(1, len(writes) // WRITES)])
        places = [place for place, what in enumerate(events) if what != WRITE or place in few]
        for place in places:
            found += [Kill(rank, place, everyone, what=events[place]) for everyone in (False, True)]
    drawn = random.Random(1)
    found += [
        Kill(number % WORLD, None, number % 4 > 1, at=drawn.uniform(0, 1.1 * seconds)) for number in range(RANDOM_TIMES)
    ]
    found = [kill._replace(background=background) for kill in found]
    return found[:: max(1, len(found) // (3 if background else 6))] if quick else found


def kills_in_place(seen: Sequence[Sequence[str]]) -> list[Kill]:
    """While files are written over others, which is when the new ones are whole."""
    events = seen[0]
    last = len(events) - 1 - events[::-1].index("os.rename")
    places = [place for place in range(last, len(events)) if events[place] == "open"]
    return [Kill(0, place, everyone=False, what="open") for place in places]


def _try(template: Path, in_place: bool, folder: Path, kill: Kill) -> bool:
    """Kill once; whether that was in time."""
    shutil.copytree(template, folder)
    try:
        run_ranks(WORLD, save_and_die, str(folder), kill, in_place, kill.background, pg_timeout_s=30.0)
    except RankFailure:
        return True
    return False


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every kill; with sabotage a few, and a saver that writes in place."""
    with tempfile.TemporaryDirectory() as name:
        template = Path(name, "template")
        run_ranks(WORLD, begin, str(template))
        found: list[Kill] = []
        for background in (False,) if sabotage else (False, True):
            rehearsal = Path(name, f"rehearsal {background}")
            shutil.copytree(template, rehearsal)
            answers = run_ranks(WORLD, save_and_die, str(rehearsal), None, sabotage, background)
            seen, took = [events for events, _ in answers], max(seconds for _, seconds in answers)
            found += kills_in_place(seen) if sabotage else kills(seen, took, background=background, quick=quick)
        folders = [Path(name, str(number)) for number in range(len(found))]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            hit = list(pool.map(partial(_try, template, sabotage), folders, found))
        texts = run_ranks(WORLD, look, list(map(str, folders)), timeout_s=1200.0)
    complaints = {
        kill.name: "; ".join(dict.fromkeys(text[number] for text in texts if text[number]))
        for number, kill in enumerate(found)
    }
    late = [kill.name for kill, was in zip(found, hit, strict=True) if not was and kill.event is not None]
    complaints.update({f"{name} came too late": "nobody was killed" for name in late})
    return tally(complaints)

"""S11, corrupt: a bit flipped, an end cut off, a file gone, another one in its place. Every rank refuses the checkpoint, in words that
name a file, and goes on with what it has, unchanged to the bit.

Two ranks write two checkpoints, of which one is damaged in one way at a time and then mended. Sizes, digests and contents of all files
are covered: data, manifest, and what is there for torch alone. With sabotage load() is told not to check files.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import torch.distributed as dist

import layerwise
from layerwise.errors import CheckpointError, StateError
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.reliability.training import Training, small
from tests.worlds import anywhere

WORLD = 2
DATA, MANIFEST, FOR_TORCH = tuple(f"__{rank}_0.distcp" for rank in range(WORLD)), "manifest.json", ".metadata"
FILES = (*DATA, MANIFEST, FOR_TORCH)
FLIPS, TRUNCATIONS = {False: 240, True: 40}, {False: 60, True: 12}
"""How many, in full and quick; of zeros and blocks together as many as truncations."""


PLACED = ("flip", "cut", "zeros", "blocks")
"""Damages that are somewhere in a file: a bit is another one, the rest is gone, a stretch is zero, two blocks have changed places."""


class Damage(NamedTuple):
    """What happens to a file."""

    kind: str
    file: str
    place: float = 0.0
    """Where in the file, as a part of its length."""
    bit: int = 0

    @property
    def name(self) -> str:
        where = f" at {self.place:.4f}, bit {self.bit}" if self.kind in PLACED else ""
        return f"{self.kind} {self.file}{where}"

    @property
    def named(self) -> tuple[str, ...]:
        """Files of which the error has to name one."""
        return (self.file,) if self.kind in (*PLACED, "lengthen", "remove") else FILES

    def apply(self, folder: Path, other: Path) -> None:
        """To a file of a checkpoint; `other` is another checkpoint of the same model."""
        file = folder / self.file
        text = bytearray(file.read_bytes())
        place = int(self.place * len(text))
        match self.kind:
            case "flip":
                text[place] ^= 1 << self.bit
                file.write_bytes(text)
            case "cut":
                file.write_bytes(text[:place])
            case "zeros":
                text[place : place + 512] = bytes(len(text[place : place + 512]))
                text[place] ^= text == file.read_bytes()
                file.write_bytes(text)
            case "blocks":
                one, other = text[place : place + 64], text[place + 64 : place + 128]
                text[place : place + 128] = other + one
                text[place] ^= text == file.read_bytes()
                file.write_bytes(text)
            case "lengthen":
                file.write_bytes(text + b"\0")
            case "remove":
                file.unlink()
            case "take from another checkpoint":
                shutil.copyfile(other / self.file, file)
            case "exchange with its neighbour":
                neighbour = folder / FILES[(FILES.index(self.file) + 1) % len(FILES)]
                file.write_bytes(neighbour.read_bytes())
                neighbour.write_bytes(text)
            case _:
                raise ValueError(f"{self.kind} is no damage")


def damages(*, quick: bool) -> Iterator[Damage]:
    random = Random(11)
    for number in range(FLIPS[quick]):
        yield Damage("flip", FILES[number % len(FILES)], random.random(), random.randrange(8))
    for number in range(TRUNCATIONS[quick]):
        # The last byte, all but the first, everything, and anything in between.
        place = (0.999_999_9, 0.000_1, 0.0)[number] if number < 3 else random.random()
        yield Damage("cut", FILES[number % len(FILES)], place)
    for number in range(TRUNCATIONS[quick]):
        yield Damage(("zeros", "blocks")[number % 2], FILES[number // 2 % len(FILES)], random.random())
    for kind in ("remove", "lengthen", "take from another checkpoint", "exchange with its neighbour"):
        for file in FILES:
            yield Damage(kind, file)


def damage_all(rank: int, world: int, folder: str, found: list[Damage], verify: bool) -> dict[str, str]:
    """What is wrong with how each damage was met, on this rank."""
    live, other, whole = Path(folder, "live"), Path(folder, "other"), Path(folder, "whole")
    training = small()
    training.step(rank, 0)
    # An extra tensor, so that no file of the other one is the same.
    layerwise.save(other, training.model, training.optimizer, extra={"more": torch.zeros(3)})
    training.step(rank, 1)
    layerwise.save(live, training.model, training.optimizer)
    saved = training.hash()
    if rank == 0:
        shutil.copytree(live, whole)
    training, before = _gone_on(rank)
    answers = {}
    for damage in found:
        if rank == 0:
            damage.apply(live, other)
        dist.barrier()
        answers[damage.name] = _complaint(damage, live, training, before, verify=verify)
        if anywhere([text for text in [answers[damage.name]] if text]):
            training, before = _gone_on(rank)
        if rank == 0:
            shutil.rmtree(live)
            shutil.copytree(whole, live)
        dist.barrier()
    layerwise.load(live, training.model, training.optimizer, verify=verify)
    answers["no damage"] = "" if training.hash() == saved else "the whole checkpoint does not bring back what was saved"
    return answers


def _gone_on(rank: int) -> tuple[Training, str]:
    """What is live, and its hash: a step further than what was saved, so that any part of that would show."""
    training = small()
    for number in range(3):
        training.step(rank, number)
    return training, training.hash()


def _complaint(damage: Damage, live: Path, training: Training, before: str, *, verify: bool) -> str:
    try:
        layerwise.load(live, training.model, training.optimizer, verify=verify)
        return "it was loaded"
    except CheckpointError as error:
        if not any(file in str(error) for file in damage.named):
            return f"the error names none of {damage.named}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    try:
        return "" if training.hash() == before else "it was refused, and what was live has changed"
    except StateError as error:
        return f"it was refused half way: {error}"


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every damage, refused on both ranks; with sabotage nobody looks."""
    found = list(damages(quick=quick))
    with tempfile.TemporaryDirectory() as folder:
        try:
            answers = run_ranks(WORLD, damage_all, folder, found, not sabotage)
        except RankFailure as failure:
            return tally({"all of them": str(failure)[-300:]})
    return tally(
        {
            name: "; ".join(f"rank {rank}: {theirs[name]}" for rank, theirs in enumerate(answers) if theirs.get(name))
            for name in answers[0]
        }
    )

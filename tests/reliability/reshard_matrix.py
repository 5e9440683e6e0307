"""S3, reshard_matrix: what 1, 2, 4 or 8 ranks have saved, 1, 2, 3, 4 or 8 ranks load, and what one layout has saved, another: padded, compact and torch's
FSDP2 in every order. Weights, masters, state and the step after it are those of an oracle that knows of no ranks, to the bit.

With sabotage one rank reads one box of a momentum a row too early.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from layerwise.checkpoint.files import Reader, Wanted
from tests.crossings import RULES, Crossing, Ranks, Sabotage, load_all, save_all
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally

SAVED, LOADED = (1, 2, 4, 8), (1, 2, 3, 4, 8)
SWAPPED = ("padded", "compact", "fsdp")
DTYPES = (torch.float32, torch.bfloat16)


def crossings() -> list[Crossing]:
    """Numbers of ranks, each with each; then layouts. Rules and dtypes take turns."""
    pairs = [(Ranks("flat", saved), Ranks("flat", loaded)) for saved, loaded in itertools.product(SAVED, LOADED)]
    swaps = [(Ranks(saved, 4), Ranks(loaded, 3)) for saved, loaded in itertools.permutations(SWAPPED, 2)]
    found = []
    for number, (saved, loaded) in enumerate((*pairs, *swaps)):
        turn = number // len(LOADED)  # what is saved once is loaded on each number of ranks
        dtype = DTYPES[turn % len(DTYPES)]
        found.append(Crossing(saved, loaded, RULES[turn % len(RULES)], dtype, dtype))
    return found


def complaints_of(chosen: Sequence[Crossing], sabotage: Sabotage | None = None) -> dict[str, str]:
    """What is not as the oracle has it, by crossing. All that is done on as many ranks is done on the same ones."""
    texts: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for world in SAVED:
                new = {one.file: one for one in chosen if one.saved.world == world}
                if new:
                    for found in run_ranks(world, save_all, folder, list(new.values())):
                        texts += found
            for world in LOADED:
                mine = [one for one in chosen if one.loaded.world == world]
                if mine:
                    for found in run_ranks(world, load_all, folder, mine, sabotage):
                        texts += found
        except RankFailure as failure:
            return {str(one): str(failure)[-300:] for one in chosen}
    return {
        str(one): "; ".join(text for text in texts if text.startswith((f"{one}, ", f"{one.file}, "))) for one in chosen
    }


@contextmanager
def _shifted(rank: int) -> Iterator[None]:
    """The last rank reads one box of a momentum a row too early."""
    done: list[str] = []
    real = Reader.read_all

    def shifted(one: Wanted) -> Wanted:
        if one.key.endswith(".momentum") and one.box.starts[0] and not done and rank == dist.get_world_size() - 1:
            done.append(one.key)
            return one._replace(box=one.box.moved(-1))
        return one

    def read_all(self: Reader, wanted: Iterable[Wanted]) -> None:
        real(self, map(shifted, wanted))

    with mock.patch.object(Reader, "read_all", read_all):
        yield


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """All of them; quick has no more than 4 ranks. With sabotage two of them, one by each way to cut."""
    found = crossings()
    if sabotage:
        wanted = (Ranks("flat", 2), Ranks("flat", 2)), (Ranks("padded", 4), Ranks("fsdp", 3))
        return tally(complaints_of([one for one in found if (one.saved, one.loaded) in wanted], _shifted))
    if quick:
        found = [one for one in found if max(one.saved.world, one.loaded.world) <= 4][::4]
    return tally(complaints_of(found))

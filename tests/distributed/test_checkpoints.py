"""A checkpoint belongs to the model: whatever ranks, layouts and wrappers have written it, any others go on from it, bit for
bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from layerwise.checkpoint.files import Reader, Wanted
from tests.crossings import KINDS, RULES, Crossing, Cut, Ranks, Sabotage, load_all, load_weights, save_all
from tests.marks import sampled
from tests.ranks import run_ranks

FP32, BF16 = torch.float32, torch.bfloat16
WORLDS = (1, 2, 3, 4)
DTYPES = ((FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16))


def crossing(saves: str, loads: str) -> Crossing:
    """From one kind to another. Numbers of ranks, rules and dtypes take turns, so that all of them meet."""
    names = list(KINDS)
    number, other = names.index(loads), names.index(saves)
    ours, theirs = KINDS[loads].worlds, KINDS[saves].worlds
    turn = (number * len(names) + other) // len(ours)
    dtype, into = DTYPES[(3 * number + other // 2) % len(DTYPES)]
    return Crossing(
        Ranks(saves, theirs[turn % len(theirs)]),
        Ranks(loads, ours[(number + other) % len(ours)]),
        RULES[(number + other // 2) % len(RULES)],
        BF16 if KINDS[saves].codes else dtype,
        BF16 if KINDS[loads].codes else into,
    )


def named(ranks: Ranks) -> str:
    return f"{ranks.kind} {ranks.world}"


CROSSINGS = [crossing(saves, loads) for loads in KINDS for saves in KINDS]
ROUND = [crossing(saves, list(KINDS)[(number + 7) % len(KINDS)]) for number, saves in enumerate(KINDS)]
"""Every kind once as what saves, and once as what loads: what everybody runs."""


def test_every_kind_goes_to_every_kind_and_every_number_of_ranks_to_every_other() -> None:
    def worlds(chosen: list[Crossing]) -> set[tuple[int, int]]:
        return {(one.saved.world, one.loaded.world) for one in chosen}

    assert {(one.saved.kind, one.loaded.kind) for one in CROSSINGS} == {(a, b) for a in KINDS for b in KINDS}
    assert worlds(CROSSINGS) == {(a, b) for a in WORLDS for b in WORLDS}
    for kind, of in KINDS.items():
        saves, loads = ([one for one in CROSSINGS if one[side].kind == kind] for side in (0, 1))
        assert {one.rule for one in saves} == {one.rule for one in loads} == set(RULES)
        assert {(one.dtype, one.into) for one in loads} == {pair for pair in DTYPES if not of.codes or pair[1] == BF16}
        assert {one.saved.world for one in saves} == {one.loaded.world for one in loads} == set(of.worlds)
    assert {one.rule for one in ROUND} == set(RULES)
    assert {(one.dtype, one.into) for one in ROUND} == set(DTYPES)
    assert len(worlds(ROUND)) > 8


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints of all tests here are: each is written once."""
    return tmp_path_factory.mktemp("crossings")


def save(folder: Path, chosen: list[Crossing]) -> list[str]:
    """Save what is not there yet. All that is done on as many ranks is done on the same ones."""
    found: list[str] = []
    for world in WORLDS:
        new = {one.file: one for one in chosen if one.saved.world == world and not (folder / one.file).exists()}
        if new:
            found += [text for texts in run_ranks(world, save_all, str(folder), list(new.values())) for text in texts]
    return found


def cross(folder: Path, chosen: list[Crossing], sabotage: Sabotage | None = None) -> list[str]:
    """Save what is not there yet, load all of it, and bring home what is not as the oracle has it."""
    found = save(folder, chosen)
    for world in WORLDS:
        mine = [one for one in chosen if one.loaded.world == world]
        if mine:
            found += [text for texts in run_ranks(world, load_all, str(folder), mine, sabotage) for text in texts]
    return found


@pytest.mark.parametrize("world", sampled(WORLDS, 2))
def test_what_any_kind_has_saved_another_loads_to_the_bit(folder: Path, world: int) -> None:
    found = cross(folder, [one for one in ROUND if one.loaded.world == world])
    assert not found, "\n".join(found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("loads", sorted({one.loaded for one in CROSSINGS}), ids=named)
def test_what_every_kind_has_saved_is_loaded_to_the_bit(folder: Path, loads: Ranks) -> None:
    found = cross(folder, [one for one in CROSSINGS if one.loaded == loads])
    assert not found, "\n".join(found[:20])


CUTS = [Ranks(name, world) for name, kind in KINDS.items() if isinstance(kind, Cut) for world in kind.worlds]


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_weights_alone_go_into_any_module(folder: Path, world: int) -> None:
    """Masters, where there are any: a model that is loaded in fp32 has all of their digits."""
    chosen = [
        Crossing(Ranks("flat", 3), to, "muon", BF16, (FP32, BF16)[number % 2])
        for number, to in enumerate(CUTS)
        if to.world == world
    ]
    save(folder, chosen[:1])
    found = [text for texts in run_ranks(world, load_weights, str(folder), chosen) for text in texts]
    assert not found, "\n".join(found[:20])


# ------------------------------------------------------------------------------------------------ what must be seen

Read = Callable[[Reader, Iterable[Wanted]], None]


@contextmanager
def reading(change: Callable[[Read], Read]) -> Iterator[None]:
    with mock.patch.object(Reader, "read_all", change(Reader.read_all)):
        yield


def one_ulp(rank: int) -> AbstractContextManager[None]:
    """The last rank reads one element of a momentum wrong, in the last place."""
    done: list[str] = []

    def change(real: Read) -> Read:
        def read_all(self: Reader, wanted: Iterable[Wanted]) -> None:
            everything = list(wanted)
            real(self, everything)
            for key, _, into in everything:
                if key.endswith(".momentum") and into.numel() and not done and rank == dist.get_world_size() - 1:
                    first = into.view(-1)[:1]
                    first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))
                    done.append(key)

        return read_all

    return reading(change)


def one_box_missing(rank: int) -> AbstractContextManager[None]:
    """The last rank does not read one box of one moment."""
    done: list[str] = []

    def change(real: Read) -> Read:
        def is_read(one: Wanted) -> bool:
            if one.key.endswith(".exp_avg_sq") and one.into.numel() and not done and rank == dist.get_world_size() - 1:
                done.append(one.key)
                return False
            return True

        return lambda self, wanted: real(self, filter(is_read, wanted))

    return reading(change)


@pytest.mark.parametrize("loads", [Ranks("flat", 2), Ranks("fsdp", 2)], ids=named)
@pytest.mark.parametrize(
    ("sabotage", "words"), [(one_ulp, "momentum of "), (one_box_missing, "exp_avg_sq of ")], ids=["ulp", "box"]
)
def test_an_element_that_was_read_wrong_is_seen(folder: Path, loads: Ranks, sabotage: Sabotage, words: str) -> None:
    one = Crossing(Ranks("compact", 2), loads, "muon", FP32, FP32)
    found = cross(folder, [one], sabotage)
    assert [text for text in found if text.startswith(f"{one}, rank 1: {words}")], found
    assert not [text for text in found if "before saving" in text]

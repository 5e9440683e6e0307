"""What a regression is: a check on real ranks, and mistakes that the check must see.

A check trains, compares and returns complaints; none means that the library is right. A mistake is put into the library
inside the forked ranks, by replacing the real function, and the same check runs again: it has to complain, or the
library has to refuse, in the words that the mistake names. A hang is neither: it fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import layerwise
from layerwise.comm.collectives import Communicator
from layerwise.comm.facts import gather_facts
from layerwise.layout.buckets import BucketPlan, BufferKey
from layerwise.layout.plan import Plan
from tests import arrangements, worlds
from tests.arrangements import Arrangement, train_arranged
from tests.worlds import train_and_compare

Check = Callable[[int, int], list[str]]
"""Runs on every rank with its number and how many there are; returns complaints."""
Also = Callable[[layerwise.DataParallel, layerwise.Optimizer], list[str]]
"""Looked at on every rank after every step of a parity run, beside the comparison with the oracle."""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """What somebody did wrong, and how our check sees it."""

    what: str
    put_in: Callable[[int], AbstractContextManager[Any]]
    """Puts it into the library on a rank, for as long as the context lasts."""
    seen_as: str | tuple[str, ...]
    """Regular expressions: what complaints or an error say then. All of them must be found."""

    def is_missed_by(self, texts: Sequence[str]) -> list[str]:
        """Expressions that no text matches."""
        wanted = (self.seen_as,) if isinstance(self.seen_as, str) else self.seen_as
        return [pattern for pattern in wanted if not any(re.search(pattern, text) for text in texts)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recorded regression. The check's docstring tells what went wrong and what makes it impossible here."""

    name: str
    title: str
    world: int
    check: Check
    mistakes: tuple[Mistake, ...]


def observe(
    rank: int, world: int, check: Check, put_in: Callable[[int], AbstractContextManager[Any]] | None = None
) -> list[str]:
    """A check on this rank; with a mistake in place an error counts as a complaint."""
    if put_in is None:
        return check(rank, world)
    with put_in(rank):
        try:
            return check(rank, world)
        except Exception as error:
            return [f"rank {rank}: {type(error).__name__}: {error}"]


def in_place_of(owner: Any, name: str, make: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """`make(real)` in the place of `owner.name`."""
    return mock.patch.object(owner, name, make(getattr(owner, name)))


def arranged(rank: int, world: int, arrangement: Arrangement, also: Also | None = None) -> list[str]:
    """What differs between this rank and the oracle of an arrangement, and what `also` complains of."""
    with in_place_of(arrangements, "differences", lambda real: _with(real, also)):
        return train_arranged(rank, world, arrangement)


def compared(rank: int, world: int, case: worlds.Case, also: Also | None = None) -> list[str]:
    """What differs between this rank and the oracle of a case, and what `also` complains of."""
    with in_place_of(worlds, "differences", lambda real: _with(real, also)):
        return train_and_compare(rank, world, case)


def both_ways(
    rank: int, world: int, scenes: Sequence[Arrangement | worlds.Case], also: Also | None = None
) -> list[str]:
    """What differs with gathers under the next forward, and with gathers in `step()`."""
    found: list[str] = []
    for way, overlap in (("overlapped", True), ("in step()", False)):
        for scene in scenes:
            options = {**scene.options, "overlap_param_gather": overlap}
            if isinstance(scene, worlds.Case):
                seen = compared(rank, world, replace(scene, options=options), also)
            else:
                seen = arranged(rank, world, replace(scene, options=options), also)
            found += [f"{way}: {text}" for text in seen]
            if worlds.anywhere(seen):
                break
    return found


def _with(real: Callable[..., list[str]], also: Also | None) -> Callable[..., list[str]]:
    def differences(
        model: layerwise.DataParallel, optimizer: layerwise.Optimizer, *rest: Any, **more: Any
    ) -> list[str]:
        return [*real(model, optimizer, *rest, **more), *(also(model, optimizer) if also else ())]

    return differences


def key_of(plan: Plan, bucket: BucketPlan) -> BufferKey:
    """What the params of a bucket's buffer have in common."""
    return plan.buffers[bucket.buffer].key


@contextmanager
def collectives_noted() -> Iterator[list[str]]:
    """The names of all collectives that this rank is about to issue, as they come: phase, kind and bucket."""
    names: list[str] = []

    def noted(real: Callable[..., None]) -> Callable[..., None]:
        def check(self: Communicator, name: str, *rest: Any, **more: Any) -> None:
            names.append(name)
            real(self, name, *rest, **more)

        return check

    with in_place_of(Communicator, "_check", noted):
        yield names


def differ_between_ranks(what: str, facts: Mapping[str, object]) -> list[str]:
    """A complaint that names the facts in which any rank differs from rank 0."""
    first, *others = gather_facts(dict(facts))
    names = sorted({name for theirs in others for name in {*first, *theirs} if first.get(name) != theirs.get(name)})
    return [f"{what} differ between ranks: {', '.join(names)}"] if names else []

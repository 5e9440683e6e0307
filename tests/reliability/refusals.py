"""What a case of misuse is, and how one is played: an error of the right type, in the right words, with nothing changed and nobody left waiting.

A case is a generator: it sets the scene, yields what must stay as it is (an Optimizer or a module), and then does the wrong thing. Cases for several ranks get their
rank and the number of ranks. No `assert` here: the suite also runs under `python -O`, where they vanish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

from torch import nn

from layerwise.comm.sharded import local_of
from layerwise.errors import StateError
from layerwise.optim.optimizer import Optimizer
from tests.ranks import RankFailure, run_ranks
from tests.worlds import hash_everything, hash_tensors

Scene = Generator[Any, None, None]
SLOWEST_S = 20.0
"""What is not noticed by then is a rank that was left waiting. No slow machine needs as long for an error."""
WORLDS = (2, 4)
"""Numbers of ranks that cases for several ranks are for."""


@dataclass(frozen=True)
class Misuse:
    """One way to use the library wrongly."""

    name: str
    errors: tuple[type[Exception], ...]
    says: tuple[str, ...]
    """What the text must contain: the object's name and the remedy."""
    world: int
    alike: bool
    """Whether all ranks must get the same text; not so where one rank sees its own mistake and the others hear of it."""
    scene: Callable[..., Scene]
    instead: str = ""
    """What the library does instead, where it does not refuse this yet: such a case is no part of the figure."""


CASES: dict[str, Misuse] = {}


def misuse(
    name: str,
    errors: type[Exception] | tuple[type[Exception], ...],
    *says: str,
    world: int = 1,
    alike: bool = True,
    instead: str = "",
) -> Callable[..., Any]:
    def register(scene: Callable[..., Scene]) -> Callable[..., Scene]:
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}.")
        CASES[name] = Misuse(
            name, errors if isinstance(errors, tuple) else (errors,), says, world, alike, scene, instead
        )
        return scene

    return register


def snapshot(kept: Any) -> str:
    """A hash of what must not change."""
    if isinstance(kept, Optimizer):
        return hash_everything(kept)
    if isinstance(kept, nn.Module):
        tensors = [local_of(tensor) for tensor in kept.state_dict().values() if not tensor.is_meta]
        places = [tensor.data_ptr() for tensor in tensors]
        return f"{hash_tensors(tensors)} {places}"
    return ""


class Taken(NamedTuple):
    """How the library took a misuse."""

    complaint: str
    """What is wrong with that, or nothing."""
    text: str
    """The error's text."""


def take(case: Misuse, *place: int) -> Taken:
    """Play a case."""
    scene = case.scene(*place)
    kept = next(scene, None)
    before = snapshot(kept)
    begin = time.monotonic()
    try:
        next(scene, None)
    except Exception as error:
        caught: Exception | None = error
    else:
        caught = None
    seconds = time.monotonic() - begin
    try:
        unchanged = snapshot(kept) == before
    except StateError:  # a step that ended half way has no state to show
        unchanged = False
    return Taken(_complaint(case, caught, seconds, unchanged), str(caught))


def _complaint(case: Misuse, caught: Exception | None, seconds: float, unchanged: bool) -> str:
    if caught is None:
        return "nothing was raised"
    if not isinstance(caught, case.errors):
        expected = " or ".join(error.__name__ for error in case.errors)
        return f"raised {type(caught).__name__} ({str(caught)[:120]}), expected {expected}"
    unsaid = [word for word in case.says if word not in str(caught)]
    if unsaid:
        return f"the text does not say {unsaid}: {str(caught)[:240]}"
    if not unchanged:
        return f"state changed although {type(caught).__name__} was raised"
    return f"took {seconds:.1f} s to be noticed" if seconds > SLOWEST_S else ""


def take_on_ranks(rank: int, world: int, names: list[str]) -> dict[str, Taken]:
    with short_waits():
        return {name: take(CASES[name], rank, world) for name in names}


@contextmanager
def short_waits(seconds: float = SLOWEST_S) -> Any:
    """Groups that the library makes wait for a rank as long as a case may take, and not for torch's half hour."""
    from torch.distributed import distributed_c10d

    wait = timedelta(seconds=seconds)
    with mock.patch.object(distributed_c10d, "_get_default_timeout", return_value=wait):
        yield


def settled(world: int | None = None) -> list[str]:
    """Cases that the library is known to refuse: on so many ranks, or on any number."""
    return [case.name for case in CASES.values() if not case.instead and world in (None, case.world)]


def complaints_on_ranks(
    names: list[str], play: Callable[[int, int, list[str]], dict[str, Taken]] = take_on_ranks
) -> dict[str, str]:
    """Cases for one number of ranks: all together, or one by one when a rank does not come back."""
    try:
        answers = run_ranks(CASES[names[0]].world, play, names, pg_timeout_s=SLOWEST_S)
    except RankFailure as failure:
        if len(names) == 1:
            return {names[0]: str(failure)[-300:]}
        return {name: text for one in names for name, text in complaints_on_ranks([one], play).items()}
    found = {}
    for name in names:
        texts = [
            f"rank {rank}: {answer[name].complaint}" for rank, answer in enumerate(answers) if answer[name].complaint
        ]
        if not texts and CASES[name].alike and len({answer[name].text for answer in answers}) > 1:
            texts = [f"ranks got different texts: {[answer[name].text[:120] for answer in answers]}"]
        found[name] = "; ".join(texts)
    return found

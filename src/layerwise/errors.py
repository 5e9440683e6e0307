"""The errors layerwise raises, the warnings it gives, and how a list of problems is written.

Every message follows one grammar: what is wrong with which object, what was expected, what was found, what to do.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType

_MOST_NAMES = 12
"""How many known names a message lists."""


class PlanMismatchError(RuntimeError):
    """Two ranks derived different plans; the message names the first bucket and field that differ."""


class ContractError(RuntimeError):
    """Ranks were about to issue different collectives; raised on every rank before any data moves."""


class StateError(RuntimeError):
    """An operation came at the wrong moment: a wrong bucket phase, a toggled param, a handle waited for twice."""


class NonFiniteError(RuntimeError):
    """Gradients hold inf or NaN and the user asked for an error instead of a skipped step."""


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, that is none, or that does not fit; nothing of the live state was changed, unless the
    message says so."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration, addressed by its dotted path."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class ConfigError(ValueError):
    """A configuration with problems: all of them, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"  {number}. {problem}" for number, problem in enumerate(self.problems, start=1)]
        count = len(self.problems)
        super().__init__(f"{count} problem{'s' if count != 1 else ''} in the configuration:\n" + "\n".join(lines))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` when a known name is close to `word`, else a list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f" Known: {', '.join(names[:_MOST_NAMES])}{more}." if names else ""


def shown(value: object, limit: int = 60) -> str:
    """`repr`, but never a wall of text and never a failure."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print, or a document nested too deeply
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


_OURS = ("layerwise", "torch", "contextlib")


def _users_frame(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """The first frame from here on that is not ours, and how many there are before it."""
    depth = 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OURS:
        frame, depth = frame.f_back, depth + 1
    return frame, depth


def users_line() -> str:
    """Where the user called us."""
    frame, _ = _users_frame(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "nowhere known"


def users_function() -> tuple[str, str]:
    """The module and the function that called us, by name."""
    frame, _ = _users_frame(sys._getframe(1))
    return ("", "") if frame is None else (frame.f_globals.get("__name__", ""), frame.f_code.co_name)


def warn(text: str, *, aloud: bool = True) -> None:
    """A warning that points at the user's own line, however deep in the library it is found.

    What all ranks find, one of them says aloud. Where warnings are errors it is one on the others too: they must not be
    left waiting for it.
    """
    _, depth = _users_frame(sys._getframe(1))
    level = 2 + depth
    with nullcontext() if aloud else warnings.catch_warnings(record=True):
        warnings.warn(text, stacklevel=level)


def listed(names: Sequence[str], limit: int = 5) -> str:
    """`'a', 'b' and 3 more`: names in an error message, never a wall of them."""
    return a_few([repr(name) for name in names], limit)


def a_few(texts: Sequence[str], limit: int = 5) -> str:
    """`this, that and 3 more`."""
    first = ", ".join(texts[:limit])
    rest = len(texts) - limit
    return f"{first} and {rest} more" if rest > 0 else first

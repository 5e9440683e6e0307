"""The reliability board: figures that count what goes wrong, each with a sabotage control that must count something.

`python -m tests.reliability NAME [--sabotage] [--quick]` prints one JSON line and exits 0 if nothing was bad; `all` runs the whole board.
"""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """What a figure found."""

    n: int
    """Cases tried."""
    bad: int
    """Cases that did not behave."""
    worst: str
    """The first bad case in words; empty when there is none."""


def tally(complaints: dict[str, str]) -> Outcome:
    """An outcome from complaints by case; an empty complaint is a case that behaved."""
    bad = {name: text for name, text in complaints.items() if text}
    worst = next((f"{name}: {text}" for name, text in bad.items()), "")
    return Outcome(n=len(complaints), bad=len(bad), worst=worst[:400])


def tally_control(complaints: dict[str, str], each: dict[str, str]) -> Outcome:
    """An outcome of a control that must complain of every case in `each`: where one of them behaved, nothing counts as bad, and the control fails."""
    silent = {name: "" for name, text in each.items() if not text}
    return tally(silent or {**complaints, **each})

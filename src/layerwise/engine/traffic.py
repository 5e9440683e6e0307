"""What this rank has sent since the step before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Traffic:
    """Bytes per kind of collective. Gathers belong to the step that made them due, whenever they are launched, and are
    counted apart."""

    def __init__(self) -> None:
        self.in_step: Counter[str] = Counter()
        self.gathered: Counter[str] = Counter()

    def sent(self, due: Mapping[str, int]) -> dict[str, int]:
        """Since the step before; with what the gathers that a step has made due will have sent."""
        found = Counter(self.in_step)
        found.update(due)  # and not `+`: what sent nothing is told too
        return dict(found)

    def close(self) -> None:
        """The step is over."""
        self.in_step.clear()

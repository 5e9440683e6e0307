"""What this rank has sent since the step before."""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Bytes per kind of collective. Gathers belong to the step that made them due, whenever they are launched, and are
    counted apart."""

    def __init__(self) -> None:
        self.in_step: Counter[str] = Counter()
        self.gathered: Counter[str] = Counter()
        self.due: Counter[str] = Counter()
        """What the gathers of one step will have sent."""

    def sent(self, *, with_gathers: bool) -> dict[str, int]:
        """Since the step before; with the gathers that a step has made due."""
        found = Counter(self.in_step)
        if with_gathers:
            found.update(self.due)  # and not `+`: what sent nothing is told too
        return dict(found)

    def close(self) -> None:
        """The step is over."""
        self.in_step.clear()

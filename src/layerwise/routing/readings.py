"""What was seen of a param when its model's forward was followed, as plain values: routing reads them, and they can be kept.

`layerwise.models.forward` does the following; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from layerwise.routing.split import Split


class Role(StrEnum):
    """What a forward does with a param of two or more dims."""

    MAP = "map"
    """An operand of a product: one matrix, or several as its split says."""
    ROUTER = "router"
    """A map whose outputs compete in a top-k."""
    HEAD = "head"
    """A map whose outputs are the model's, and read by nothing else."""
    TABLE = "table"
    """Rows of it are looked up."""
    ADDED = "added"
    """It is never an operand of a product."""
    GROUPED = "grouped"
    """A convolution in groups."""
    INPUT = "input"
    """A convolution over the model's input, or over one channel."""
    VECTOR = "vector"
    """A map onto one number, or from one."""
    UNSEEN = "unseen"
    """The forward did not use it, or what became of it could not be followed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One param as it was seen."""

    role: Role
    why: str
    """What was seen, as the end of a sentence about the param."""
    split: Split | None = None
    """How it breaks into matrices, for a map or a head."""

    @property
    def family(self) -> str:
        """Where what was seen says that the param goes; empty where nothing was."""
        if self.role is Role.UNSEEN:
            return ""
        return "matrix" if self.role is Role.MAP else "other"


Readings = Mapping[str, Reading]
"""Readings by fqn, of the params that have two or more dims."""

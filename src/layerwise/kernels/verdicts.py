"""What is decided about a step, as the device knows it: whether it is taken, and what gradients count as multiplied by.

Whoever updates anything reads it where it works, so that an update can be launched before the host knows what came of the
gradients. A step that is not taken is launched all the same, and writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

IS_TAKEN, ONE, FIRST = 0, 1, 2
"""Places of a verdict: 1 or 0, the factor 1, and the factor of the first norm group."""
EPS = 1e-6
"""Added to a norm that is divided by."""
LARGEST = math.sqrt((2 - 2**-23) * 2.0**127)
"""The largest norm whose square an fp32 holds. Second moments would be inf beyond it, and what they divide never moves again."""


class Factor(NamedTuple):
    """What gradients count as multiplied by, and whether the step is taken at all: known to a device."""

    verdict: Tensor
    place: int


Scale = float | Factor
"""What gradients count as multiplied by, in a step that is taken; or what a verdict says of both."""


@dataclass(frozen=True)
class Bounds:
    """What a verdict is found by."""

    clip_norm: float
    """Groups are clipped to this norm; inf does not clip."""
    together: tuple[tuple[int, ...], ...]
    """For every norm group, those that share its norm; none: it is not clipped."""
    families: tuple[int, ...]
    """The norm groups whose norm `skip_above` is about."""
    skip_above: float
    """Of the norm; inf skips for none."""
    needs_finite: bool
    """Whether a gradient with inf or NaN skips the step, or a norm above `LARGEST`."""
    divisor: float
    """What makes norms of averages of norms of sums."""

    def norm(self, square_sums: Sequence[float], groups: Sequence[int]) -> float:
        """Of these norm groups together, from the sums of squares of all."""
        return math.sqrt(sum(square_sums[group] for group in groups)) / self.divisor

    def factors(self, square_sums: Sequence[float]) -> list[float]:
        """What the gradients of each norm group are multiplied by."""
        return [
            min(1.0, self.clip_norm / (self.norm(square_sums, groups) + EPS)) if groups else 1.0
            for groups in self.together
        ]

    def too_large(self, square_sums: Sequence[float]) -> list[int]:
        """The norm groups whose gradients have a norm above `LARGEST` after clipping, where that counts."""
        if not self.needs_finite:
            return []
        factors = enumerate(self.factors(square_sums))
        return [group for group, factor in factors if self.norm(square_sums, (group,)) * factor > LARGEST]


def known_to_host(scale: Scale) -> float | None:
    """The factor as a number, None if the step is not taken. Waits for a device that decides."""
    if not isinstance(scale, Factor):
        return scale
    numbers = scale.verdict.tolist()
    return float(numbers[scale.place]) if numbers[IS_TAKEN] else None

"""The statistics vector: what the one all-reduce of a step's stats is made of."""

from __future__ import annotations

from typing import NamedTuple

HASH_WORDS = 2
"""Numbers that a hash of what ranks must have in common is sent as."""


class StatsSizes(NamedTuple):
    """The lengths of its parts, in their order."""

    groups: int
    """Squared sums, one per norm group."""
    zeros: int
    problems: int
    scaled: int
    """Ranks that scaled their loss, one count per pipeline stage."""
    unscaled: int
    """Those that did not, likewise."""
    words: int
    """Hashes of what ranks must have in common: one for every pipeline stage, then one for every tie."""
    squared_words: int
    late: int
    """One count per trainable param of any stage."""
    missing: int
    """Likewise."""
    disagreeing: int
    """One number per param that ranks hold in parts, with copies: it is zero where all copies of a part have a gradient, or
    none of them has."""
    nonfinite: int
    """One count per trainable param of any stage."""

    @property
    def numel(self) -> int:
        """The length of the vector."""
        return sum(self)


def stats_sizes(*, norm_groups: int, stages: int, ties: int, params: int, parted: int) -> StatsSizes:
    """The vector for so many norm groups (the two families among them), pipeline stages, ties and trainable params, of which
    so many are held in parts with copies.

    >>> stats_sizes(norm_groups=2, stages=1, ties=0, params=4, parted=0).numel
    22
    """
    words = HASH_WORDS * (stages + ties)
    return StatsSizes(norm_groups, 1, 1, stages, stages, words, words, params, params, parted, params)

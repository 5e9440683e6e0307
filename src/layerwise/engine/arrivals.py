"""Which gradients a backward brings, learned from those before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

REMEMBERED = 8
"""Rounds after which a param that did not come is not waited for any more."""


@dataclass
class _Round:
    """What a backward brought, and the last round in which it was just that."""

    arrivals: dict[str, int]
    last: int


class Expected:
    """How often each param's gradient arrives in one synchronised backward: the most that any of the last few brought.

    Learned, because reentrant activation checkpointing delivers a shared param's gradient in several parts, a pipeline
    those of all its microbatches, and because some params are reached by no backward: to wait for these would be to
    reduce nothing before `step()`.

    What comes in some rounds only, as in a branch, stays expected in between. In a round in which it does not come its
    bucket and those behind it are reduced in `step()`, which takes time and nothing else. What comes less often than once
    in `REMEMBERED` rounds may be late when it does come, and is reduced again. The first ones expect everything once, so a
    param that never comes is waited for as long.
    """

    def __init__(self, bucket_of: Mapping[str, int], num_buckets: int) -> None:
        self._bucket_of = bucket_of
        self._num_buckets = num_buckets
        # As if a round before the first had brought everything once: what comes rarely is not late from the start.
        self._rounds = [_Round(dict.fromkeys(bucket_of, 1), 0)]
        self._number = 0
        self.counts: Mapping[str, int] = {}
        """Gradients of each param that comes."""
        self.params_by_bucket: list[int] = []
        """How many params of each bucket come."""
        self._recount()

    @property
    def is_learned(self) -> bool:
        """Whether a round was seen."""
        return self._number > 0

    def learn(self, arrivals: Mapping[str, int]) -> None:
        """A round is over: this is how often each param's gradient came."""
        self._number += 1
        kept = [one for one in self._rounds if one.last > self._number - REMEMBERED]
        # Most rounds are alike: those cost one comparison.
        same = next((one for one in kept if one.arrivals == arrivals), None)
        if same is not None:
            same.last = self._number
        else:
            kept.append(_Round(dict(arrivals), self._number))
        has_changed = same is None or len(kept) < len(self._rounds)
        self._rounds = kept
        if has_changed:
            self._recount()

    def _recount(self) -> None:
        counts: dict[str, int] = {}
        for one in self._rounds:
            for fqn, count in one.arrivals.items():
                counts[fqn] = max(count, counts.get(fqn, 0))
        self.counts = counts or dict.fromkeys(self._bucket_of, 1)
        self.params_by_bucket = [0] * self._num_buckets
        for fqn in self.counts:
            self.params_by_bucket[self._bucket_of[fqn]] += 1

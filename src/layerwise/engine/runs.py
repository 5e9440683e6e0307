"""Stretches of shards that one call works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from layerwise.memory.shards import Shard


class Run(NamedTuple):
    """A stretch of one shard whose params are all in one group (of params, or of norms), padding between them included."""

    shard: Shard
    group: int
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        return flat if self.stop - self.start == flat.numel() else flat[self.start : self.stop]


def runs_of(shard: Shard, group_of: Mapping[str, int]) -> list[Run]:
    """A shard's runs, in order."""
    runs: list[Run] = []
    for span in shard.spans:
        group, stop = group_of[span.fqn], span.part.stop
        if runs and runs[-1].group == group:
            # The gap between two params is padding: zero gradient, zero state, so it takes part without being noticed.
            runs[-1] = Run(shard, group, runs[-1].start, stop)
        else:
            runs.append(Run(shard, group, span.shard_offset, stop))
    return runs


def pieces(run: Run, taken: Iterable[slice]) -> Iterator[Run]:
    """What is left of a run without these parts of its shard."""
    start = run.start
    for part in sorted(taken, key=lambda part: part.start):
        if start < part.start:
            yield run._replace(start=start, stop=part.start)
        start = part.stop
    if start < run.stop:
        yield run._replace(start=start)

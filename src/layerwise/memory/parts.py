"""Parts of shards' updates: cut once, of whatever tensors updates are in a step."""

from __future__ import annotations

from collections.abc import Iterable

from layerwise.kernels.lists import Cuts, View, Views, stretch
from layerwise.layout.spans import Region
from layerwise.memory.shards import Shard

Part = slice | Region
"""Of a shard: a stretch, or what it has of a matrix."""


class UpdateParts:
    """Views of updates, in order."""

    def __init__(self, parts: Iterable[tuple[Shard, Part]], *, stay: bool) -> None:
        """`stay`: the updates are memory of ours, and the same in every step. A param's own gradient is another tensor in
        every step, and must not be held beyond it."""
        numbers: dict[Shard, int] = {}
        self._cuts = Cuts(_view(numbers.setdefault(shard, len(numbers)), part) for shard, part in parts)
        self._shards = list(numbers)
        self._kept = self._cut() if stay else None

    def _cut(self) -> Views:
        return self._cuts.of([shard.update for shard in self._shards])

    def now(self) -> Views:
        """Those of this step."""
        return self._cut() if self._kept is None else self._kept


def _view(shard: int, part: Part) -> View:
    if isinstance(part, slice):
        return stretch(shard, part.start, part.stop)
    return View(shard, part.shape, part.in_shard.strides, part.in_shard.offset)

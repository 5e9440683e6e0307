"""Parts of shards' updates, cut once where updates stay where they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from layerwise.memory.shards import Shard


class UpdateParts:
    """Stretches of updates, in order."""

    def __init__(self, places: Iterable[tuple[Shard, slice]], *, stay: bool) -> None:
        """`stay`: the updates are memory of ours, and the same in every step. A param's own gradient is another tensor in
        every step, and must not be held beyond it."""
        self._places = list(places)
        self._kept = self._cut() if stay else None

    def _cut(self) -> list[Tensor]:
        return [shard.update[part] for shard, part in self._places]

    def now(self) -> list[Tensor]:
        """Those of this step."""
        return self._cut() if self._kept is None else self._kept

"""Parts of shards' updates, cut once where updates stay where they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from layerwise.layout.spans import Span
from layerwise.memory.shards import Shard


class UpdateParts:
    """Spans of updates, in order."""

    def __init__(self, spans: Iterable[tuple[Shard, Span]], *, stay: bool) -> None:
        """`stay`: the updates are memory of ours, and the same in every step. A param's own gradient is another tensor in
        every step, and must not be held beyond it."""
        self._places = [(shard, span.part) for shard, span in spans]
        self._kept = self._cut() if stay else None

    def _cut(self) -> list[Tensor]:
        return [shard.update[part] for shard, part in self._places]

    def now(self) -> list[Tensor]:
        """The spans of this step's updates."""
        return self._cut() if self._kept is None else self._kept

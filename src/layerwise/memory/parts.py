"""Parts of shards' updates, cut once where updates stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from layerwise.memory.shards import Shard


def stretch_of(flat: Tensor, part: slice) -> Tensor:
    """A stretch of a tensor; itself where that is all of it."""
    return flat if part.stop - part.start == flat.numel() else flat[part]


class UpdateParts:
    """Views of updates, in order: stretches of them, or whatever else `cut` makes of an update and a place."""

    def __init__(
        self, places: Iterable[tuple[Shard, Any]], cut: Callable[[Tensor, Any], Tensor] = stretch_of, *, stay: bool
    ) -> None:
        """`stay`: the updates are memory of ours, and the same in every step. A param's own gradient is another tensor in
        every step, and must not be held beyond it."""
        self._places = list(places)
        self._cut = cut
        self._kept = self._views() if stay else None

    def _views(self) -> list[Tensor]:
        return [self._cut(shard.update, place) for shard, place in self._places]

    def now(self) -> list[Tensor]:
        """Those of this step."""
        return self._views() if self._kept is None else self._kept

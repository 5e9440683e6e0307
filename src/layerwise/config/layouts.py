"""Layouts as data: what each of them is, and nothing else asks for its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Layout = Literal["flat", "padded", "compact", "replicated"]

WorkPolicy = Literal["stay", "balance", "repeat"]
"""Who orthogonalises a matrix. stay: a rank that holds it whole. repeat: every rank that holds it whole. balance: whoever
has least to do. Where nobody holds a matrix whole, it is dealt out in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """What a storage plan of this name does."""

    cut: Literal["evenly", "packed", "by owner", "copied"]
    """How buckets are dealt out to ranks: equal intervals with borders anywhere, equal intervals with every param whole in
    one, uneven intervals of whole params, or everything everywhere."""
    reduces: Literal["reduce_scatter", "all_reduce"]
    publishes: Literal["all_gather", "uneven_all_gather", "none"]
    work: WorkPolicy
    beside: Layout = "flat"
    """How params that no matrix rule manages are stored beside it."""

    @property
    def keeps_params_whole(self) -> bool:
        """Whether every param is whole on the rank that owns it, however large that is."""
        return self.cut in ("packed", "by owner")


FACTS_BY_LAYOUT: dict[Layout, LayoutFacts] = {
    "flat": LayoutFacts(cut="evenly", reduces="reduce_scatter", publishes="all_gather", work="balance"),
    "padded": LayoutFacts(cut="packed", reduces="reduce_scatter", publishes="all_gather", work="stay"),
    "compact": LayoutFacts(cut="by owner", reduces="all_reduce", publishes="uneven_all_gather", work="stay"),
    "replicated": LayoutFacts(cut="copied", reduces="all_reduce", publishes="none", work="repeat", beside="replicated"),
}
"""The storage plans that the engine executes."""

LAYOUTS: tuple[Layout, ...] = tuple(FACTS_BY_LAYOUT)

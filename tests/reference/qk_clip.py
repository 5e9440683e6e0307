"""A slow, obvious reference for QK-clip on whole weights in one process. It imports nothing from `src`.

Weights come with the rows of each head spelled out by views: what a head's queries and keys are is said in the shape of the weight, not in row numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Masters = dict[str, Tensor]
"""Whole fp32 weights by name, scaled in place."""


@dataclass
class Heads:
    """One attention module: which heads go together, and for each group the views that are its queries, its keys, and queries whose key must stay."""

    groups: list[list[int]]
    queries: Callable[[Masters, int], list[Tensor]]
    keys: Callable[[Masters, int], list[Tensor]]
    lonely: Callable[[Masters, int], list[Tensor]] = lambda masters, group: []


def clip(
    masters: Masters, modules: dict[str, Heads], logits: dict[str, list[list[float]]], threshold: float, balance: float
) -> int:
    """Scale what has to be scaled, from the largest logits that each call on each rank had; returns how many heads were."""
    count = 0
    for name, heads in modules.items():
        for number, group in enumerate(heads.groups):
            seen = [call[head] for call in logits[name] for head in group]
            if not seen or not all(math.isfinite(logit) for logit in seen):
                continue
            largest = max(seen)
            if largest <= threshold:
                continue
            eta = threshold / largest
            count += len(group)
            for view in heads.queries(masters, number):
                view.mul_(eta**balance)
            for view in heads.keys(masters, number):
                view.mul_(eta ** (1.0 - balance))
            for view in heads.lonely(masters, number):
                view.mul_(eta)
    return count

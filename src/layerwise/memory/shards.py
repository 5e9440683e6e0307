"""Shards: this rank's part of the params, with masters, updates and optimizer state. What a step works on, wherever its
memory comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from layerwise.layout.shards import ShardPlan
from layerwise.layout.spans import Region, Span


@dataclass(eq=False)
class Shard:
    """One shard plan's memory on this rank."""

    plan: ShardPlan
    spans: tuple[Span, ...]
    weight: Tensor | None  # 1D, param dtype: these elements as the model reads them; None where it reads codes of them
    master: Tensor  # 1D, fp32: the truth; is `weight` for fp32 params
    update: Tensor  # fp32, in order: averaged gradient, then update; whoever brings gradients says where it lies
    dtype: torch.dtype  # of the params: what a master is rounded to
    state: dict[str, Tensor] = field(default_factory=dict)  # 1D, fp32 each: momentum, exp_avg ...
    version: int = 0  # the step that the master is at

    @cached_property
    def spans_by_fqn(self) -> dict[str, list[Span]]:
        """What this rank has of each param that it has some of."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.fqn, []).append(span)
        return found

    @property
    def is_apart(self) -> bool:
        """Whether the master is other memory than what the model reads."""
        return self.master is not self.weight

    def round_master(self) -> None:
        """Write the params' own dtype of the master to where the model reads it."""
        if self.weight is not None and self.is_apart:
            self.weight.copy_(self.master)

    def rounded(self) -> Tensor:
        """The master in the params' own dtype; where the model reads that, the same memory."""
        return self.master.to(self.dtype) if self.weight is None else self.weight

    def begin_from(self, values: Tensor) -> None:
        """Take these as the truth, before there was any step."""
        if self.master.data_ptr() != values.data_ptr():
            self.master.copy_(values)

    def pull(self, part: slice, seen: Tensor) -> None:
        """Take over what was written into a part of the weight. Where that is what the master rounds to, the master knows
        better: weights and masters may both have been loaded, in either order."""
        if self.is_apart:
            master = self.master[part]
            master.copy_(torch.where(master.to(seen.dtype) == seen, master, seen.to(master.dtype)))


def region_of(flat: Tensor, region: Region) -> Tensor:
    """A region as a view of a tensor of its shard's length."""
    offset, strides = region.in_shard
    return flat.as_strided(region.shape, strides, flat.storage_offset() + offset)

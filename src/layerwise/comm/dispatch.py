"""Dispatch: rows of a tensor to the ranks that hold their experts and back, as part of the autograd graph.

Both directions are one `all_to_all_single` with uneven splits, zero among them, so gloo and NCCL run the same code. The
gradient of an exchange is the opposite exchange. How many rows travel is known only once the router has spoken, so the
counts go first, as an exchange of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.leaving import blocking
from layerwise.comm.lifetimes import check_alive
from layerwise.comm.scopes import scope
from layerwise.comm.sharded import is_sharded


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share out the experts of a block, in order: rank r holds the r-th part of them."""

    group: dist.ProcessGroup | None
    """None for one rank, which holds them all and exchanges nothing."""
    rank: int
    world: int
    grad_scale: float = 1.0
    """What gradients of experts are multiplied by, where somebody else averages them over fewer or more ranks than there are
    that read samples of their own."""

    def weight(self, param: Tensor) -> Tensor:
        """This rank's experts of a stack, for a forward."""
        own: Any = param
        local: Tensor = own.to_local() if is_sharded(param) else param
        if self.grad_scale == 1.0:
            return local
        scaled: Tensor = _ScaledGrad.apply(local, self.grad_scale)  # type: ignore[no-untyped-call]
        return scaled


ALL_EXPERTS_HERE = ExpertRanks(group=None, rank=0, world=1)
"""One rank, all experts."""


def exchange_counts(counts: Tensor, ranks: ExpertRanks) -> Tensor:
    """Row r of `counts` (world, n), integers, goes to rank r; row s of the result came from rank s."""
    if counts.dim() != 2 or counts.shape[0] != ranks.world:
        raise ValueError(f"counts must have one row for each of {ranks.world} ranks, got shape {tuple(counts.shape)}.")
    if ranks.group is None:
        return counts
    check_alive(ranks.group, "rows to experts")
    received = torch.empty_like(counts, memory_format=torch.contiguous_format)
    blocking(dist.all_to_all_single, received, counts.contiguous(), group=ranks.group)
    return received


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: ExpertRanks) -> Tensor:
    """The first `sent[0]` rows go to rank 0, the next `sent[1]` to rank 1, and so on; `received[s]` rows come from rank
    s, in rank order. Differentiable: gradients go the opposite way."""
    if len(sent) != ranks.world or len(received) != ranks.world or sum(sent) != rows.shape[0]:
        raise ValueError(
            f"{rows.shape[0]} rows do not split into {list(sent)} for {ranks.world} ranks, from which {list(received)} "
            "come. Give the counts that exchange_counts() returned."
        )
    if ranks.group is None:
        return rows
    exchanged: Tensor = _Exchange.apply(rows, tuple(sent), tuple(received), ranks.group)  # type: ignore[no-untyped-call]
    return exchanged


class _ScaledGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    check_alive(group, "rows to experts")
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    # Backends read strided memory as if it were whole: gradients of transposed or expanded tensors arrive like that.
    with scope("dispatch all_to_all"):
        splits = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
        blocking(dist.all_to_all_single, out, rows.contiguous(), **splits, group=group)
    return out

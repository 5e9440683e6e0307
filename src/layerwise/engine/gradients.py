"""Where a step's gradients come from: our own buckets (`engine/reducer.py`), or the params' own `.grad`.

Whoever brings them leaves, in each shard's update, sums that become averages by one division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from layerwise.comm.sharded import grad_here, is_sharded
from layerwise.memory.hooked import grad_of, take_grad
from layerwise.memory.shards import Shard
from layerwise.memory.storage import Storage, refuse_sparse


@dataclass
class Said:
    """What the user said of the gradients that are there. Goes with them, whoever forgets them."""

    is_scaled: bool = False
    """They come from a scaled loss."""
    clip_norm: float | None = None
    """Clip them to this norm."""


class Divisors(NamedTuple):
    """What makes averages of sums, in one step."""

    scale: float
    """Of the loss."""
    common: float
    """What norms are divided by, of sums that are brought to it first."""
    by_shard: Mapping[int, float]
    """By number of the shard plan, loss scale included."""


class Gradients(Protocol):
    """Brings gradients to shards."""

    said: Said
    when_dropped: Callable[[], None]
    """Called when gradients are forgotten whose reduction has begun: all ranks have to forget the same."""

    @property
    def has_gradients(self) -> bool:
        """Whether any is there on this rank."""

    @property
    def arrived(self) -> frozenset[str]:
        """Params that got one on this rank."""

    @property
    def late(self) -> frozenset[str]:
        """Params that got one when theirs was on its way already. Other ranks may have other ones, so what to do is for
        all of them to decide together."""

    def check(self) -> None:
        """Raise if gradients are not as they must be; before any of them is used."""

    def finish(self) -> frozenset[str]:
        """Have every shard's update hold its sum; returns the params that got no gradient on this rank."""

    def reduce_again(self, fqns: Iterable[str]) -> None:
        """Add what came late, of these params: the same ones on every rank."""

    @property
    def are_reduced(self) -> bool:
        """Whether somebody else has reduced them: then all ranks that hold some of a param have its gradient, or none."""

    @property
    def common_divisor(self) -> float:
        """What makes averages of most sums: norms are taken of sums that have this one."""

    def divisor_of(self, shard: Shard) -> float:
        """What makes averages of a shard's sums."""

    def settle(self) -> None:
        """Have nothing under way, on any rank; all of them call it."""

    def forget(self) -> None:
        """They were used, or are not wanted any more."""


class OwnGradients:
    """The params' own `.grad`, reduced by others or by nobody. In fp32 they are worked on where they are: a step holds no
    second copy of them, and they are gone afterwards."""

    late: frozenset[str] = frozenset()
    are_reduced = True
    common_divisor = 1.0

    def __init__(self, storage: Storage) -> None:
        self.said = Said()
        self.when_dropped: Callable[[], None] = lambda: None
        self._params = storage.params
        self._shards = [(fqn, shard) for shard in storage.shards for fqn in shard.plan.fqns]
        self._nothing = torch.empty(0, dtype=torch.float32, device=storage.device)
        self._bound: list[str] = []

    @property
    def has_gradients(self) -> bool:
        return any(grad_of(param) is not None for param in self._params.values())

    @property
    def arrived(self) -> frozenset[str]:
        return frozenset(fqn for fqn, param in self._params.items() if grad_of(param) is not None)

    def check(self) -> None:
        for fqn, param in self._params.items():
            grad = grad_of(param)
            if grad is not None:
                refuse_sparse(fqn, grad)
                if is_sharded(param) and not is_sharded(grad):
                    raise TypeError(
                        f"param {fqn!r} is a DTensor and its .grad is not: expected a DTensor with the param's placements, as backward "
                        "brings it. Make it with torch.distributed.tensor.distribute_tensor()."
                    )

    @torch.no_grad()
    def finish(self) -> frozenset[str]:
        missing, seen = set(), set()
        self._bound = []
        for fqn, shard in self._shards:
            param = self._params[fqn]
            grad = grad_of(param)
            if grad is None or grad.is_sparse or is_sharded(grad) is not is_sharded(param):
                if shard.spans:  # who holds nothing of a param misses nothing
                    missing.add(fqn)
                shard.update = torch.zeros_like(shard.master)
                continue
            self._bound.append(fqn)
            shard.update = _flat(grad_here(param, grad))
            if shard.update.data_ptr() in seen and shard.update.numel():
                shard.update = shard.update.clone()  # one tensor as the gradient of two params
            seen.add(shard.update.data_ptr())
        return frozenset(missing)

    def reduce_again(self, fqns: Iterable[str]) -> None:
        """Nothing is on its way."""

    def settle(self) -> None:
        """Nothing is on its way."""

    def divisor_of(self, shard: Shard) -> float:
        return 1.0

    def forget(self) -> None:
        self.said = Said()
        for fqn in self._bound:
            take_grad(self._params[fqn])
        self._bound = []
        for _, shard in self._shards:
            shard.update = self._nothing


def _flat(grad: Tensor) -> Tensor:
    """A gradient in fp32, in the order of its indices; itself where it is that already."""
    return grad.detach().to(torch.float32).contiguous().view(-1)

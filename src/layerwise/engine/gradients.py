"""Where a step's gradients come from: our own buckets (`engine/reducer.py`), or the params' own `.grad`.

Whoever brings them leaves, in each shard's update, sums that become averages by one division.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from layerwise.comm.sharded import Elsewhere, PlacedAlike, is_sharded, local_of, on_one_mesh
from layerwise.memory.hooked import drop_grads, grad_of, grads_of
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
    """What norms are divided by, of sums that are brought to it first: those of stages may have another divisor."""
    own: float
    """Of the sums here."""


class Gradients(Protocol):
    """Brings gradients to shards."""

    said: Said
    are_reduced: bool
    """Whether somebody else has reduced them: then all ranks that hold the same part of a param have its gradient, or none."""
    are_copies: bool
    """Whether somebody else has made all of them the same on every rank."""
    when_dropped: Callable[[], None]
    """Called when gradients are forgotten whose reduction has begun: all ranks have to forget the same."""

    @property
    def has_gradients(self) -> bool:
        """Whether any is there on this rank."""

    @property
    def is_under_way(self) -> bool:
        """Whether this rank has begun to reduce any of them."""

    @property
    def arrived(self) -> frozenset[str]:
        """Params that got one on this rank."""

    @property
    def late(self) -> frozenset[str]:
        """Params that got one when theirs was on its way already. Other ranks may have other ones, so what to do is for
        all of them to decide together."""

    @property
    def joint(self) -> frozenset[str]:
        """Params whose gradient it takes all ranks to bring: where one has none of it, the others do not have theirs."""

    def check(self) -> None:
        """Raise if gradients are not as they must be; before any of them is used."""

    def finish(self) -> frozenset[str]:
        """Have every shard's update hold its sum; returns the params that got no gradient on this rank."""

    def reduce_again(self, fqns: Iterable[str]) -> None:
        """Add what came late, of these params: the same ones on every rank."""

    @property
    def common_divisor(self) -> float:
        """What makes averages of sums as they are everywhere: norms are taken of sums that have this one."""

    @property
    def own_divisor(self) -> float:
        """What makes averages of the sums here."""

    def settle(self) -> None:
        """Have nothing under way, on any rank; all of them call it."""

    def leave(self) -> bool:
        """They were not used: those that are the user's stay where they are, with what was said of them, for another step. Others
        are forgotten. Whether they stay."""

    def forget(self) -> None:
        """They were used, or are not wanted any more."""


class _GivenGradients:
    """The params' own `.grad`: averages already, and nothing of ours is under way."""

    are_reduced = True
    is_under_way = False
    common_divisor = 1.0
    own_divisor = 1.0

    def __init__(self, storage: Storage) -> None:
        self.said = Said()
        self.when_dropped: Callable[[], None] = lambda: None
        self.late: frozenset[str] = frozenset()
        self._params = storage.params

    @property
    def joint(self) -> frozenset[str]:
        return frozenset()

    @property
    def has_gradients(self) -> bool:
        return any(grad is not None for grad in grads_of(self._params.values()))

    @property
    def arrived(self) -> frozenset[str]:
        grads = zip(self._params, grads_of(self._params.values()), strict=True)
        return frozenset(fqn for fqn, grad in grads if grad is not None)

    def reduce_again(self, fqns: Iterable[str]) -> None:
        """Nothing is on its way."""

    def settle(self) -> None:
        """Nothing is on its way."""

    def leave(self) -> bool:
        return True

    def forget(self) -> None:
        self.said = Said()


class _Found(NamedTuple):
    """A param's gradient in this step, where it is if not where its param is, and what is wrong with it: then it is none."""

    grad: Tensor | None
    place: Elsewhere | None
    problem: Exception | None = None


class OwnGradients(_GivenGradients):
    """The params' own `.grad`, reduced by others or by nobody. In fp32 they are worked on where they are: a step holds no
    second copy of them, and they are gone afterwards.

    A gradient that is not placed as its param is (a sum that torch has put off) is brought there by a collective, so ranks
    must know of each other that they have one. They do after the first step that brings it, where such a gradient counts as
    late. From then on all of them take part in every step, also who has none.
    """

    are_copies = False

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._shards = [(fqn, shard) for shard in storage.shards for fqn in shard.plan.fqns]
        self._own = [self._params[fqn] for fqn, _ in self._shards]
        self._cut = {fqn for fqn, param in self._params.items() if is_sharded(param)}
        self._alike = PlacedAlike(self._own)
        self._nothing = torch.empty(0, dtype=torch.float32, device=storage.device)
        self._shard_of = dict(self._shards)
        self._bound: list[nn.Parameter] | None = []
        """Whose gradients shards have; None once they have none."""
        self._seen: set[int] = set()
        self._elsewhere: dict[str, Elsewhere] = {}
        self._looked: list[_Found] = []
        self._plain: list[Tensor] | None = None

    def check(self) -> None:
        # `finish` comes next, and need not look again.
        self._plain = self._all_plain()
        if self._plain is not None:
            return
        self._looked = self._look_at_all()
        for found in self._looked:
            if found.problem is not None:
                raise found.problem

    def _all_plain(self) -> list[Tensor] | None:
        """What this rank has of all gradients at once, without a step of Python for each; None unless all of them are there
        and as they nearly always are."""
        grads = list(grads_of(self._own))
        if not self._cut:
            return _plain(grads)
        found = None if self._elsewhere else self._alike.locals_of(grads)
        return None if found is None else _plain(found)

    def _look_at_all(self) -> list[_Found]:
        grads = grads_of(self._own)
        return [self._look(fqn, grad) for (fqn, _), grad in zip(self._shards, grads, strict=True)]

    def _place_of(self, fqn: str, param: Tensor, grad: Tensor) -> Elsewhere | None:
        """Where a gradient is, if not where its param is; raises unless it is as it must be."""
        refuse_sparse(fqn, grad)
        if fqn not in self._cut:
            return None
        if not is_sharded(grad):
            raise TypeError(
                f"param {fqn!r} is a DTensor and its .grad is not: expected a DTensor with the param's placements, as backward "
                "brings it. Make it with torch.distributed.tensor.distribute_tensor()."
            )
        found, known = Elsewhere.of(param, grad), self._elsewhere.get(fqn)
        if found is not None and not on_one_mesh(param, grad):
            raise ValueError(
                f"the .grad of param {fqn!r} is on another mesh than the param: expected the same. Make it there with "
                "torch.distributed.tensor.distribute_tensor()."
            )
        if known is not None and known != found:
            raise ValueError(
                f"the .grad of param {fqn!r} had the placements {known.placements} in steps before and has others now: ranks would "
                "not know what to send each other. Call grad.redistribute() to the param's placements in every step, or in none."
            )
        return found

    @property
    def joint(self) -> frozenset[str]:
        return frozenset(self._elsewhere)

    @torch.no_grad()
    def finish(self) -> frozenset[str]:
        missing, late = set(), set()
        bound: list[nn.Parameter] = []
        self._bound, self._seen = bound, set()
        plain, self._plain = self._plain, None
        if plain is not None:
            for (_, shard), update in zip(self._shards, plain, strict=True):
                shard.update = update
            self._bound = self._own
            return frozenset()
        looked, self._looked = self._looked or self._look_at_all(), []
        for (fqn, shard), (grad, place, _) in zip(self._shards, looked, strict=True):
            if fqn in self._elsewhere:
                grad = self._bring(fqn, grad)
            elif place is not None:
                late.add(fqn)
                grad = torch.zeros_like(shard.master)
            if grad is None:
                if shard.spans:  # who holds nothing of a param misses nothing
                    missing.add(fqn)
                shard.update = torch.zeros_like(shard.master)
            else:
                bound.append(self._params[fqn])
                self._bind(shard, local_of(grad))
        self.late = frozenset(late)
        return frozenset(missing)

    def _look(self, fqn: str, grad: Tensor | None) -> _Found:
        if grad is None or (not grad.is_sparse and fqn not in self._cut):  # nearly always
            return _Found(grad, None)
        try:
            return _Found(grad, self._place_of(fqn, self._params[fqn], grad))
        except (TypeError, ValueError) as problem:
            return _Found(None, None, problem)

    def _bring(self, fqn: str, grad: Tensor | None) -> Tensor | None:
        """A gradient where its param is, if this rank has one. All ranks call it."""
        brought = self._elsewhere[fqn].brought(self._params[fqn], grad)
        return None if grad is None else brought

    def _bind(self, shard: Shard, grad: Tensor) -> None:
        """Have a shard's update be a gradient."""
        update = _flat(grad)
        address = update.data_ptr()
        if address in self._seen and update.numel():
            update = update.clone()  # one tensor as the gradient of two params
        self._seen.add(address)
        shard.update = update

    @torch.no_grad()
    def reduce_again(self, fqns: Iterable[str]) -> None:
        for fqn in sorted(fqns):
            grad, place, _ = self._look(fqn, grad_of(self._params[fqn]))
            if grad is not None and place is not None:
                self._elsewhere[fqn] = place
                self._bind(self._shard_of[fqn], place.brought(self._params[fqn], grad))
        self.late = frozenset()

    def leave(self) -> bool:
        self._looked, self._plain, self._bound = [], None, None
        for _, shard in self._shards:
            shard.update = self._nothing
        return True

    def forget(self) -> None:
        super().forget()
        if self._bound is None:  # forgotten before: a step does so early, for the memory
            self._looked, self._plain = [], None
            return
        drop_grads(self._bound)
        self.leave()


class CopiedGradients(_GivenGradients):
    """The params' own `.grad`, which somebody else has made the same on every rank, where weights are in our buffers. Each
    shard's part is copied to its update, and nothing else: they stay as they are, for whoever clips, logs or zeroes them."""

    are_copies = True

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._parts = [
            (span.fqn, slice(span.start, span.stop), shard.update[span.part])
            for shard in storage.shards
            for span in shard.spans
        ]

    def check(self) -> None:
        for fqn, grad in zip(self._params, grads_of(self._params.values()), strict=True):
            if grad is not None:
                refuse_sparse(fqn, grad)

    @torch.no_grad()
    def finish(self) -> frozenset[str]:
        found: list[Tensor] = []
        filled: list[Tensor] = []
        for fqn, part, update in self._parts:
            grad = grad_of(self._params[fqn])
            if grad is None or grad.is_sparse:
                update.zero_()
            else:
                found.append(grad.detach().reshape(-1)[part])
                filled.append(update)
        if filled:
            torch._foreach_copy_(filled, found)
        return frozenset(self._params) - self.arrived


_DTYPE: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_IS_SPARSE: Callable[[Tensor], bool] = attrgetter("is_sparse")
_REQUIRES_GRAD: Callable[[Tensor], bool] = attrgetter("requires_grad")


def _plain(grads: Sequence[Tensor | None]) -> list[Tensor] | None:
    """Gradients that shards can have as they are: plain fp32 tensors, each with memory of its own. None if some are not."""
    if set(map(type, grads)) != {Tensor}:
        return None
    found = cast("list[Tensor]", grads)
    if set(map(_DTYPE, found)) != {torch.float32} or any(map(_IS_SPARSE, found)) or any(map(_REQUIRES_GRAD, found)):
        return None
    addresses = list(filter(None, map(Tensor.data_ptr, found)))  # what is empty has none
    return found if all(map(Tensor.is_contiguous, found)) and len(set(addresses)) == len(addresses) else None


def _flat(grad: Tensor) -> Tensor:
    """A gradient in fp32, in the order of its indices; itself where it is that already."""
    if grad.dtype is torch.float32 and grad.is_contiguous() and not grad.requires_grad:  # nearly always
        return grad.view(-1)
    return grad.detach().to(torch.float32).contiguous().view(-1)

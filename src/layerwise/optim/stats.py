"""Phase 2, stats: one pass over local shards, one all-reduce of one vector, and decisions that are functions of reduced
values only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.buffers.storage import Storage
from layerwise.comm.collectives import Communicator
from layerwise.errors import did_you_mean
from layerwise.kernels.stats import count_zeros, square_sums
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommOp, stats_op

_WORD_BITS = 12
"""Bits per consistency word. Sums of squares of such words over up to 2^14 ranks stay exact in fp64."""
_NUM_WORDS = 2


@dataclass(frozen=True)
class StepStats:
    """What the last step saw and did. The same on every rank, but for bytes."""

    step: int = 0
    """Successful steps so far."""
    grad_norm: float = math.nan
    """Norm of the averaged, unscaled, unclipped gradient over all params that are in no named norm group."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Norms of the matrix and the other family and of every named norm group."""
    clip_coefficients: Mapping[str, float] = field(default_factory=dict)
    """What the gradients of each of these were multiplied with."""
    num_zeros: int | None = None
    """Gradient elements that are exactly zero; None unless count_zeros=True."""
    skipped: bool = False
    skip_reason: str = ""
    nonfinite: tuple[str, ...] = ()
    """Params whose reduced gradient holds inf or NaN."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Params without a gradient, with the number of ranks on which it was missing; they count as zero there."""
    loss_scale: float = 1.0
    bytes_by_collective: Mapping[str, int] = field(default_factory=dict)
    """Bytes this rank sent since the step before, per kind of collective."""


@dataclass(frozen=True)
class Totals:
    """The reduced vector, read back."""

    square_sums: Mapping[str, float]
    num_zeros: int | None
    missing: Mapping[str, int]
    nonfinite: tuple[str, ...]
    late: tuple[int, ...]
    """Buckets that got a gradient on some rank after their reduction: they have to be reduced again, by all."""
    nothing_arrived: bool
    """No param has a gradient on any rank."""
    consistent: bool
    """All ranks have the same settings."""
    divisor: float
    """From sums to averages."""

    def norm(self, *names: str) -> float:
        """Norm of the averaged gradient over the named groups together."""
        return math.sqrt(sum(self.square_sums[name] for name in names)) / self.divisor


def assign_norm_groups(plan: Plan, norm_groups: Mapping[str, str]) -> dict[str, str]:
    """The norm group of every trainable param: the first named group whose glob matches, else its family."""
    for name in norm_groups:
        if name in ("matrix", "other"):
            raise ValueError(
                f"norm group {name!r} has a reserved name: 'matrix' and 'other' are the two families. Choose another."
            )
    trainable = [param.fqn for param in plan.table if plan.routes[param.fqn].family != "frozen"]
    for name, pattern in norm_groups.items():
        if not any(fnmatchcase(fqn, pattern) for fqn in trainable):
            raise ValueError(
                f"norm group {name!r} ({pattern!r}) matches no trainable param." + did_you_mean(pattern, trainable)
            )
    return {
        fqn: next((name for name, pattern in norm_groups.items() if fnmatchcase(fqn, pattern)), plan.routes[fqn].family)
        for fqn in trainable
    }


class _Parts(NamedTuple):
    """Views of the vector that is reduced, in its order."""

    groups: Tensor  # squared sums, one per norm group
    zeros: Tensor  # one count
    words: Tensor  # hash of the settings
    squared_words: Tensor
    late: Tensor  # one count per bucket
    missing: Tensor  # one count per param
    nonfinite: Tensor  # one count per param


class StatsPass:
    """Collects and reduces the statistics of one step's gradients."""

    def __init__(
        self, storage: Storage, communicator: Communicator, group_of: Mapping[str, str], *, zeros: bool
    ) -> None:
        self._communicator = communicator
        self._zeros = zeros
        self.names = sorted({"matrix", "other", *group_of.values()})
        self._fqns = sorted(group_of)
        position = {fqn: index for index, fqn in enumerate(self._fqns)}
        slot = {name: index for index, name in enumerate(self.names)}
        # Where nothing is sharded every rank holds the same gradient: only the first one counts it.
        counted = [bucket for bucket in storage.buckets if bucket.plan.num_shards > 1 or communicator.rank == 0]
        pairs = [(bucket, span) for bucket in counted for span in bucket.spans]
        self._spans = [bucket.work[span.part] for bucket, span in pairs]
        self._device = storage.buckets[0].work.device
        self._num_buckets = len(storage.buckets)
        self._sizes = [len(self.names), 1, _NUM_WORDS, _NUM_WORDS, self._num_buckets, len(self._fqns), len(self._fqns)]
        self._slots = torch.tensor(
            [slot[group_of[span.fqn]] for _, span in pairs], dtype=torch.long, device=self._device
        )
        self._params = torch.tensor([position[span.fqn] for _, span in pairs], dtype=torch.long, device=self._device)

    @property
    def numel(self) -> int:
        """Length of the vector."""
        return sum(self._sizes)

    @property
    def op(self) -> CommOp:
        return stats_op(self.numel, self._communicator.world)

    def reduce(self, *, missing: frozenset[str], late: frozenset[int], settings: str, divisor: float) -> Totals:
        """One pass over sums of gradients, one all-reduce, one read-back.

        Norms are those of the sums, divided by `divisor` at the end: for gradients whose sums are exact the norm is
        too, on any number of ranks. `settings` describes everything that all ranks must have in common at this step.
        """
        vector = torch.zeros(self.numel, dtype=torch.float64, device=self._device)
        parts = self._parts(vector)
        sums = square_sums(self._spans).to(self._device)
        parts.groups.index_add_(0, self._slots, sums)
        if self._zeros:
            parts.zeros.add_(count_zeros(self._spans))
        words = torch.tensor(_words(settings), dtype=torch.float64, device=self._device)
        parts.words.copy_(words)
        parts.squared_words.copy_(words.square())
        parts.late.copy_(
            torch.tensor([float(index in late) for index in range(self._num_buckets)], dtype=torch.float64)
        )
        parts.missing.copy_(torch.tensor([float(fqn in missing) for fqn in self._fqns], dtype=torch.float64))
        parts.nonfinite.index_add_(0, self._params, (~torch.isfinite(sums)).double())
        self._communicator.all_reduce(self.op, vector).wait()
        return self._read(self._parts(vector.cpu()), divisor)

    def _parts(self, vector: Tensor) -> _Parts:
        return _Parts(*torch.split(vector, self._sizes))

    def _read(self, parts: _Parts, divisor: float) -> Totals:
        # All ranks sent the same word exactly if N * sum(w^2) == (sum w)^2, which every rank finds alike from reduced
        # values.
        same = parts.squared_words * self._communicator.world == parts.words.square()
        nothing = bool((parts.missing == self._communicator.world).all())
        return Totals(
            square_sums=dict(zip(self.names, parts.groups.tolist(), strict=True)),
            num_zeros=int(parts.zeros) if self._zeros else None,
            missing={fqn: int(count) for fqn, count in zip(self._fqns, parts.missing.tolist(), strict=True) if count},
            nonfinite=tuple(fqn for fqn, count in zip(self._fqns, parts.nonfinite.tolist(), strict=True) if count),
            late=tuple(index for index, count in enumerate(parts.late.tolist()) if count),
            nothing_arrived=nothing,
            consistent=bool(same.all()),
            divisor=divisor,
        )


def _words(text: str) -> list[int]:
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return [(digest >> (_WORD_BITS * index)) & ((1 << _WORD_BITS) - 1) for index in range(_NUM_WORDS)]

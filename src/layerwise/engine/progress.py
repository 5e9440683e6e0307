"""How far a bucket's gradient has come on its way to the sum over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from layerwise.comm.handles import Handle


class BucketPhase(Enum):
    """Where a bucket's gradient is on its way."""

    FILLING = "filling"  # backward may still write here
    REDUCING = "reducing"  # the collective is in flight: memory is not ours
    REDUCED = "reduced"  # the shard holds the sum over ranks


@dataclass
class Flight:
    """A bucket's gradient of one round on its way."""

    handle: Handle
    full: Tensor
    out: Tensor


@dataclass
class Progress:
    """How far one bucket has come since the last step."""

    phase: BucketPhase = BucketPhase.FILLING
    pending: int = 0
    """Params that are expected, and whose last gradient of this backward has not come."""
    flights: list[Flight] = field(default_factory=list)
    has_landed: bool = False
    """The shard holds the sum of a round already: the next one is added."""

"""How attention logits are kept small, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerwise.config.habits import understands


@understands()
@dataclass(frozen=True, kw_only=True)
class QKClip:
    """QK-clip, which with Muon makes MuonClip (Kimi K2, arXiv 2507.20534): after a step, query and key weights of heads
    whose largest attention logit was above a threshold are scaled down to it.

    Args:
        threshold: largest attention logit, after the softmax scale, that is left alone. 100 is the source's; inf watches and
            scales nothing.
        balance: share of the factor eta that query rows take, in [0, 1]: eta**balance, and key rows eta**(1 - balance). 0.5, so
            that both shrink alike.
    """

    threshold: float = 100.0
    balance: float = 0.5

    def __post_init__(self) -> None:
        for name in ("threshold", "balance"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
                raise ValueError(f"QKClip: {name} must be a number, got {value!r}.")
        if self.threshold <= 0:
            raise ValueError(f"QKClip: threshold must be above 0, got {self.threshold!r}.")
        if not 0.0 <= self.balance <= 1.0:
            raise ValueError(f"QKClip: balance must be in [0, 1], got {self.balance!r}.")

    def eta(self, logit: float) -> float:
        """What a head's logits have to be multiplied with; 1 for one that never ran or that is not finite."""
        return self.threshold / logit if self.threshold < logit < math.inf else 1.0

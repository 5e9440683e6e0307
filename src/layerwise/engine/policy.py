"""What to do with gradients before they are used: clip, skip, refuse. Every decision is a function of reduced
values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from layerwise.config.rules import plain_option
from layerwise.engine.totals import Totals
from layerwise.errors import listed
from layerwise.kernels.verdicts import LARGEST, Bounds

ClipScope = Literal["all", "other-only", "none"]
OnNonFinite = Literal["skip", "raise", "ignore"]

_FAMILIES = ("matrix", "other")


@dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """The optimizer's arguments about gradients; `Optimizer` documents them."""

    clip_grad_norm: float | None
    clip: ClipScope
    nonfinite: OnNonFinite
    skip_above: float | None
    strict_grads: bool
    max_skipped: int | None = None

    def __post_init__(self) -> None:
        for name in ("clip_grad_norm", "skip_above"):
            bound = plain_option(getattr(self, name))
            object.__setattr__(self, name, bound)
            if bound is not None and not (isinstance(bound, int | float) and bound > 0):
                raise ValueError(f"{name} must be a positive number, got {bound!r}. None switches it off.")
        most = self.max_skipped
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            raise ValueError(f"max_skipped must be a number of steps, 0 or more, got {most!r}. None switches it off.")
        if self.clip not in ("all", "other-only", "none"):
            raise ValueError(f"clip must be 'all', 'other-only' or 'none', got {self.clip!r}.")
        if self.nonfinite not in ("skip", "raise", "ignore"):
            raise ValueError(f"nonfinite must be 'skip', 'raise' or 'ignore', got {self.nonfinite!r}.")

    @property
    def _families(self) -> tuple[str, ...]:
        return _FAMILIES if self.clip == "all" else ("other",)

    def clipped_norm(self, totals: Totals) -> float:
        """The norm that families are clipped by."""
        return totals.norm(*self._families)

    def clip_coefficients(self, totals: Totals, names: Sequence[str]) -> dict[str, float]:
        """What to multiply each norm group's gradients with. The two families share one norm; a named group has its
        own."""
        bounds = self.bounds(tuple(names), totals.divisors.common)
        return dict(zip(names, bounds.factors([totals.square_sums[name] for name in names]), strict=True))

    @lru_cache(maxsize=64)  # noqa: B019  # policies are values, and few
    def bounds(self, names: tuple[str, ...], divisor: float) -> Bounds:
        """What decides about clipping and skipping, on a host or a device; norm groups in this order."""
        is_clipped = self.clip_grad_norm is not None and self.clip != "none"
        shared = {name: self._families if name in self._families else (name,) for name in names}
        unclipped = {name for name in _FAMILIES if name not in self._families} if is_clipped else set(names)
        return Bounds(
            clip_norm=math.inf if self.clip_grad_norm is None else self.clip_grad_norm,
            together=tuple(() if name in unclipped else tuple(map(names.index, shared[name])) for name in names),
            families=tuple(map(names.index, _FAMILIES)),
            skip_above=math.inf if self.skip_above is None else self.skip_above,
            needs_finite=self.nonfinite != "ignore",
            divisor=divisor,
        )

    def skip_reason(self, totals: Totals) -> str:
        """Why this step is not to be taken; empty if it is."""
        if totals.nothing_arrived:
            return "no param has a gradient on any rank"
        if unfit := self.unfit(totals):
            return unfit
        norm = totals.norm(*_FAMILIES)
        if self.skip_above is not None and norm > self.skip_above:
            return f"gradient norm {norm:.4g} is above skip_above={self.skip_above:g}"
        return ""

    def unfit(self, totals: Totals) -> str:
        """Why fp32 state cannot take these gradients; empty if it can, or is to take them all the same."""
        if self.nonfinite == "ignore":
            return ""
        if totals.nonfinite:
            return f"gradients of {listed(totals.nonfinite)} hold inf or NaN"
        names, sums = tuple(totals.square_sums), tuple(totals.square_sums.values())
        bounds = self.bounds(names, totals.divisors.common)
        norms = [f"{bounds.norm(sums, (group,)):.4g} of {names[group]!r}" for group in bounds.too_large(sums)]
        if norms:
            return f"gradient norms are above {LARGEST:.4g} after clipping, and their squares inf in fp32: {', '.join(norms)}"
        return ""

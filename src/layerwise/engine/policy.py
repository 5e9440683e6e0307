"""Decisions about a step by its gradient policy: clip, skip, refuse. Every decision is a function of reduced values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from layerwise.config.gradients import FAMILIES, GradientPolicy, bound_problems
from layerwise.config.rules import plain_option
from layerwise.engine.totals import Totals
from layerwise.errors import listed
from layerwise.kernels.verdicts import LARGEST, Bounds


@dataclass(frozen=True)
class StepPolicy:
    """A gradient policy with the norm that gradients are clipped to, which `clip_grad_norm_()` may lower for one step."""

    given: GradientPolicy
    clip_grad_norm: float | None

    def __post_init__(self) -> None:
        bound = plain_option(self.clip_grad_norm)
        object.__setattr__(self, "clip_grad_norm", bound)
        for problem in bound_problems("clip_grad_norm", bound):
            raise ValueError(problem)
        if not isinstance(self.given, GradientPolicy):
            raise TypeError(
                f"gradient_policy must be a layerwise.GradientPolicy, got {self.given!r}. None stands for its defaults."
            )

    def facts(self) -> dict[str, object]:
        """The settings that all pipeline stages must have in common."""
        return {"clip_grad_norm": self.clip_grad_norm, **self.given.facts()}

    @property
    def _families(self) -> tuple[str, ...]:
        return FAMILIES if self.given.clip == "all" else ("other",)

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
        shared = {name: self._families if name in self._families else (name,) for name in names}
        unclipped = set(names) if self.clip_grad_norm is None else set(FAMILIES) - set(self._families)
        return Bounds(
            clip_norm=math.inf if self.clip_grad_norm is None else self.clip_grad_norm,
            together=tuple(() if name in unclipped else tuple(map(names.index, shared[name])) for name in names),
            families=tuple(map(names.index, FAMILIES)),
            skip_above=math.inf if self.given.skip_above is None else self.given.skip_above,
            needs_finite=self.given.nonfinite != "ignore",
            divisor=divisor,
        )

    def skip_reason(self, totals: Totals) -> str:
        """Why this step is not to be taken; empty if it is."""
        if totals.nothing_arrived:
            return "no param has a gradient on any rank"
        if unfit := self.unfit(totals):
            return unfit
        norm, most = totals.norm(*FAMILIES), self.given.skip_above
        if most is not None and norm > most:
            return f"gradient norm {norm:.4g} is above skip_above={most:g}"
        return ""

    def unfit(self, totals: Totals) -> str:
        """Why fp32 state cannot take these gradients; empty if it can, or is to take them all the same."""
        if self.given.nonfinite == "ignore":
            return ""
        if totals.nonfinite:
            return f"gradients of {listed(totals.nonfinite)} hold inf or NaN"
        names, sums = tuple(totals.square_sums), tuple(totals.square_sums.values())
        bounds = self.bounds(names, totals.divisors.common)
        norms = [f"{bounds.norm(sums, (group,)):.4g} of {names[group]!r}" for group in bounds.too_large(sums)]
        if norms:
            return f"gradient norms are above {LARGEST:.4g} after clipping, and their squares inf in fp32: {', '.join(norms)}"
        return ""

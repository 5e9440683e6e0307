"""Dynamic loss scaling for fp16 params: gradients are computed from a scaled-up loss so that small ones do not
vanish."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layerwise.config.habits import OF_LOSS_SCALE, understands
from layerwise.dtypes import DType
from layerwise.errors import warn
from layerwise.layout.plan import Plan


@understands(OF_LOSS_SCALE)
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the scale of an fp16 loss moves. Powers of two throughout, so that scaling and unscaling are exact.

    Args:
        initial: scale of the first step. 2**16 is torch's; too large a one costs a few skipped steps.
        factor: multiplies the scale after `growth_interval` good steps and divides it after `hysteresis` bad ones; 2 is torch's.
        growth_interval: steps without inf or NaN in a row after which the scale grows. 1000, half of torch's, regains it sooner.
        hysteresis: steps with inf or NaN since the scale last moved after which it shrinks. 2 forgives a single bad batch.
        minimum: the scale never falls below. 1 is no scaling at all.
    """

    initial: float = 2.0**16
    factor: float = 2.0
    growth_interval: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "minimum"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and math.frexp(value)[0] == 0.5):
                raise ValueError(
                    f"LossScale: {name} must be a power of two, got {value!r}: other scales would round gradients."
                )
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"LossScale: {name} must be a number of steps, got {value!r}.")
        if self.minimum > self.initial:
            raise ValueError(f"LossScale: minimum is {self.minimum:g}, above initial={self.initial:g}.")
        if self.factor <= 1 or self.growth_interval < 1 or self.hysteresis < 1:
            raise ValueError(
                f"LossScale: expected factor above 1, growth_interval and hysteresis at least 1, got {self.factor!r}, "
                f"{self.growth_interval!r} and {self.hysteresis!r}."
            )


class LossScaler:
    """The live scale. It moves only on facts that all ranks share, so it is the same everywhere."""

    def __init__(self, config: LossScale) -> None:
        self.config = config
        self.scale = config.initial
        self.good_steps = 0
        self.bad_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Advance after a step: shrink when gradients overflowed, grow after a long enough quiet stretch."""
        if overflow:
            self.good_steps = 0
            self.bad_steps += 1
            if self.bad_steps >= self.config.hysteresis:
                self.scale = max(self.scale / self.config.factor, self.config.minimum)
                self.bad_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.config.growth_interval:
            self.scale *= self.config.factor
            self.good_steps = self.bad_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "bad_steps": self.bad_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps, self.bad_steps = int(state["good_steps"]), int(state["bad_steps"])


def checked_loss_scale(loss_scale: object, plan: Plan) -> LossScale | None:
    """The argument as it is, once it is known to be one; fp16 params without loss scaling get a warning."""
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(f"loss_scale must be a layerwise.LossScale or None, got {loss_scale!r}.")
    if loss_scale is None and any(buffer.key.dtype is DType.FP16 for buffer in plan.buffers):
        warn("params are fp16 and loss_scale is None: small gradients vanish. Pass LossScale().")
    return loss_scale

"""Learning-rate schedules: a step number to a factor on every base rate. Pure."""

from __future__ import annotations

import math

from layerwise.config.schema import ScheduleConfig


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """The factor for step `step` (counted from 0) of `total_steps`.

    Warm-up is linear and its first step already moves: factor 1/warmup. The last step of cosine and wsd has exactly
    `min_lr_ratio`, so a run that ends where it was told to has used the whole schedule.

    >>> lr_factor(ScheduleConfig(kind="cosine", warmup_steps=0, min_lr_ratio=0.1), 99, 100)
    0.1
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    decay_steps = total_steps - schedule.warmup_steps
    if schedule.kind == "wsd":
        decay_steps = round(schedule.decay_fraction * total_steps)
    done = step - (total_steps - 1 - decay_steps)  # steps into the decay; not above 0 while the rate is still flat
    if decay_steps == 0 or done <= 0:
        return 1.0
    progress = min(1.0, done / decay_steps)
    height = 1.0 - progress if schedule.kind == "wsd" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * height

from __future__ import annotations

import math
from typing import Any

import pytest

from layerwise.engine.loss_scale import LossScale, LossScaler


def scales(config: LossScale, overflows: str) -> list[float]:
    """The scale after each step; x is an overflow, a dot a clean step."""
    scaler = LossScaler(config)
    found = []
    for mark in overflows:
        scaler.update(overflow=mark == "x")
        found.append(scaler.scale)
    return found


def test_the_scale_shrinks_after_as_many_overflows_as_hysteresis() -> None:
    assert scales(LossScale(initial=64.0, hysteresis=3), "xxx.xxx") == [64.0, 64.0, 32.0, 32.0, 32.0, 32.0, 16.0]


def test_the_scale_grows_after_an_unbroken_interval_only() -> None:
    assert scales(LossScale(initial=64.0, growth_interval=2, hysteresis=9), ".x.x..") == [64.0] * 5 + [128.0]


def test_the_scale_stops_at_its_minimum() -> None:
    assert scales(LossScale(initial=4.0, minimum=2.0, hysteresis=1), "xxx") == [2.0, 2.0, 2.0]


def test_state_goes_out_and_in() -> None:
    config = LossScale(initial=64.0, growth_interval=3, hysteresis=2)
    one, other = LossScaler(config), LossScaler(config)
    for overflow in (True, False, False):
        one.update(overflow=overflow)
    other.load_state_dict(one.state_dict())
    for scaler in (one, other):
        scaler.update(overflow=False)
    assert other.state_dict() == one.state_dict()
    assert other.scale == 128.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"initial": 0.0}, "initial must be a power of two, got 0.0"),
        ({"initial": math.inf}, "initial must be a power of two, got inf"),
        ({"initial": math.nan}, "initial must be a power of two, got nan"),
        ({"initial": 1000.0}, "initial must be a power of two, got 1000.0"),
        ({"initial": 4.0, "minimum": 1024.0}, "minimum is 1024, above initial=4"),
        ({"growth_interval": 1.5}, "growth_interval must be a number of steps, got 1.5"),
        ({"hysteresis": True}, "hysteresis must be a number of steps, got True"),
        ({"minimum": -1.0}, "minimum must be a power of two, got -1.0"),
        ({"factor": 3.0}, "factor must be a power of two, got 3.0"),
        ({"factor": 1.0}, "factor above 1"),
        ({"growth_interval": 0}, "growth_interval and hysteresis at least 1"),
        ({"hysteresis": 0}, "growth_interval and hysteresis at least 1"),
    ],
)
def test_a_scale_that_would_round_or_never_move_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossScale(**options)

from __future__ import annotations

import math

from layerwise.engine.factors import Factors


def test_every_region_has_the_factor_of_its_group_and_its_shape_under_the_options_of_now() -> None:
    factors = Factors([(0, (4, 9)), (1, (4, 9)), (0, (4, 9)), (0, (16, 2))])
    options = [
        {"lr": 0.5, "scale": "spectral", "extra_scale": 2.0},
        {"lr": 0.25, "scale": "none", "extra_scale": 1.0},
    ]
    assert factors.under(options) == [3.0, 0.25, 3.0, 4.0]
    options[0]["lr"], options[1]["scale"] = 1.0, "rms"
    assert factors.under(options) == [6.0, 0.25 * (0.2 * math.sqrt(9)), 6.0, 8.0]


def test_every_region_keeps_what_the_decay_of_its_group_leaves() -> None:
    factors = Factors([(0, (4, 9)), (1, (4, 9)), (0, (16, 2))])
    options = [
        {"lr": 0.5, "weight_decay": 0.5, "weight_decay_mode": "decoupled"},
        {"lr": 0.5, "weight_decay": 0.5, "weight_decay_mode": "independent"},
    ]
    assert factors.keeps_under(options) == [0.75, 0.5, 0.75]
    options[0]["lr"], options[1]["weight_decay_mode"] = 1.0, "coupled"
    assert factors.keeps_under(options) == [0.5, 1.0, 0.5]


def test_no_regions_have_no_factors() -> None:
    assert Factors([]).under([]) == Factors([]).keeps_under([]) == []

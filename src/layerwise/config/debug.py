"""LAYERWISE_DEBUG, an environment variable: checks for debugging that are too slow for a run, as names with commas between them."""

from __future__ import annotations

import os
from typing import Literal, get_args

from layerwise.errors import did_you_mean

VARIABLE = "LAYERWISE_DEBUG"

Check = Literal["collectives"]
"""collectives: before every collective ranks compare what each is about to issue. Nothing is reduced during backward then, because a comparison waits for
all ranks."""

CHECKS: tuple[Check, ...] = get_args(Check)


def checks_on() -> frozenset[Check]:
    """The checks that LAYERWISE_DEBUG names. Raises ValueError for a name that is no check."""
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    found = frozenset(check for check in CHECKS if check in names)
    for name in sorted(names - found):
        raise ValueError(
            f"{VARIABLE} names {name!r}: expected {', '.join(CHECKS)}, with commas between them.{did_you_mean(name, CHECKS)}"
        )
    return found

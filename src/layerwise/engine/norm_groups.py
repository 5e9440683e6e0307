"""Params that are clipped by a norm of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from layerwise.errors import did_you_mean
from layerwise.layout.plan import Plan


def assign_norm_groups(plan: Plan, norm_groups: Mapping[str, str], everywhere: Collection[str]) -> dict[str, str]:
    """The norm group of every trainable param: the first named group whose glob matches, else its family.

    `everywhere` has the trainable params of all pipeline stages: a group may have members on another one only.
    """
    trainable = [param.fqn for param in plan.table if plan.routes[param.fqn].family != "frozen"]
    for name, pattern in norm_groups.items():
        if not any(fnmatchcase(fqn, pattern) for fqn in everywhere):
            raise ValueError(
                f"norm group {name!r} ({pattern!r}) matches no trainable param." + did_you_mean(pattern, everywhere)
            )
    return {
        fqn: next((name for name, pattern in norm_groups.items() if fnmatchcase(fqn, pattern)), plan.routes[fqn].family)
        for fqn in trainable
    }

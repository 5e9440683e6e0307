"""Which tests everybody runs, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Cases as params of a test: the named ones are of `make test`, the others are slow. A tuple holds several params."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    if unknown:
        raise ValueError(f"no such cases: {unknown}. There are {cases}.")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in quick else (pytest.mark.slow,)
        )
        for case in cases
    ]

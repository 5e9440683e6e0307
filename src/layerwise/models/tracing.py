"""What torch.compile must never trace: collectives, versions and values of the host are no part of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_traced(function: _Function, *, recursive: bool = True) -> _Function:
    """A function for code that may be called within a compiled one. Without `recursive`, what it calls may be traced.

    Made at once: torch's own decorator for libraries makes it at the first call, which may be in the middle of a trace,
    and then fails of its own doing.
    """
    return cast(_Function, torch.compiler.disable(function, recursive=recursive))  # type: ignore[no-untyped-call]

"""What torch.compile must never trace: collectives, versions and values of the host are no part of a graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_traced(function: _Function, *, recursive: bool = True) -> _Function:
    """A function for code that may be called within a compiled one. Without `recursive`, what it calls may be traced.

    A function of a module or a class, which is decorated on import, loads the compiler (1.3 s) at its first call, as methods
    of torch's own optimizers do. A local function, which belongs to a model, is made at once: its first call may be in the
    middle of a trace, and torch's lazy decorator then fails of its own doing.
    """
    if "<locals>" in function.__qualname__ or "torch._dynamo" in sys.modules:
        return cast(_Function, torch.compiler.disable(function, recursive=recursive))  # type: ignore[no-untyped-call]
    return cast(_Function, _disable_dynamo(function, recursive))

"""Modules of shapes alone. Imports torch, so it is imported last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DRAWS = frozenset(
    {
        "normal_",
        "uniform_",
        "trunc_normal_",
        "kaiming_normal_",
        "kaiming_uniform_",
        "xavier_normal_",
        "xavier_uniform_",
        "orthogonal_",
    }
)
"""What fills a tensor with random values: methods of tensors, and functions of `torch.nn.init` of the same kind."""


class _NothingToDraw(TorchFunctionMode):
    """Leaves meta tensors as they are. They have no values, yet to draw some torch would import its compiler, which takes
    longer than everything else that `inspect` does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        target = args[0] if args else named.get("tensor")
        if getattr(func, "__name__", "") in _DRAWS and isinstance(target, torch.Tensor) and target.is_meta:
            return target
        return func(*args, **named)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Modules built in here have shapes and dtypes, but neither memory nor values."""
    with torch.device("meta"), _NothingToDraw():
        yield

"""Answers to what meta tensors cannot tell: values that a forward asks for, and shapes that depend on values.

Experts are looped over, masks are asked whether they are all true. The answers are made up, so that the forward goes on;
that there were any is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def _scalar(tensor: Tensor) -> object:
    if tensor.dtype is torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 0


def _zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _unique(tensor: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
    return _zeros(1, dtype=tensor.dtype), _zeros(*tensor.shape), _zeros(1)


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_local_scalar_dense": _scalar,
    "nonzero": lambda tensor: _zeros(1, tensor.dim()),
    "equal": lambda *_: True,
    "is_nonzero": lambda tensor: False,
    "bincount": lambda tensor, weights=None, minlength=0: _zeros(max(1, minlength)),
    "_unique2": _unique,
    "unique_dim": _unique,
    "unique_consecutive": _unique,
    "masked_select": lambda tensor, mask: _zeros(1, dtype=tensor.dtype),
}


class Answers:
    """Answers, and how many were made up."""

    def __init__(self) -> None:
        self.count = 0

    def to(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Whether an operation has to be answered for, and with what."""
        about = args[0] if args else None
        if not isinstance(about, Tensor) or not about.is_meta:
            return False, None
        if name == "_to_copy" and _is_real(kwargs.get("device")):
            self.count += 1
            return True, torch.zeros(about.shape, dtype=kwargs.get("dtype") or about.dtype, device=kwargs["device"])
        if name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor):
            self.count += 1
            return True, about  # as if each came once
        answer = _ANSWERS.get(name)
        if answer is None:
            return False, None
        self.count += 1
        return True, answer(*args, **kwargs)

    def fitted(self, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """Arguments that were made up of answers, made to fit: sizes of the parts of a tensor, masks of unknown rows."""
        if name in ("split_with_sizes", "split_with_sizes_copy") and self.count:
            tensor, sizes, *rest = args
            dim = rest[0] if rest else 0
            if sum(sizes) != tensor.shape[dim]:
                return [tensor, [tensor.shape[dim], *(0 for _ in sizes[1:])], *rest]
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            tensor, indices, *rest = args
            if any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices):
                return [tensor, list(self._places(indices)), *rest]
        return args

    def _places(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Masks as the indices of what they let through: known ones truly, others as one place."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
            elif index.is_meta:
                self.count += 1
                found.extend(_zeros(1) for _ in range(index.dim()))
            else:
                found.extend(index.nonzero().unbind(1))
        return found


def _is_real(device: Any) -> bool:
    return device is not None and torch.device(device).type != "meta"


class KnownIndices(TorchFunctionMode):
    """Lists of numbers as indices keep their values: torch would make meta tensors of them where nobody can see it."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__ and len(args) == 2:
            found = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(index, list) for index in found):
                args = (args[0], tuple(_known(index) for index in found))
        return func(*args, **(kwargs or {}))


def _known(index: object) -> object:
    is_numbers = isinstance(index, list) and index and all(type(item) is int for item in index)
    return torch.tensor(index, device="cpu") if is_numbers else index

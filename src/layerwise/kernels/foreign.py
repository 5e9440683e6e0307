"""Quantised tensors of others: of which types it is known how they are trained, and what a param of such a type holds."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from layerwise.kernels.stored import ParamStorage, QuantizedStorage

Adapter = Callable[[Any], QuantizedStorage]
"""Given a tensor of its type, what it takes to train it; a ValueError says why a tensor cannot be trained."""

_ADAPTERS: dict[type, Adapter] = {}
_KNOWN = {
    ("torchao.prototype.mx_formats.mx_tensor", "MXTensor"): ("layerwise.kernels.torchao_mx", "MXStorage"),
}
"""Adapters of ours, by where the type is defined: whoever has a tensor of it has imported its package, and nobody else needs it."""


def register_quantized(kind: type[Tensor], adapter: Adapter) -> None:
    """Have `adopt()` know quantised tensors of one more type, in place of what it knew of that type before.

    Args:
        kind: the class of the tensors, and of those derived from it.
        adapter: called with a tensor of that class, which shares memory with the param; returns a `QuantizedStorage`, or
            raises a ValueError that says why this tensor cannot be trained.
    """
    if not (isinstance(kind, type) and issubclass(kind, Tensor)):
        raise TypeError(f"kind must be a class of tensors, got {kind!r}.")
    if kind in Tensor.__mro__ or kind is torch.nn.Parameter:
        raise TypeError(
            f"kind is {kind.__name__}, which plain params are of: expected a class of quantised tensors alone."
        )
    if not callable(adapter):
        raise TypeError(
            f"adapter must be callable with a tensor of that class, such as a class itself, got {type(adapter).__name__}."
        )
    _ADAPTERS[kind] = adapter


def adapter_of(tensor: Tensor) -> Adapter | None:
    """What knows the type of a tensor, if anything does."""
    for kind in type(tensor).__mro__:
        if kind in _ADAPTERS:
            return _ADAPTERS[kind]
        known = _KNOWN.get((kind.__module__, kind.__qualname__))
        if known is not None:
            module, name = known
            found: Adapter = getattr(import_module(module), name)
            return found
    return None


class Adopted(ParamStorage):
    """Codes that somebody else's type keeps and makes."""

    def __init__(self, storage: QuantizedStorage, values: Tensor) -> None:
        super().__init__(storage.shape, values)
        self.storage = storage
        self.settle(values)

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def codes(self) -> tuple[Tensor, ...]:
        return self.storage.codes

    def settle(self, values: Tensor) -> None:
        self.storage.settle(values)
        self._counted[0] += 1

    def read(self) -> Tensor:
        return self.storage.read()

    def product(self, x: Tensor, *, by_rows: bool) -> Tensor:
        """Others are asked for matrices in bf16 only, and are not to cast what they hold."""
        flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1]).contiguous()
        with torch.autocast(x.device.type, enabled=False):
            found = self.storage.product(flat, by_rows=by_rows)
        return found.to(x.dtype).view(*x.shape[:-1], found.shape[-1])

    def take_given(self, fqn: str) -> Tensor:
        self.storage.given = None
        return super().take_given(fqn)

    def copy(self) -> Adopted:
        made = object.__new__(Adopted)
        made.shape, made._counted, made.storage = self.shape, list(self._counted), deepcopy(self.storage)
        made.given = None if self.given is None else self.given.clone()
        return made

"""Lists of tensors that one launch works on, and what it has to know of each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TypeAlias

import torch
from torch import Tensor

_DTYPE: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_SHAPE: Callable[[Tensor], torch.Size] = attrgetter("shape")

Whole: TypeAlias = tuple[tuple[int, ...], ...]
"""A shape, or strides, of every tensor."""


class Facts:
    """Where tensors lie, and in which form. Each is asked for once, and with no step of Python for a tensor."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        return tuple(map(Tensor.data_ptr, self._tensors))

    @cached_property
    def numels(self) -> tuple[int, ...]:
        return tuple(map(Tensor.numel, self._tensors))

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(map(_DTYPE, self._tensors))

    @cached_property
    def one_dtype(self) -> torch.dtype | None:
        """The dtype of all of them, if they have one."""
        return self.dtypes[0] if len(set(self.dtypes)) == 1 else None

    @cached_property
    def are_contiguous(self) -> bool:
        return all(map(Tensor.is_contiguous, self._tensors))

    @cached_property
    def shapes(self) -> Whole:
        return tuple(map(_SHAPE, self._tensors))

    @cached_property
    def strides(self) -> Whole:
        return tuple(map(Tensor.stride, self._tensors))


class Kept(list[Tensor]):
    """Tensors that stay where they are: masters, and state. What is known of them once is known in every step."""

    @cached_property
    def facts(self) -> Facts:
        return Facts(tuple(self))


def facts_of(tensors: Sequence[Tensor]) -> Facts:
    """What is known of these tensors."""
    return tensors.facts if isinstance(tensors, Kept) else Facts(tensors)

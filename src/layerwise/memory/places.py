"""Where params lie and how often they were written, as it was last noted: read again in every step, so no Python code runs
per param."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, count, repeat
from operator import attrgetter, is_not, ne
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from layerwise.memory.hooked import grads_of

_DATA_PTR: Callable[[Tensor], int] = Tensor.data_ptr
_SHAPE: Callable[[Tensor], torch.Size] = attrgetter("shape")
_DTYPE: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_VERSION: Callable[[Tensor], int] = attrgetter("_version")


class Places:
    """Addresses, shapes, dtypes and versions of params.

    They are read past the params' classes: nothing of it is a value, and looking for an override in the class of a hooked
    param takes longer than the read.
    """

    def __init__(self, params: Sequence[Tensor], held_of: Callable[[Tensor], Tensor] | None = None) -> None:
        """`held_of` is what this rank has of a param, where that may be another tensor within it: one that `module.to()`
        exchanges, and whose version moves for other writers than that of the param."""
        self._params = list(params)
        self._held_of = held_of
        held = self._held()
        with DisableTorchFunctionSubclass():
            self._addresses = list(map(_DATA_PTR, held))
            self._shapes = list(map(_SHAPE, held))
            self._dtypes = list(map(_DTYPE, held))
        self.note()

    def moved(self) -> list[int]:
        """Numbers of the params that do not lie where they did, or not in the same shape and dtype."""
        held = self._held()
        with DisableTorchFunctionSubclass():
            addresses = _differing(self._addresses, list(map(_DATA_PTR, held)))
            shapes = _differing(self._shapes, list(map(_SHAPE, held)))
            dtypes = _differing(self._dtypes, list(map(_DTYPE, held)))
        return sorted({*addresses, *shapes, *dtypes})

    def with_grads(self) -> list[int]:
        """Numbers of the params that have a `.grad`."""
        with DisableTorchFunctionSubclass():
            return _numbers(map(is_not, grads_of(self._params), repeat(None)))

    def written(self) -> list[int]:
        """Numbers of the params that were written since this was asked or noted last."""
        before, held_before = self._versions, self._held_versions
        self.note()
        return sorted({*_differing(before, self._versions), *_differing(held_before, self._held_versions)})

    def note(self) -> None:
        """Versions are to be what they are now."""
        held = self._held()
        with DisableTorchFunctionSubclass():
            self._versions = list(map(_VERSION, self._params))
            self._held_versions = self._versions if held is self._params else list(map(_VERSION, held))

    def _held(self) -> list[Tensor]:
        return self._params if self._held_of is None else list(map(self._held_of, self._params))


def _differing(before: list[Any], now: list[Any]) -> list[int]:
    return _numbers(map(ne, before, now)) if before != now else []


def _numbers(chosen: Iterable[bool]) -> list[int]:
    """At which places of a list there is a true value."""
    return list(compress(count(), chosen))

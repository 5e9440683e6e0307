"""Where params lie and how often they were written, as it was last noted: read again in every step, so no Python code runs
per param."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, count, repeat
from operator import attrgetter, is_not, ne
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from layerwise.errors import warn
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


def warn_of_views(params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], *, aloud: bool) -> None:
    """Warn of buffers in the memory of params that are about to move elsewhere. Every rank calls it, and the warning is
    printed where `aloud`."""
    if views := _views_of(params, buffers):
        pairs = ", ".join(f"{name!r} of {fqn!r}" for name, fqn in views)
        warn(
            f"buffers are views of params: {pairs}. Weights move to memory of ours, and these buffers stay where they are: they keep "
            "the values of now. Compute them from the param in forward (self.weight.detach()), or update them after step().",
            aloud=aloud,
        )


def _views_of(params: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Names of tensors among `others` that lie in the memory of a param, each with that of the param."""
    moving = {fqn: param for fqn, param in params.items() if param.requires_grad and param.numel()}
    plain = [(fqn, param) for fqn, param in moving.items() if type(param) in (Tensor, nn.Parameter)]
    places = [(param.data_ptr(), param.data_ptr() + extent_of(param), fqn) for fqn, param in plain]
    found: list[tuple[str, str]] = []
    for name, other in others.items():
        if other.numel() and type(other) in (Tensor, nn.Buffer) and other.layout == torch.strided and not other.is_meta:
            at, stop = other.data_ptr(), other.data_ptr() + extent_of(other)
            found.extend((name, fqn) for first, last, fqn in places if first < stop and at < last)
    return found


def extent_of(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def is_channels_last(param: Tensor) -> bool:
    """Whether channels lie next to each other, and the order of its memory is another one than that of its indices."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    own = formats.get(param.ndim)
    return own is not None and not param.is_contiguous() and param.is_contiguous(memory_format=own)

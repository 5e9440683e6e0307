"""Lists of tensors that one launch works on, and what it has to know of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, repeat
from math import prod
from operator import add, attrgetter, mul
from typing import NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from layerwise.routing.geometry import row_major_strides

_DTYPE: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_SHAPE: Callable[[Tensor], torch.Size] = attrgetter("shape")
_ITEMSIZE: Callable[[torch.dtype], int] = attrgetter("itemsize")

Tensors: TypeAlias = Sequence[Tensor]
Whole: TypeAlias = tuple[tuple[int, ...], ...]
"""A shape, or strides, of every tensor."""


class Facts:
    """Where tensors lie, and in which form. Each is asked for once, and with no step of Python for a tensor."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    @cached_property
    def device(self) -> torch.device:
        """Of all of them, of which there are some."""
        return self._tensors[0].device

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


class View(NamedTuple):
    """Some elements of one of several tensors, from an offset on: in elements, from where that tensor begins."""

    tensor: int
    """Its number."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Cuts:
    """How tensors are cut into views, whichever tensors those are: known once, where they are others in every step.

    Making a view takes torch as long as a small kernel takes the device, and a step has hundreds of them. A launch needs no
    more of one than its address, so views are made only for who asks for tensors.
    """

    def __init__(self, views: Iterable[View]) -> None:
        self.views = tuple(views)
        self.owners = tuple(view.tensor for view in self.views)
        self.used = tuple(sorted(set(self.owners)))
        self.shapes: Whole = tuple(view.shape for view in self.views)
        self.strides: Whole = tuple(view.strides for view in self.views)
        self.numels = tuple(prod(view.shape) for view in self.views)
        self.are_contiguous = all(_is_contiguous(view) for view in self.views)
        self._offsets = tuple(view.offset for view in self.views)
        self.nbytes_before = cache(self._nbytes_before)

    def _nbytes_before(self, itemsize: int) -> tuple[int, ...]:
        """Offsets in bytes, of elements of one size."""
        return tuple(map(mul, self._offsets, repeat(itemsize)))

    def __len__(self) -> int:
        return len(self.views)

    def of(self, tensors: Tensors) -> Views:
        """The views of these tensors, whose elements lie side by side and in order in each."""
        return Views(self, tensors)


class Views(Sequence[Tensor]):
    """Views of some tensors, each made when it is asked for."""

    def __init__(self, cuts: Cuts, tensors: Tensors) -> None:
        self.cuts, self.tensors = cuts, tensors

    @cached_property
    def facts(self) -> Facts:
        return _FactsOfViews(self.cuts, self.tensors)

    def __len__(self) -> int:
        return len(self.cuts)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        views = self.cuts.views[index]
        return self._made(views) if isinstance(views, View) else list(map(self._made, views))

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._made, self.cuts.views)

    def _made(self, view: View) -> Tensor:
        tensor = self.tensors[view.tensor]
        if view.offset == 0 and tensor.shape == view.shape and tensor.stride() == view.strides:
            return tensor
        return tensor.as_strided(view.shape, view.strides, tensor.storage_offset() + view.offset)


class _FactsOfViews(Facts):
    """Of views that nobody has made. They hold their facts, so these hold no views: memory must be free as soon as it is
    let go, not when somebody looks for garbage."""

    def __init__(self, cuts: Cuts, tensors: Tensors) -> None:
        super().__init__(())
        self._cuts, self._cut = cuts, tensors
        self.numels = self._cuts.numels
        self.shapes, self.strides, self.are_contiguous = (
            self._cuts.shapes,
            self._cuts.strides,
            self._cuts.are_contiguous,
        )

    @cached_property
    def device(self) -> torch.device:
        return self._cut[self._cuts.used[0]].device

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(map(list(map(_DTYPE, self._cut)).__getitem__, self._cuts.owners))

    @cached_property
    def one_dtype(self) -> torch.dtype | None:
        found = {self._cut[number].dtype for number in self._cuts.used}
        return found.pop() if len(found) == 1 else None

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        starts = map(list(map(Tensor.data_ptr, self._cut)).__getitem__, self._cuts.owners)
        dtype = self.one_dtype
        if dtype is not None:
            return tuple(map(add, starts, self._cuts.nbytes_before(dtype.itemsize)))
        offsets = (view.offset for view in self._cuts.views)
        return tuple(map(add, starts, map(mul, offsets, map(_ITEMSIZE, self.dtypes))))


def stretch(tensor: int, start: int, stop: int) -> View:
    """Elements [start, stop) of a tensor, as one dimension."""
    return View(tensor, (stop - start,), (1,), start)


def laid_out(shapes: Sequence[tuple[int, ...]]) -> Cuts:
    """Tensors of these shapes one after the other in a single one."""
    ends = accumulate(map(prod, shapes), initial=0)
    return Cuts(View(0, shape, row_major_strides(shape), start) for shape, start in zip(shapes, ends, strict=False))


def _is_contiguous(view: View) -> bool:
    return prod(view.shape) == 0 or all(
        size == 1 or stride == expected
        for size, stride, expected in zip(view.shape, view.strides, row_major_strides(view.shape), strict=True)
    )


def facts_of(tensors: Tensors) -> Facts:
    """What is known of these tensors."""
    return tensors.facts if isinstance(tensors, (Kept, Views)) else Facts(tensors)

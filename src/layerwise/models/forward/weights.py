"""Which tensors are params, or copies of them in another order: a tensor as a view of a param.

Views share the storage of their param, so their strides say which elements they hold. A copy (a cast, `contiguous`, a
weight times a mask) has a storage of its own, for which it is written down which element of the param each element was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """A name for the memory behind a tensor, also on the meta device. Whoever keeps it must keep the tensor too."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class View:
    """Which elements of a param a tensor holds."""

    fqn: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A dense part of a storage, from `start` on: its axes with their strides there and in the param."""

    start: int
    view: View
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.view.sizes:
            count *= size
        return count


class Weights:
    """The params of a model and what was copied from them."""

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._pieces: dict[int, list[_Piece]] = {}
        self._kept: list[Tensor] = []
        for fqn, param in params.items():
            sizes, strides = tuple(param.shape), tuple(param.stride())
            self._pieces[storage_of(param)] = [_Piece(0, View(fqn, 0, sizes, strides), strides)]
            self._kept.append(param)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a param, or copied from some."""
        return storage_of(tensor) in self._pieces

    def names(self, tensor: Tensor) -> list[str]:
        """The params that it is of."""
        return list(dict.fromkeys(piece.view.fqn for piece in self._pieces.get(storage_of(tensor), ())))

    def view(self, tensor: Tensor) -> View | None:
        """The tensor as a view of one param, or None."""
        pieces = self._pieces.get(storage_of(tensor), ())
        found = (_seen_through(piece, int(tensor.storage_offset()), tensor.shape, tensor.stride()) for piece in pieces)
        return next((view for view in found if view is not None), None)

    def rows(self, tensor: Tensor, axis: int) -> list[View] | None:
        """The tensor as views of params, one after the other along an axis; None if it is none of that."""
        whole = self.view(tensor)
        if whole is not None:
            return [whole]
        pieces = sorted(self._pieces.get(storage_of(tensor), ()), key=lambda piece: piece.start)
        if len(pieces) == 1:
            return self._in_entries(tensor, axis, pieces[0])
        stride, found, at = tensor.stride(axis), list[View](), 0
        for piece in pieces:
            count = piece.numel // stride if stride and piece.numel % stride == 0 else 0
            if not count or at + count > tensor.shape[axis]:
                return None
            sizes = [count if dim == axis else size for dim, size in enumerate(tensor.shape)]
            view = _seen_through(piece, int(tensor.storage_offset()) + at * stride, sizes, tensor.stride())
            if view is None:
                return None
            found.append(view)
            at += count
        return found if at == tensor.shape[axis] else None

    def _in_entries(self, tensor: Tensor, axis: int, piece: _Piece) -> list[View] | None:
        """An axis that goes through two axes of a param in another order than they are stored in: the outer one's entries."""
        for entries in sorted({size for size in piece.view.sizes if 1 < size < tensor.shape[axis]}):
            each, rest = divmod(tensor.shape[axis], entries)
            parts = [] if rest else [tensor.narrow(axis, number * each, each) for number in range(entries)]
            views = [self.view(part) for part in parts]
            if parts and all(views):
                return [view for view in views if view is not None]
        return None

    def copied(self, copy: Tensor, of: View) -> None:
        """A tensor of the same axes holds what the view holds."""
        if tuple(copy.shape) == of.sizes and copy.storage_offset() == 0:
            self._keep(copy, [_Piece(0, of, tuple(copy.stride()))])

    def joined(self, whole: Tensor, views: Sequence[View], axis: int) -> None:
        """Views one after the other along the first axis make a new tensor."""
        if axis != 0 or not whole.is_contiguous():
            return
        pieces, start = [], 0
        for view in views:
            pieces.append(_Piece(start, view, _dense(view.sizes)))
            start += pieces[-1].numel
        self._keep(whole, pieces)

    def _keep(self, tensor: Tensor, pieces: list[_Piece]) -> None:
        self._pieces[storage_of(tensor)] = pieces
        self._kept.append(tensor)


def _dense(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _seen_through(piece: _Piece, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> View | None:
    """A strided view of a piece's storage as a view of its param, or None where it is none."""
    reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if not piece.start <= offset <= reach < piece.start + piece.numel:
        return None
    if piece.strides == piece.view.strides:  # the param itself
        return View(piece.view.fqn, piece.view.offset + offset - piece.start, tuple(sizes), tuple(strides))
    axes = sorted(
        (axis for axis in zip(piece.strides, piece.view.sizes, piece.view.strides, strict=True) if axis[1] > 1),
        reverse=True,
    )
    start, rest = piece.view.offset, offset - piece.start
    for stride, _, theirs in axes:
        start += rest // stride * theirs
        rest %= stride
    found = []
    for size, stride in zip(sizes, strides, strict=True):
        step = 0 if size == 1 or stride == 0 else _step(axes, size, stride)
        if step is None:
            return None
        found.append(step)
    return View(piece.view.fqn, start, tuple(sizes), tuple(found))


def _step(axes: Sequence[tuple[int, int, int]], size: int, stride: int) -> int | None:
    """How far a step along a view's axis goes in the param. An axis that goes through several of the piece's must go
    through them in the param's own order."""
    for number, (own, _, theirs) in enumerate(axes):
        if stride % own == 0:
            step, reach = stride // own * theirs, (size - 1) * (stride // own) + 1
            # Axes outside this one that the view goes on into.
            inner = number
            count = axes[inner][1]
            while reach > count and inner > 0:
                outer = axes[inner - 1]
                if outer[2] != axes[inner][2] * axes[inner][1]:
                    return None
                inner -= 1
                count *= outer[1]
            return step if reach <= count else None
    return None

"""Params that somebody else has cut over a mesh of ranks: every rank's box, from plain numbers and nothing else.

A dim of a mesh either copies a param or cuts one of its dims into chunks, as `torch.chunk` does: all as long as the first,
the last one shorter, and nothing for the ranks that are left. Two dims of a mesh that cut the same dim of a param cut one
after the other: a chunk of a chunk. Which comes first is part of what is known, because it matters: tensor parallelism cuts
before data parallelism does, although its ranks are the inner dim of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, TypeAlias

from layerwise.layout.shards import Ranks
from layerwise.routing.geometry import Box


class Cut(NamedTuple):
    """What one dim of a mesh does to a param: cut this dim of it."""

    dim: int
    after: int = 1
    """Into how many chunks dims of the mesh further in have cut it before."""


Chunks: TypeAlias = tuple[tuple[int, int], ...]
"""From where to where pieces of a dim go."""


class Placed(NamedTuple):
    """A param on a mesh."""

    ranks: Ranks
    """Who sits on the mesh, its last dim running fastest."""
    mesh: tuple[int, ...]
    """Its shape."""
    cuts: tuple[Cut | None, ...]
    """One per dim of the mesh; None copies."""
    data_dims: int = 0
    """How many of its first dims are those of fully_shard(): what they cut is whole in every forward. What the others cut,
    tensor or expert parallelism does, and stays cut."""

    def boxes(self, shape: tuple[int, ...], world: int) -> tuple[Box, ...]:
        """What each of `world` ranks has of a param of this shape. Who is not on the mesh has nothing."""
        found = [_nothing(shape)] * world
        orders = self._orders(shape)
        for rank, place in zip(self.ranks, product(*map(range, self.mesh)), strict=True):
            found[rank] = self._box_at(place, shape, orders)
        return tuple(found)

    def box(self, shape: tuple[int, ...], rank: int) -> Box:
        """What one rank has of it."""
        if rank not in self.ranks:
            return _nothing(shape)
        number, place = self.ranks.index(rank), list[int]()
        for size in reversed(self.mesh):
            number, along = divmod(number, size)
            place.insert(0, along)
        return self._box_at(place, shape, self._orders(shape))

    def inner_place(self, rank: int) -> tuple[int, ...]:
        """The shape of the dims that cut it for good, and the number of a rank there; nothing where none do."""
        inner = self.mesh[self.data_dims :]
        if rank not in self.ranks or not any(self.cuts[self.data_dims :]):
            return ()
        return (*inner, self.ranks.index(rank) % math.prod(inner))

    def chunks(self, shape: tuple[int, ...]) -> tuple[Chunks, ...]:
        """What tensor and expert parallelism leave of each dim of a param, in order: its blocks are all combinations. Dims of the
        mesh that are fully_shard()'s cut those again."""
        found = []
        for dim, size in enumerate(shape):
            pieces = [(0, size)]
            for along in (along for along in self._order(dim) if along >= self.data_dims):
                count = self.mesh[along]
                pieces = [_chunk(start, stop, count, number) for start, stop in pieces for number in range(count)]
            found.append(tuple((start, stop) for start, stop in pieces if start < stop))
        return tuple(found)

    def _orders(self, shape: tuple[int, ...]) -> list[list[int]]:
        return [self._order(dim) for dim in range(len(shape))]

    def _box_at(self, place: Sequence[int], shape: tuple[int, ...], orders: Sequence[Sequence[int]]) -> Box:
        """What the rank at a place of the mesh has, where each dim is cut in this order."""
        starts, stops = [0] * len(shape), list(shape)
        for dim, order in enumerate(orders):
            for along in order:
                starts[dim], stops[dim] = _chunk(starts[dim], stops[dim], self.mesh[along], place[along])
        return Box(tuple(starts), tuple(stops))

    def _order(self, dim: int) -> list[int]:
        """The dims of the mesh that cut this dim of the param, in the order in which they do."""
        order: list[int] = []
        for along, cut in reversed(list(enumerate(self.cuts))):
            if cut is not None and cut.dim == dim:
                order.insert(self._position(order, cut), along)
        return order

    def _position(self, order: Sequence[int], cut: Cut) -> int:
        """Behind how many of the dims further in this one cuts."""
        chunks = 1
        for position, along in enumerate([*order, None]):
            if chunks == cut.after:
                return position
            if along is not None:
                chunks *= self.mesh[along]
        raise ValueError(
            f"dim {cut.dim} is cut after it was cut into {cut.after} chunks, and the mesh {self.mesh} cuts it into no such number: "
            f"the cuts are {self.cuts}."
        )

    def on_all(self, meshes: Sequence[Ranks]) -> Placed:
        """The same param on several meshes of this shape, a copy on each."""
        ranks = tuple(rank for ranks in meshes for rank in ranks)
        return Placed(ranks, (len(meshes), *self.mesh), (None, *self.cuts), self.data_dims + 1)

    def to_json(self) -> list[object]:
        """As plain data."""
        return [list(self.ranks), list(self.mesh), [None if cut is None else list(cut) for cut in self.cuts]]


def _nothing(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), (0,) * len(shape))


def _chunk(start: int, stop: int, chunks: int, number: int) -> tuple[int, int]:
    """One of the chunks of an interval."""
    length = -(-(stop - start) // chunks)
    return min(start + number * length, stop), min(start + (number + 1) * length, stop)


def over(*dims: tuple[int, Cut | None], data_dims: int = 0) -> Placed:
    """A param over ranks 0, 1, 2 ... of a mesh with these dims, the last one running fastest.

    >>> over((2, Cut(0)), (2, None)).boxes((3, 4), 4)[2]
    Box(starts=(2, 0), stops=(3, 4))
    """
    mesh = tuple(size for size, _ in dims)
    return Placed(range(math.prod(mesh)), mesh, tuple(cut for _, cut in dims), data_dims)


def copied_on(world: int) -> Placed:
    """A param of which every rank has all."""
    return over((world, None))

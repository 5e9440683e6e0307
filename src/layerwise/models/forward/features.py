"""What became of the outputs of each product: features that end as the same operand of the same operation are one matrix."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from layerwise.models.forward.labels import without_repeats
from layerwise.models.forward.weights import View

_SIGNATURE = 62
"""Bits of the number that stands for one end."""


@dataclass(eq=False)
class Source:
    """The outputs of one product with a param (or of one entry of a stack)."""

    views: tuple[View, ...]
    """The param's elements: views with the axis of outputs first and that of inputs second, one after the other."""
    n_out: int
    is_stack: bool
    """Each view is a matrix of its own, of a batched product."""
    ends: Tensor
    """For each output a number for the set of its ends."""
    pairs: list[Tensor] = field(default_factory=list)
    """Pairs of outputs that were added to each other, as `left * n_out + right`."""
    halves: list[Tensor] = field(default_factory=list)
    """Pairs of outputs that became the two halves of one number, likewise."""
    has_ends: bool = False
    is_router: bool = False
    is_output: bool = False
    is_joined: bool = False
    """Added to a stream of other outputs: what is done with the sum says no more about this product."""
    not_followed: str = ""
    """An operation that its outputs went into, of which it is not known what becomes of them."""

    @property
    def fqn(self) -> str:
        return self.views[0].fqn


class Features:
    """All sources, and where their outputs ended."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._by_views: dict[tuple[View, ...], int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._draw = random.Random(0)

    def source(self, views: tuple[View, ...], n_out: int, *, is_stack: bool = False) -> int:
        """The number of a product's outputs; the same one each time that the same part of a param is used."""
        if views not in self._by_views:
            self._by_views[views] = len(self.sources)
            self.sources.append(Source(views, n_out, is_stack, torch.zeros(n_out, dtype=torch.int64, device="cpu")))
        return self._by_views[views]

    def set_apart(self, source: int, count: int) -> None:
        """The outputs are those of so many matrices, one after the other, and not of one."""
        found = self.sources[source]
        if found.is_stack:
            return
        if len(found.views) == 1:
            view, each = found.views[0], found.n_out // count
            found.views = tuple(
                replace(view, offset=view.offset + number * each * view.strides[0], sizes=(each, view.sizes[1]))
                for number in range(count)
            )
        found.is_stack = True

    def end(self, source: int, labels: Tensor, where: Hashable) -> None:
        """These outputs are read there, as that operand."""
        found = self.sources[source]
        if where not in self._numbers:
            self._numbers[where] = self._draw.getrandbits(_SIGNATURE)
        is_here = torch.zeros(found.n_out + 1, dtype=torch.bool, device="cpu")
        (labels,) = without_repeats(labels)
        is_here[labels.reshape(-1).long()] = True  # no label is -1: the entry too many
        found.ends[is_here[:-1]] += self._numbers[where]
        found.has_ends = True

    def halves(self, source: int, pairs: Tensor) -> None:
        """Outputs that are the two halves of one number from now on: the first stands for both."""
        self._note(self.sources[source].halves, source, pairs)

    def pair(self, source: int, pairs: Tensor) -> None:
        """Outputs that were added to each other belong to one matrix."""
        self._note(self.sources[source].pairs, source, pairs)

    def _note(self, noted: list[Tensor], source: int, pairs: Tensor) -> None:
        found = self.sources[source]
        left, right = pairs[:, 0].long(), pairs[:, 1].long()
        codes = (left * found.n_out + right)[(left != right) & (left >= 0) & (right >= 0)]
        if codes.numel():
            noted.append(torch.unique(codes))  # as one number each: sorting rows is slow

    def are_all_read(self, source: int) -> bool:
        """Whether something reads each output, where something reads any."""
        found = self.sources[source]
        second = {code % found.n_out for code in torch.cat(found.halves).tolist()} if found.halves else set[int]()
        second |= {place for code in self._added(found) for place in divmod(code, found.n_out)}
        return not found.has_ends or set((found.ends == 0).nonzero().flatten().tolist()) <= second

    @staticmethod
    def _added(source: Source) -> list[int]:
        found: list[int] = torch.unique(torch.cat(source.pairs)).tolist() if source.pairs else []
        return found

    def classes(self, source: int) -> list[int]:
        """For each output the number of its class, in order of first appearance."""
        found = self.sources[source]
        ends = found.ends.tolist()
        for code in torch.cat(found.halves).tolist() if found.halves else ():
            first, second = divmod(code, found.n_out)
            ends[second] = ends[first]
        added = self._added(found)
        if added:
            ends = _together(ends, [divmod(code, found.n_out) for code in added])
        numbers: dict[int, int] = {}
        return [numbers.setdefault(end, len(numbers)) for end in ends]


def _together(ends: list[int], pairs: list[tuple[int, int]]) -> list[int]:
    """The ends of each output, and of all that it was added to."""
    parent = list(range(len(ends)))

    def root(member: int) -> int:
        while parent[member] != member:
            parent[member] = parent[parent[member]]
            member = parent[member]
        return member

    for left, right in pairs:
        parent[root(right)] = root(left)
    ends_by_root: dict[int, set[int]] = {}
    for member, end in enumerate(ends):
        ends_by_root.setdefault(root(member), set()).add(end)
    return [hash(frozenset(ends_by_root[root(member)])) for member in range(len(ends))]

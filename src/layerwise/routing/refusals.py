"""Params that nobody explains: all of them at once, those of equal layers as one, with the pattern that covers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain

from layerwise.routing.readings import Reading, Readings, Role
from layerwise.routing.spec import ParamSpec
from layerwise.routing.split import Split


def starred(fqn: str) -> str:
    """The name as a glob over all layers: numbers between dots become stars.

    >>> starred("model.layers.3.attn.qkv.weight")
    'model.layers.*.attn.qkv.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


def globs(groups: Sequence[Sequence[str]], others: Iterable[str] = ()) -> list[list[tuple[str, list[int]]]]:
    """For each group of names, globs that match its members and no other name, with the places of the members that each
    covers: over all layers, or over those numbers that differ, or else each name by itself.

    >>> globs([["a.0.w", "a.1.w"], ["b.0.w", "b.2.w"], ["b.1.w"]])
    [[('a.*.w', [0, 1])], [('b.0.w', [0]), ('b.2.w', [1])], [('b.1.w', [0])]]
    """
    everybody = {*others, *chain(*groups)}
    found = []
    for group in groups:
        rest = everybody.difference(group)
        fitting = [glob for glob in (starred(group[0]), _narrow(group)) if not any(fnmatchcase(n, glob) for n in rest)]
        together = [(fitting[0], list(range(len(group))))] if fitting and len(group) > 1 else []
        found.append(together or [(name, [place]) for place, name in enumerate(group)])
    return found


def _narrow(group: Sequence[str]) -> str:
    """Stars for the numbers in which the names differ."""
    columns = zip(*(name.split(".") for name in group), strict=True)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Params that differ in their layer number alone, and are refused for one reason."""

    pattern: str
    """A glob that matches them."""
    params: tuple[ParamSpec, ...]
    reading: Reading | None = None
    """What their forward shows, where somebody followed it."""

    @property
    def split(self) -> Split | None:
        """The split that their forward shows."""
        return self.reading.split if self.reading is not None and self.reading.role is Role.MAP else None

    @property
    def first(self) -> ParamSpec:
        return self.params[0]

    @property
    def why(self) -> str:
        """What is unclear about each of them."""
        if self.first.misfit:
            return self.first.misfit
        if self.split is not None and self.reading is not None:
            return (
                f"looks fused ({self.first.looks_fused!r}), and its forward shows how: {self.reading.why}. Pass "
                f"RouteRule(pattern={self.pattern!r}, to='matrix', split={self.split!r})."
            )
        holder = self.first.module_type or "its module"
        return (
            f"looks fused ({self.first.looks_fused!r}), and more than one reading fits: blocks of rows one after the other, the same "
            f"taking turns head by head, or one matrix. Say which: give {holder} (or the module around it) a method matrix_splits(), "
            f"or pass RouteRule(pattern={self.pattern!r}, to='matrix', row_blocks=(...)), split=Split(...) or split='whole'."
        )

    @property
    def sentence(self) -> str:
        """The refusal with the name and the shape of its params."""
        if len(self.params) == 1:
            return f"param {self.first.fqn!r} of shape {self.first.shape}{':' if self.first.misfit else ''} {self.why}"
        return f"{len(self.params)} params {self.pattern!r} of shape {self.first.shape}: each {self.why}"


class RefusedError(ValueError):
    """Params that only their user can explain. All of them, so that one round of rules is enough."""

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        self.refusals = tuple(refusals)
        sentences = [refusal.sentence for refusal in self.refusals]
        if len(sentences) > 1:
            count = sum(len(refusal.params) for refusal in self.refusals)
            sentences = [f"{count} params are refused:", *(f"  {text}" for text in sentences)]
        super().__init__("\n".join(sentences))

    @property
    def params(self) -> list[ParamSpec]:
        """Every refused param."""
        return [param for refusal in self.refusals for param in refusal.params]


def fold_refusals(
    params: Sequence[ParamSpec], readings: Readings | None = None, others: Iterable[str] = ()
) -> list[Refusal]:
    """Refused params by the pattern that covers them and no other of these names, in order of first appearance. A param
    alone is called by its name."""
    groups: dict[tuple[object, ...], list[ParamSpec]] = {}
    known = readings or {}
    for param in params:
        key = (starred(param.fqn), param.shape, param.looks_fused, param.misfit, known.get(param.fqn))
        groups.setdefault(key, []).append(param)
    patterns = globs([[member.fqn for member in members] for members in groups.values()], others)
    return [
        Refusal(pattern, tuple(members[place] for place in places), known.get(members[0].fqn))
        for members, found in zip(groups.values(), patterns, strict=True)
        for pattern, places in found
    ]

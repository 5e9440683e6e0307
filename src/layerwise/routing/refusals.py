"""Params that nobody explains: all of them at once, those of equal layers as one, with the pattern that covers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerwise.routing.readings import Reading, Readings, Role
from layerwise.routing.spec import ParamSpec
from layerwise.routing.split import Split


def starred(fqn: str) -> str:
    """The name as a glob over all layers: numbers between dots become stars.

    >>> starred("model.layers.3.attn.qkv.weight")
    'model.layers.*.attn.qkv.weight'
    """
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


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
                f"looks fused ({self.first.looks_fused!r}), and its forward shows how: {self.reading.why}. Pass routing='trace', or "
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


def fold_refusals(params: Sequence[ParamSpec], readings: Readings | None = None) -> list[Refusal]:
    """Refused params by the pattern that covers them, in order of first appearance. A param alone is called by its name."""
    groups: dict[tuple[object, ...], list[ParamSpec]] = {}
    known = readings or {}
    for param in params:
        key = (starred(param.fqn), param.shape, param.looks_fused, param.misfit, known.get(param.fqn))
        groups.setdefault(key, []).append(param)
    return [
        Refusal(
            starred(members[0].fqn) if len(members) > 1 else members[0].fqn, tuple(members), known.get(members[0].fqn)
        )
        for members in groups.values()
    ]

"""Params that nobody explains: all of them at once, those of equal layers as one, with the pattern that covers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerwise.routing.spec import ParamSpec


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

    @property
    def first(self) -> ParamSpec:
        return self.params[0]

    @property
    def why(self) -> str:
        """What is unclear about each of them."""
        if self.first.misfit:
            return self.first.misfit
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


def fold_refusals(params: Sequence[ParamSpec]) -> list[Refusal]:
    """Refused params by the pattern that covers them, in order of first appearance. A param alone is called by its name."""
    groups: dict[tuple[object, ...], list[ParamSpec]] = {}
    for param in params:
        groups.setdefault((starred(param.fqn), param.shape, param.looks_fused, param.misfit), []).append(param)
    return [
        Refusal(starred(members[0].fqn) if len(members) > 1 else members[0].fqn, tuple(members))
        for members in groups.values()
    ]

"""Gradients before they are used: clip, skip, refuse. The policy is a value; `engine/policy.py` decides by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from layerwise.config.gone import gone_value
from layerwise.config.habits import OF_GRADIENT_POLICY, understands
from layerwise.config.rules import plain_option

ClipScope = Literal["all", "other-only"]
OnNonFinite = Literal["skip", "raise", "ignore"]

FAMILIES = ("matrix", "other")
"""Names of the two norm groups that every model has."""

_CHOICES: dict[str, tuple[object, ...]] = {
    "clip": get_args(ClipScope),
    "nonfinite": get_args(OnNonFinite),
    "strict_grads": (True, False),
}


@understands(OF_GRADIENT_POLICY)
@dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """Settings by which an `Optimizer` clips gradients, and skips or refuses steps. Pass the same ones on every rank.

    Args:
        clip: params whose gradients are clipped to `clip_grad_norm=` of the `Optimizer`, by one common norm: "all", as
            `torch.nn.utils.clip_grad_norm_` does, or "other-only", where matrices are neither in the norm nor clipped.
        norm_groups: dict from the name of a group to a glob on param names. The params of a group are clipped by the norm of the
            group and are not in the common norm. None: one norm for the whole model, as in other optimizers.
        nonfinite: reaction to a reduced gradient that holds inf or NaN, or to a norm that is so large after clipping that its
            square is inf in fp32 (above 1.8e19): "skip" the step, so that one bad batch does not end a run, "raise" a
            `NonFiniteError` on every rank, or "ignore".
        skip_above: a step whose gradient norm is larger is skipped. The unit is that of `stats.grad_norm`: averaged, unscaled,
            unclipped, without the params of `norm_groups`. None: never, since no norm suits every model.
        strict_grads: raise, on every rank, when a param got no gradient on some rank. False: a missing gradient counts as zero,
            and `stats.missing` names it.
        max_skipped: steps. Raise, on every rank, when more steps than this are skipped in a row. None: never; the first skipped
            step and the tenth in a row are warned of.
    """

    clip: ClipScope = "all"
    norm_groups: Mapping[str, str] | None = field(default=None, hash=False)
    nonfinite: OnNonFinite = "skip"
    skip_above: float | None = None
    strict_grads: bool = False
    max_skipped: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip_above", plain_option(self.skip_above))
        problems = list(self._problems())
        if not _is_dict_of_text(self.norm_groups):
            raise TypeError(" ".join(problems))
        if problems:
            raise ValueError(" ".join(problems))
        object.__setattr__(self, "norm_groups", dict(self.norm_groups or {}))

    def _problems(self) -> Iterator[str]:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                yield f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}.{gone_value(name, value)}"
        if not _is_dict_of_text(self.norm_groups):
            yield f"norm_groups must be a dict from the name of a group to a glob on param names, got {self.norm_groups!r}."
        else:
            for name in FAMILIES:
                if name in (self.norm_groups or {}):
                    yield f"norm group {name!r} has a reserved name: 'matrix' and 'other' are the two families. Choose another."
        yield from bound_problems("skip_above", self.skip_above)
        most = self.max_skipped
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
            yield f"max_skipped must be a number of steps, 0 or more, got {most!r}. None switches it off."

    def facts(self) -> dict[str, object]:
        """The fields that all pipeline stages must have in common. Of `norm_groups` these are the names alone: globs may differ
        where stages hold other params."""
        return {**vars(self), "norm_groups": ", ".join(self.norm_groups or {})}


def bound_problems(name: str, bound: object) -> Iterator[str]:
    """Problems of a bound on a norm, as sentences: it is a positive number, or None for no bound."""
    if bound is not None and not (isinstance(bound, int | float) and bound > 0):
        yield f"{name} must be a positive number, got {bound!r}. None switches it off."


def _is_dict_of_text(groups: object) -> bool:
    return groups is None or (
        isinstance(groups, Mapping) and all(isinstance(text, str) and text for pair in groups.items() for text in pair)
    )

"""What an optimizer asks of a step: for good, and at each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from layerwise.engine.algorithms import LiveOptions
from layerwise.engine.loss_scale import LossScale
from layerwise.engine.param_groups import GroupPlan
from layerwise.engine.policy import StepPolicy
from layerwise.engine.qk_clip import Watched


class StepPlan(NamedTuple):
    """What an optimizer was asked for, before anything is built; the same on every rank."""

    groups: tuple[GroupPlan, ...]
    norm_group_of: dict[str, str]
    policy: StepPolicy
    loss_scale: LossScale | None
    count_zeros: bool
    check_replicas: bool
    watched: Watched | None

    @property
    def norm_group_names(self) -> tuple[str, ...]:
        """Names of the norm groups that the gradient policy adds to the two families."""
        return tuple(self.policy.given.norm_groups or ())

    def common_facts(self) -> dict[str, object]:
        """What ranks of all pipeline stages must have in common."""
        return {
            "policy": self.policy.facts(),
            "loss scale": asdict(self.loss_scale) if self.loss_scale is not None else None,
            "count zeros": self.count_zeros,
            "check_replicas": self.check_replicas,
            "qk_clip": repr(self.watched.clip) if self.watched is not None else None,
        }

    def facts(self) -> dict[str, object]:
        """The arguments as data, so that a difference between ranks can be named."""
        groups = [
            {"label": f"param group {index}", "rule": group.rule.kind, **group.rule.options(), "fqns": list(group.fqns)}
            for index, group in enumerate(self.groups)
        ]
        watched = self.watched.facts() if self.watched is not None else None
        return {**self.common_facts(), "groups": groups, "norm groups": self.norm_group_of, "watched": watched}

    @property
    def has_matrix_rule(self) -> bool:
        return any(group.rule.is_matrix_rule for group in self.groups)


@dataclass(frozen=True)
class Live:
    """What the optimizer's options are now."""

    options: Sequence[LiveOptions]
    """Of every param group, as its rule holds them."""
    settings: Callable[[], Mapping[str, object]]
    """The same in words: what all ranks must have in common."""
    tie_settings: Mapping[str, Mapping[str, str]]
    """What all copies of a tied weight must have in common: where it differed they would drift apart."""
    problem: Exception | None = None
    """Why they make no rule."""

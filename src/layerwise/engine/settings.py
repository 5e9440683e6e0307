"""What an engine was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layerwise.layout.options import DEFAULT_OPTIONS, Options, check_switch

_SWITCHES = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "align_param_gather",
    "check_collectives",
    "check_replicas",
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a DataParallel was asked for; `DataParallel` documents them. What makes a plan is in `options`."""

    options: Options = DEFAULT_OPTIONS
    ties: Mapping[str, str] = field(default_factory=dict)
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    prefetch: int | None = None
    align_param_gather: bool = False
    check_collectives: bool = False
    check_replicas: bool = False

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            check_switch(name, getattr(self, name))
        ahead = self.prefetch
        if ahead is not None and (not isinstance(ahead, int) or isinstance(ahead, bool) or ahead < 0):
            raise ValueError(f"prefetch must be a number of buckets, 0 or more, or None for all, got {ahead!r}.")
        if not isinstance(self.ties, Mapping) or not all(
            isinstance(text, str) and text for pair in self.ties.items() for text in pair
        ):
            raise TypeError(
                f"ties must be a dict from the name of a tie to the fqn of the copy here, got {self.ties!r}."
            )
        if len(set(self.ties.values())) < len(self.ties):
            raise ValueError(f"ties={dict(self.ties)} names one param twice: a weight has one tie.")

"""What an engine was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from layerwise.layout.options import DEFAULT_OPTIONS, Options, check_switch

OverlapParamGather = bool | Literal["by chunk"]
"""False: `step()` waits for the gathers. True: it launches all of them, and each bucket is waited for where it is read. "by chunk": the first read of a
pipeline chunk launches the gathers of that chunk."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a DataParallel was asked for; `DataParallel` documents them. What makes a plan is in `options`."""

    options: Options = DEFAULT_OPTIONS
    ties: Mapping[str, str] = field(default_factory=dict)
    overlap_grad_reduce: bool = True
    overlap_param_gather: OverlapParamGather = False
    prefetch: int | None = None
    """Gathers that may be under way beyond the one that is read; None means all. Internal: it has no argument."""

    def __post_init__(self) -> None:
        check_switch("overlap_grad_reduce", self.overlap_grad_reduce)
        if self.overlap_param_gather not in (True, False, "by chunk"):
            raise ValueError(
                f"overlap_param_gather must be True, False or 'by chunk', got {self.overlap_param_gather!r}."
            )
        if not isinstance(self.ties, Mapping) or not all(
            isinstance(text, str) and text for pair in self.ties.items() for text in pair
        ):
            raise TypeError(
                f"ties must be a dict from the name of a tie to the fqn of the copy here, got {self.ties!r}."
            )
        if len(set(self.ties.values())) < len(self.ties):
            raise ValueError(f"ties={dict(self.ties)} names one param twice: a weight has one tie.")

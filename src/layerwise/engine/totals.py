"""What a step sees of its gradients: what a rank tells the others, what they have together, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from layerwise.engine.gradients import Divisors
from layerwise.layout.schedule import Kind
from layerwise.units import format_nbytes


@dataclass(frozen=True)
class StepStats:
    """Statistics of the last step, equal on every rank but for bytes. `str()` is one line, `as_dict()` is flat numbers for a
    tracker."""

    step: int = 0
    """Successful steps so far."""
    grad_norm: float = math.nan
    """Norm of the averaged, unscaled, unclipped gradient over all params that are in no named norm group."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Norms of the matrix and the other family and of every named norm group."""
    clip_coefficients: Mapping[str, float] = field(default_factory=dict)
    """What the gradients of each of these were multiplied with."""
    num_zeros: int | None = None
    """Gradient elements that are exactly zero; None unless count_zeros=True."""
    skipped: bool = False
    skip_reason: str = ""
    nonfinite: tuple[str, ...] = ()
    """Params whose reduced gradient holds inf or NaN."""
    missing: Mapping[str, int] = field(default_factory=dict)
    """Params without a gradient, with the number of ranks on which it was missing; they count as zero there."""
    loss_scale: float = 1.0
    max_logit: float | None = None
    """Largest attention logit since the step before, of all heads and ranks; None without `qk_clip`, or where no
    attention ran."""
    clipped_heads: int = 0
    """Attention heads whose query rows `qk_clip` scaled."""
    nonfinite_logits: tuple[str, ...] = ()
    """Attention heads whose largest logit is inf or NaN: nothing was scaled for them."""
    unseen_logits: tuple[str, ...] = ()
    """Modules that `qk_clip` watches and that ran on no rank: there was nothing to clip."""
    bytes_by_collective: Mapping[str, int] = field(default_factory=dict)
    """Bytes this rank sent since the step before, per kind of collective."""
    products: Mapping[str, str] = field(default_factory=dict)
    """For every `ns_dtype` in use, which kernels multiply in Newton-Schulz, and why."""

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank sent since the step before, over all kinds of collectives."""
        return sum(self.bytes_by_collective.values())

    def as_dict(self) -> dict[str, float | int | bool | str]:
        """The fields as a tracker takes them, under the same keys at every step: numbers as they are, of names of params, heads
        and modules how many there are, of a mapping an entry `norms/matrix` for each of its names. Left out is what was not
        counted (`num_zeros`, `max_logit`), and `products`, which is text that does not change."""
        # Of a kind of collective that a step did not issue there is no entry.
        sent = {**dict.fromkeys(get_args(Kind), 0), **self.bytes_by_collective}
        found: dict[str, float | int | bool | str] = {"bytes_sent": self.bytes_sent}
        for name, value in {**vars(self), "bytes_by_collective": sent, "products": None}.items():
            if name == "missing" or isinstance(value, tuple):
                found[name] = len(value)
            elif isinstance(value, Mapping):
                found |= {f"{name}/{key}": one for key, one in value.items()}
            elif value is not None:
                found[name] = value
        return found

    def __str__(self) -> str:
        parts = [f"step {self.step}", f"grad_norm {self.grad_norm:.4g}"]
        parts += [f"{name} clipped x{factor:.3g}" for name, factor in self.clip_coefficients.items() if factor != 1.0]
        parts += [f"skipped: {self.skip_reason}"] if self.skipped else []
        parts += [f"loss_scale {self.loss_scale:g}"] if self.loss_scale != 1.0 else []
        parts += [f"max_logit {self.max_logit:.4g}"] if self.max_logit is not None else []
        counts = {
            name: len(getattr(self, name)) for name in ("missing", "nonfinite", "nonfinite_logits", "unseen_logits")
        }
        counts |= {"clipped_heads": self.clipped_heads, "num_zeros": self.num_zeros or 0}
        parts += [f"{name} {number}" for name, number in counts.items() if number]
        return ", ".join([*parts, f"{format_nbytes(self.bytes_sent)} sent"])


@dataclass(frozen=True)
class Totals:
    """The reduced vector, read back."""

    square_sums: Mapping[str, float]
    num_zeros: int | None
    missing: Mapping[str, int]
    nonfinite: tuple[str, ...]
    late: frozenset[tuple[int, str]]
    """(stage, fqn) of params that got a gradient on some rank after their reduction: it has to be reduced too, by all."""
    nothing_arrived: bool
    """No param has a gradient on any rank."""
    disagreeing: Mapping[str, tuple[int, int]]
    """Params of which some rank has a gradient and another none, though both hold the same part of them, or though it takes
    all of them to bring it: on how many ranks that hold any it is missing, of how many."""
    consistent: bool
    """All ranks of a stage have the same settings, and all copies of a tied weight."""
    problems: int
    """Ranks that found something wrong by themselves."""
    scaled: tuple[int, ...]
    """Of each stage, ranks that scaled their loss."""
    unscaled: tuple[int, ...]
    """Of each stage, ranks that have gradients of a loss which they did not scale."""
    divisors: Divisors
    """From sums to averages."""
    has_extra_step: bool = False
    """Some rank took a step with nothing before it, and others had called `zero_grad()`: see `Calls`."""

    def norm(self, *names: str) -> float:
        """Norm of the averaged gradient over the named groups together."""
        return math.sqrt(sum(self.square_sums[name] for name in names)) / self.divisors.common


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a rank has to tell the others about this step, beside its gradients."""

    missing: frozenset[str]
    """Params without a gradient here."""
    late: frozenset[str]
    """Params that got one after their reduction."""
    joint: frozenset[str]
    """Params whose gradient it takes all ranks to bring. The same ones on every rank."""
    settings: str
    """Everything that all ranks of a stage must have in common."""
    tie_settings: Mapping[str, str]
    """What all copies of each tied weight must have in common."""
    has_problem: bool
    is_scaled: bool
    is_unscaled: bool
    is_odd: bool = False
    """This step follows another one with nothing in between: see `Calls`."""
    has_zeroed: bool = False
    """`zero_grad()` was called since the last step."""

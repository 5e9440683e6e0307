"""Update rules as values: which algorithm with which numbers. The arithmetic lives in `kernels`, the choice of params
in `routing`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, Literal

from layerwise.config.coefficients import Coefficient, check_coefficients
from layerwise.dtypes import DType

WeightDecayMode = Literal["decoupled", "independent", "coupled"]
Scale = Literal["rms", "spectral", "shape", "unit_rms", "none"]
Method = Literal["standard", "gram", "auto"]
NsDtype = Literal["bf16", "fp16", "fp32"]
TpMode = Literal["auto", "blockwise"]
TP_MODES: tuple[TpMode, ...] = ("auto", "blockwise")

_CHOICES: dict[str, tuple[str, ...]] = {
    "weight_decay_mode": ("decoupled", "independent", "coupled"),
    "scale": ("rms", "spectral", "shape", "unit_rms", "none"),
    "method": ("standard", "gram", "auto"),
    "ns_dtype": ("bf16", "fp16", "fp32"),
    "tp_mode": TP_MODES,
}


def _problem_with(name: str, value: object) -> str | None:
    """What is wrong with one field of a rule, as a sentence, or None. One place, so that every rule says it the same
    way."""
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            return f"{name} must be one of {', '.join(_CHOICES[name])}, got {value!r}."
        return None
    if name == "betas":
        if not isinstance(value, Sequence) or len(value) != 2:
            return f"betas must be two numbers, got {value!r}."
        if not all(_is_number(beta) and 0.0 <= beta < 1.0 for beta in value):
            return f"betas must each be in [0, 1), got {value!r}."
        return None
    if name == "nesterov":
        return None if isinstance(value, bool) else f"nesterov must be True or False, got {value!r}."
    if name in ("coefficients", "steps"):
        return None
    if not _is_number(value):
        return f"{name} must be a finite number, got {value!r}."
    number = float(value)  # type: ignore[arg-type]
    if name in ("momentum", "beta2") and not 0.0 <= number < 1.0:
        return f"{name} must be in [0, 1), got {value!r}."
    if name in ("lr", "weight_decay", "eps") and number < 0.0:
        return f"{name} must not be negative, got {value!r}."
    return None


def plain_option(value: object) -> object:
    """An option as Python writes it: a scalar of numpy or a tensor of one element becomes a number, also in a pair of betas.

    >>> plain_option([1, "rms"])
    [1, 'rms']
    """
    if isinstance(value, list | tuple):
        return type(value)(map(plain_option, value))
    item = getattr(value, "item", None)
    try:
        return item() if callable(item) else value
    except (ValueError, RuntimeError):  # more elements than one
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule. `lr` and the other fields are starting values: the optimizer's param groups hold the live
    ones."""

    kind: ClassVar[str]
    is_matrix_rule: ClassVar[bool]
    state_names: ClassVar[tuple[str, ...]]
    """The fp32 numbers that are kept for every element, where the element is owned."""

    lr: float
    """Learning rate."""

    weight_decay: float = 0.0
    """Weight decay, applied as `weight_decay_mode` says."""

    weight_decay_mode: WeightDecayMode = "decoupled"
    """decoupled: W *= 1 - lr*wd. independent: W *= 1 - wd. coupled: G += wd*W before momentum."""

    def __post_init__(self) -> None:
        for name in self.option_names():
            self._set(name, plain_option(getattr(self, name)))
            problem = _problem_with(name, getattr(self, name))
            if problem is not None:
                raise ValueError(f"{type(self).__name__}: {problem}")
            if name == "betas":  # a list from a config file: rules are hashed, so it becomes a tuple
                self._set("betas", tuple(self.betas))  # type: ignore[attr-defined]

    def _set(self, name: str, value: object) -> None:
        """Write a field while the rule is made; nobody else may."""
        object.__setattr__(self, name, value)

    @classmethod
    def home_state(cls, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
        """The fp32 state that lives with a matrix of this logical shape at its home, by name, with its shape."""
        return {}

    @property
    def wire_dtype(self) -> DType:
        """What the update of a matrix travels in."""
        return DType.BF16

    @classmethod
    @cache
    def option_names(cls) -> tuple[str, ...]:
        """The names of the fields."""
        return tuple(field.name for field in fields(cls))

    def options(self) -> dict[str, object]:
        """The fields as a param group holds them."""
        return {name: getattr(self, name) for name in self.option_names()}


@dataclass(frozen=True, kw_only=True)
class Muon(Rule):
    """Momentum, orthogonalised by Newton-Schulz: `M = mu*M + (1-mu)*G`, `W -= lr * scale * orth(M)`.

    Jordan (2024); the default scale and decoupled decay are Moonlight's (arXiv 2502.16982), which lets AdamW's lr be
    reused.
    """

    kind: ClassVar[str] = "muon"
    is_matrix_rule: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    """mu of the exponential moving average of gradients."""

    nesterov: bool = True
    """Orthogonalise (1-mu)*G + mu*M instead of M."""

    coefficients: str | Sequence[Coefficient] = "polar_express"
    """Name of a coefficient set, or a list of (a, b, c); see config/coefficients.py."""

    steps: int = 5
    """Newton-Schulz steps."""

    method: Method = "auto"
    """standard iterates on the matrix, gram on its smaller Gram matrix; auto takes gram where it saves work."""

    scale: Scale = "rms"
    """Update scale by matrix shape. rms: 0.2*sqrt(max), spectral: sqrt(max), shape: sqrt(max(1, rows/cols)), unit_rms:
    sqrt(rows/cols), none: 1."""

    extra_scale: float = 1.0
    """A constant on top of `scale`."""

    ns_dtype: NsDtype = "bf16"
    """Working dtype of Newton-Schulz. With bf16 the update also travels in bf16; otherwise in fp32."""

    tp_mode: TpMode = "auto"
    """What becomes of a matrix that tensor parallelism has cut. auto: it is orthogonalised whole, wherever its blocks are
    stored. blockwise: each rank's block by itself, with the scale of the whole, which is another update."""

    def __post_init__(self) -> None:
        self._set("steps", plain_option(self.steps))
        if not isinstance(self.steps, int) or isinstance(self.steps, bool):
            raise ValueError(f"{type(self).__name__}: steps must be an integer, got {self.steps!r}.")
        if not isinstance(self.coefficients, str):
            try:
                triples = tuple(tuple(float(number) for number in triple) for triple in self.coefficients)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{type(self).__name__}: coefficients must be a set's name or a list of (a, b, c), got {self.coefficients!r}."
                ) from None
            self._set("coefficients", triples)
        problem = check_coefficients(self.coefficients, self.steps)
        if problem is not None:
            raise ValueError(f"{type(self).__name__}: {problem}")
        super().__post_init__()

    @property
    def wire_dtype(self) -> DType:
        return wire_dtype_for(self.ns_dtype)


@dataclass(frozen=True, kw_only=True)
class NorMuon(Muon):
    """Muon whose update is normalised neuron by neuron with a running second moment of each row (arXiv 2510.05491)."""

    kind: ClassVar[str] = "normuon"

    beta2: float = 0.95
    """Decay of the row-wise second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    @classmethod
    def home_state(cls, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
        return {"row_moment": (rows,)}


@dataclass(frozen=True, kw_only=True)
class AdaMuon(Muon):
    """Muon on the sign of the momentum, with an element-wise second moment of the orthogonalised update (arXiv
    2507.11005)."""

    kind: ClassVar[str] = "adamuon"

    beta2: float = 0.95
    """Decay of the element-wise second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    @classmethod
    def home_state(cls, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
        return {"second_moment": (rows, cols)}


@dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    """Adam with weight decay, as in torch.optim.AdamW."""

    kind: ClassVar[str] = "adamw"
    is_matrix_rule: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    betas: tuple[float, float] = (0.9, 0.95)
    """Decays of the first and second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""


@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """Sign of an interpolated momentum (arXiv 2302.06675)."""

    kind: ClassVar[str] = "lion"
    is_matrix_rule: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    betas: tuple[float, float] = (0.95, 0.98)
    """Interpolation used for the update, and decay of the momentum."""


RULES_BY_KIND: dict[str, type[Rule]] = {rule.kind: rule for rule in (Muon, NorMuon, AdaMuon, AdamW, Lion)}
"""Every rule by the name configs and param groups use."""


def wire_dtype_for(ns_dtype: str) -> DType:
    """What an update is rounded to before it is orthogonalised in `ns_dtype`, in every layout, so that all layouts agree
    bitwise; it travels in that."""
    return DType.BF16 if ns_dtype == "bf16" else DType.FP32


def tp_mode_of(rule: object) -> TpMode:
    """What a rule does with matrices that tensor parallelism has cut; one that orthogonalises nothing does nothing."""
    return rule.tp_mode if isinstance(rule, Muon) else "auto"


def update_scale(scale: str, rows: int, cols: int) -> float:
    """The factor on an orthogonalised (rows, cols) update: one rule, one function."""
    match scale:
        case "rms":
            return 0.2 * math.sqrt(max(rows, cols))
        case "spectral":
            return math.sqrt(max(rows, cols))
        case "shape":
            return math.sqrt(max(1.0, rows / cols))
        case "unit_rms":
            return math.sqrt(rows / cols)
        case "none":
            return 1.0
        case _:
            raise ValueError(f"scale must be one of {', '.join(_CHOICES['scale'])}, got {scale!r}.")

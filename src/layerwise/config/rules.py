"""Update rules as values: which algorithm with which numbers. The arithmetic lives in `kernels`, the choice of params
in `routing`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar, Literal

from layerwise.config.coefficients import Coefficient, check_coefficients
from layerwise.config.habits import OF_ADAMW, OF_LION, OF_MUON, OF_NORMUON, understands
from layerwise.dtypes import DType

WeightDecayMode = Literal["decoupled", "independent", "coupled"]
Scale = Literal["rms", "spectral", "shape", "unit_rms", "none"]
NsDtype = Literal["bf16", "fp16", "fp32"]
TpMode = Literal["auto", "blockwise"]
TP_MODES: tuple[TpMode, ...] = ("auto", "blockwise")

_CHOICES: dict[str, tuple[str, ...]] = {
    "weight_decay_mode": ("decoupled", "independent", "coupled"),
    "scale": ("rms", "spectral", "shape", "unit_rms", "none"),
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


_ARGS = "\n    Args:\n"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An update rule. Its fields are starting values: the optimizer's param groups hold the live ones.

    Args:
        lr: learning rate. It has no default, since no rate suits every model; docs/learning_rate.md says where to start.
        weight_decay: share of each weight that a step takes off, as `weight_decay_mode` says. 0, so that nothing decays unasked.
        weight_decay_mode: "decoupled": W *= 1 - lr * weight_decay, as in AdamW, so that decay follows the schedule of `lr`;
            "independent": W *= 1 - weight_decay; "coupled": G += weight_decay * W, before momentum.
    """

    kind: ClassVar[str]
    is_matrix_rule: ClassVar[bool]
    state_names: ClassVar[tuple[str, ...]]
    """The fp32 numbers that are kept for every element, where the element is owned."""

    lr: float
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode = "decoupled"

    def __init_subclass__(cls) -> None:
        """The help of a rule has the arguments that it inherits, before its own."""
        about, _, own = (cls.__doc__ or "").partition(_ARGS)
        inherited = (cls.__base__.__doc__ or "").partition(_ARGS)[2].rstrip()
        cls.__doc__ = f"{about.rstrip()}\n{_ARGS}{inherited}\n{own}"

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


@understands(OF_MUON)
@dataclass(frozen=True, kw_only=True)
class Muon(Rule):
    """Momentum, orthogonalised by Newton-Schulz: `M = mu*M + (1-mu)*G`, `W -= lr * scale * orth(M)`.

    Jordan (2024); the default scale and decoupled decay are Moonlight's (arXiv 2502.16982), which lets AdamW's lr be
    reused.

    Args:
        momentum: mu, the decay of the moving average of gradients in each step, in [0, 1). 0.95 is Jordan's.
        nesterov: orthogonalise (1 - mu) * G + mu * M in place of M, as Jordan does.
        coefficients: a set of Newton-Schulz coefficients by name, or a list of (a, b, c), one for each step.
            "polar_express" is the best one for the worst singular value (arXiv 2505.16932); docs/numerics.md compares all.
        steps: Newton-Schulz steps. Five, the usual number, bring singular values to between 0.87 and 1.12 with the default set.
        scale: factor on an orthogonalised (rows, cols) matrix. "rms": 0.2 * sqrt(max(rows, cols)), about as large as an update
            of AdamW, so that its `lr` fits; "spectral": sqrt(max(rows, cols)); "shape": sqrt(max(1, rows / cols)), Jordan's;
            "unit_rms": sqrt(rows / cols); "none": 1.
        extra_scale: a constant on top of `scale`; 1 leaves it as it is.
        ns_dtype: dtype in which Newton-Schulz works: "bf16", "fp16" or "fp32". With "bf16", the fastest, updates travel in
            bf16 too; with the others in fp32.
        tp_mode: for a matrix that tensor parallelism has cut. "auto" orthogonalises it whole, wherever its blocks are stored;
            "blockwise" each rank's block by itself, with the scale of the whole, which is another update.
    """

    kind: ClassVar[str] = "muon"
    is_matrix_rule: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.95
    nesterov: bool = True
    coefficients: str | Sequence[Coefficient] = "polar_express"
    steps: int = 5
    scale: Scale = "rms"
    extra_scale: float = 1.0
    ns_dtype: NsDtype = "bf16"
    tp_mode: TpMode = "auto"

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


@understands(OF_NORMUON)
@dataclass(frozen=True, kw_only=True)
class NorMuon(Muon):
    """Muon whose update is normalised neuron by neuron with a running second moment of each row (arXiv 2510.05491).

    Args:
        beta2: decay of the second moment of each row in each step, in [0, 1). 0.95 is as long a memory as `momentum`'s.
        eps: added to the root of the second moment, so that nothing is divided by 0.
    """

    kind: ClassVar[str] = "normuon"

    beta2: float = 0.95
    eps: float = 1e-8

    @classmethod
    def home_state(cls, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
        return {"row_moment": (rows,)}


@understands(OF_NORMUON)
@dataclass(frozen=True, kw_only=True)
class AdaMuon(Muon):
    """Muon on the sign of the momentum, with an element-wise second moment of the orthogonalised update (arXiv
    2507.11005).

    Args:
        beta2: decay of the second moment of each element in each step, in [0, 1). 0.95 is as long a memory as `momentum`'s.
        eps: added to the root of the second moment, so that nothing is divided by 0.
    """

    kind: ClassVar[str] = "adamuon"

    beta2: float = 0.95
    eps: float = 1e-8

    @classmethod
    def home_state(cls, rows: int, cols: int) -> dict[str, tuple[int, ...]]:
        return {"second_moment": (rows, cols)}


@understands(OF_ADAMW)
@dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    """Adam with weight decay, as in torch.optim.AdamW.

    Args:
        betas: decays of the first and of the second moment in each step, each in [0, 1). (0.9, 0.95) is usual for language
            models; torch has (0.9, 0.999).
        eps: added to the root of the second moment, so that nothing is divided by 0; torch's value.
    """

    kind: ClassVar[str] = "adamw"
    is_matrix_rule: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


@understands(OF_LION)
@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """Sign of an interpolated momentum (arXiv 2302.06675).

    Args:
        betas: share of the momentum in the update, and decay of the momentum in each step, each in [0, 1). (0.95, 0.98) is the
            source's choice for language models.
    """

    kind: ClassVar[str] = "lion"
    is_matrix_rule: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    betas: tuple[float, float] = (0.95, 0.98)


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

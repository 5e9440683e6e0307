"""What was asked for about a plan: the one value that goes from `DataParallel`, or the command line, to the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from layerwise.config.gone import gone_value
from layerwise.config.rules import TP_MODES, TpMode
from layerwise.dtypes import DType
from layerwise.errors import did_you_mean
from layerwise.layout.cost import DEFAULT_COST, DEFAULT_HARDWARE, Hardware, NewtonSchulz
from layerwise.layout.storage import PARAM_GATHERS, REDUCERS, ParamGather, Reducer, resolve_layout
from layerwise.layout.work import DEFAULT_COHORT_NUMEL
from layerwise.routing.evidence import Evidence
from layerwise.routing.rules import RouteRule
from layerwise.units import MIB

Memory = Literal["buffers", "params"]
MEMORIES: tuple[Memory, ...] = ("buffers", "params")
"""Whose memory a step works in: buffers that we lay out, or that of the params and their `.grad`, as they are."""

GradSource = Literal["buckets", "params"]
GRAD_SOURCES: tuple[GradSource, ...] = ("buckets", "params")
"""Where a step's gradients come from. buckets: backward fills them, and we sum over ranks. params: the params' own `.grad`,
which somebody else has reduced: whole, and the same on every rank that has a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a model is to be planned, checked one by one. What cannot be combined is refused on the plan that it leads to.

    When collectives are issued, and what is compared while they are, is in no plan: the engine's `Settings` have that.
    """

    layout: str | Mapping[str, str] = "flat"
    """One of `LAYOUTS` for all matrices, or a mapping from "matrix", "other" or "<domain>/matrix" to one of them."""
    rules: Sequence[RouteRule] | None = None
    """Routing rules that come before the defaults."""
    rules_elsewhere: frozenset[str] = frozenset()
    """What rules look for that have params on another pipeline stage: here they may have none."""
    tp_mode: TpMode = "auto"
    """What becomes of matrices that tensor parallelism has cut, where no routing rule says otherwise."""
    strict: bool = False
    """Refuse a param of two or more dims that only a fallback rule explains."""
    evidence: Evidence | None = None
    """What else is known about the params: their forward was followed, or their routes were recorded."""
    grad_dtype: DType = DType.FP32
    """What gradients are accumulated and reduced in."""
    bucket_numel: int | None = None
    """Elements of a bucket; None leaves it to the storage plan."""
    cohort_numel: int = DEFAULT_COHORT_NUMEL
    """Elements of matrices per rank that are exchanged together."""
    reducer: Reducer = "collective"
    """How gradients are summed."""
    param_gather: ParamGather = "quantized"
    """What is kept of params that `layerwise.quantize()` has made codes of."""
    shard_grads: bool = False
    """Release full gradients as soon as they are reduced."""
    memory: Memory = "buffers"
    """Whose memory a step works in."""
    gradients: GradSource = "buckets"
    """Where gradients come from, where weights are in our buffers; those of a param in its own memory are its own."""
    cost: NewtonSchulz = DEFAULT_COST
    """What homes are balanced by: how matrices will be orthogonalised."""
    hardware: Hardware = DEFAULT_HARDWARE
    """What layouts are compared by."""

    def __post_init__(self) -> None:
        if isinstance(self.layout, Mapping):  # checked where the buffers are known
            object.__setattr__(self, "layout", dict(self.layout))
        else:
            resolve_layout(self.layout)
        if isinstance(self.rules, list):  # nobody appends to it any more
            object.__setattr__(self, "rules", tuple(self.rules))
        for name in ("strict", "shard_grads"):
            check_switch(name, getattr(self, name))
        if self.grad_dtype is DType.FP64:
            raise TypeError("grad_dtype is torch.float64: expected one of fp32, bf16, fp16.")
        if self.bucket_numel is not None and self.bucket_numel < 1:
            raise ValueError(f"the bucket size must be at least one element, got {self.bucket_numel}.")
        if self.cohort_numel < 1:
            raise ValueError(f"the cohort size must be at least one element, got {self.cohort_numel}.")
        _check_choice("reducer", self.reducer, REDUCERS)
        _check_choice("param_gather", self.param_gather, PARAM_GATHERS)
        _check_choice("tp_mode", self.tp_mode, TP_MODES)
        _check_choice("memory", self.memory, MEMORIES)
        _check_choice("gradients", self.gradients, GRAD_SOURCES)

    @property
    def reduces(self) -> bool:
        """Whether gradients are ours to reduce."""
        return self.memory == "buffers" and self.gradients == "buckets"


def bucket_numel_of(bucket_mib: float | None, grad_dtype: DType) -> int | None:
    """Elements of a bucket of so many MiB of gradients, which is how users say it; None leaves it to the default."""
    if bucket_mib is None:
        return None
    if not (isinstance(bucket_mib, int | float) and math.isfinite(bucket_mib) and bucket_mib > 0):
        raise ValueError(f"bucket_mib must be a positive number, got {bucket_mib!r}. Leave it out for the default.")
    return max(1, int(bucket_mib * MIB) // grad_dtype.itemsize)


def check_switch(name: str, value: object) -> bool:
    """The value of an option that is on or off. Raises TypeError for any other."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def _check_choice(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(known)}, got {value!r}."
            + (gone_value(name, value) or (did_you_mean(value, known) if isinstance(value, str) else ""))
        )


DEFAULT_OPTIONS = Options()

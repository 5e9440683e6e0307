"""What each rule does with tensors: its element-wise part on shards, and for matrix rules what happens to a whole matrix
at its home. Which state it keeps, and what matrices travel in, are facts of the rules themselves: `config/rules.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from layerwise.config.coefficients import coefficient_schedule
from layerwise.config.rules import wire_dtype_for
from layerwise.dtypes import DType
from layerwise.kernels.elementwise import adamw_, keep_of, lion_, momentum_
from layerwise.kernels.facts import products_in_words
from layerwise.kernels.lists import Tensors
from layerwise.kernels.recorded import Recorder
from layerwise.kernels.second_moment import normalise_elements, normalise_rows
from layerwise.kernels.verdicts import Scale
from layerwise.models.table import torch_dtype

LiveOptions = Mapping[str, object]
"""The options of a live param group, as its rule holds them."""


@dataclass(frozen=True)
class Runs:
    """Stretches of this rank's shards with equal options: flat fp32 tensors, one entry per run in each list."""

    masters: Tensors
    grads: Tensors  # averaged; may be overwritten
    states: Mapping[str, Tensors]
    scale: Scale = 1.0
    """What gradients count as multiplied by."""
    into: Tensors | None = None
    """Where what is to be orthogonalised goes, in the dtype that it is rounded to there; None: to where gradients are."""


class ElementwiseAlgorithm(Protocol):
    """A rule that needs no more than an element and its state."""

    def update_(self, runs: Runs, options: LiveOptions, step: int) -> None: ...


class _AdamW:
    def update_(self, runs: Runs, options: LiveOptions, step: int) -> None:
        adamw_(
            runs.masters,
            runs.grads,
            runs.states["exp_avg"],
            runs.states["exp_avg_sq"],
            step=step,
            lr=number(options, "lr"),
            betas=_betas(options),
            eps=number(options, "eps"),
            keep=kept_of(options),
            scale=runs.scale,
        )


class _Lion:
    def update_(self, runs: Runs, options: LiveOptions, step: int) -> None:
        lion_(
            runs.masters,
            runs.grads,
            runs.states["exp_avg"],
            lr=number(options, "lr"),
            betas=_betas(options),
            keep=kept_of(options),
            scale=runs.scale,
        )


class _Muon:
    """Momentum on shards, Newton-Schulz at home. The relatives below add to what happens at home."""

    def prepare_(self, runs: Runs, options: LiveOptions) -> None:
        """Leave in `into`, or in `grads`, what is to be orthogonalised."""
        momentum_(
            runs.grads,
            runs.states["momentum"],
            runs.into,
            momentum=number(options, "momentum"),
            nesterov=bool(options["nesterov"]),
            scale=runs.scale,
        )

    def direction(
        self, update_BMN: Tensor, options: LiveOptions, state: Mapping[str, Tensor], recorder: Recorder
    ) -> Tensor:
        """The orthogonalised update, in the dtype it travels in. Rounding to that dtype comes first in every layout,
        also where nothing travels. The memory of `update_BMN` is used up."""
        wire = _wire_dtype(options)
        return self._at_home(update_BMN.to(wire), options, state, recorder).to(wire)

    def _at_home(
        self, update_BMN: Tensor, options: LiveOptions, state: Mapping[str, Tensor], recorder: Recorder
    ) -> Tensor:
        return recorder.orthogonalize(
            update_BMN,
            schedule=coefficient_schedule(options["coefficients"], int(number(options, "steps"))),  # type: ignore[arg-type]
            dtype=torch_dtype(DType(str(options["ns_dtype"]))),
        )


class _NorMuon(_Muon):
    def _at_home(
        self, update_BMN: Tensor, options: LiveOptions, state: Mapping[str, Tensor], recorder: Recorder
    ) -> Tensor:
        direction_BMN = super()._at_home(update_BMN, options, state, recorder)
        return normalise_rows(
            direction_BMN, state["row_moment"], beta2=number(options, "beta2"), eps=number(options, "eps")
        )


class _AdaMuon(_Muon):
    def _at_home(
        self, update_BMN: Tensor, options: LiveOptions, state: Mapping[str, Tensor], recorder: Recorder
    ) -> Tensor:
        direction_BMN = super()._at_home(update_BMN.sign(), options, state, recorder)
        return normalise_elements(
            direction_BMN, state["second_moment"], beta2=number(options, "beta2"), eps=number(options, "eps")
        )


MatrixAlgorithm = _Muon

ELEMENTWISE: dict[str, ElementwiseAlgorithm] = {"adamw": _AdamW(), "lion": _Lion()}
MATRIX: dict[str, MatrixAlgorithm] = {"muon": _Muon(), "normuon": _NorMuon(), "adamuon": _AdaMuon()}


def number(options: LiveOptions, name: str) -> float:
    """A numeric option."""
    return float(options[name])  # type: ignore[arg-type]


def kept_of(options: LiveOptions) -> float:
    """What weight decay leaves of a weight in one step."""
    lr, weight_decay = number(options, "lr"), number(options, "weight_decay")
    return keep_of(lr=lr, weight_decay=weight_decay, mode=str(options["weight_decay_mode"]))


def products_of(options: LiveOptions, device: torch.device) -> str:
    """Who multiplies the matrices of a param group at their homes, and why."""
    return products_in_words(device, _wire_dtype(options), torch_dtype(DType(str(options["ns_dtype"]))))


def _betas(options: LiveOptions) -> tuple[float, float]:
    betas: Any = options["betas"]
    return float(betas[0]), float(betas[1])


def _wire_dtype(options: LiveOptions) -> torch.dtype:
    return torch_dtype(wire_dtype_for(str(options["ns_dtype"])))

"""Whole steps of every rule against plain Python on single numbers, with every option of the live param groups changed before every step.

A diagonal matrix keeps its zeros, and Newton-Schulz acts on each of its numbers alone, so Muon needs no matrices here either.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.config.coefficients import coefficient_schedule
from layerwise.config.rules import RULES_BY_KIND
from layerwise.engine.algorithms import MATRIX
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.kernels.recorded import Recorder
from layerwise.kernels.second_moment import normalise_elements, normalise_rows

START = [0.5, -1.25]
GRADS = [[0.75, -0.5], [-0.25, -1.0], [1.5, 0.125]]
NUMBERS: list[dict[str, Any]] = [
    {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.7, "betas": (0.6, 0.8), "extra_scale": 1.5, "clip": 0.4},
    {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.5, "betas": (0.8, 0.7), "extra_scale": 0.6, "clip": 0.4},
    {"lr": 0.11, "weight_decay": 0.2, "momentum": 0.9, "betas": (0.5, 0.9), "extra_scale": 2.5, "clip": 0.4},
]
"""Of each step; the clip is the optimizer's own and stays."""
MODES = ("decoupled", "independent", "coupled")
TRIPLES = [(3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)]
EPS = 0.02


def numbers(first: int) -> list[dict[str, Any]]:
    """The live options of each step: modes of decay in turn from the `first` one, Nesterov now and then."""
    return [
        {**now, "weight_decay_mode": MODES[(first + step) % 3], "nesterov": (first + step) % 2 == 0}
        for step, now in enumerate(NUMBERS)
    ]


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(START))


class Diagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.diag(torch.tensor(START)))


@dataclass
class Scalars:
    """The same in plain Python."""

    weights: list[float] = field(default_factory=lambda: list(START))
    m: list[float] = field(default_factory=lambda: [0.0, 0.0])
    v: list[float] = field(default_factory=lambda: [0.0, 0.0])
    steps: int = 0

    def decayed(self, grads: list[float], now: dict[str, Any]) -> list[float]:
        """Clip and decay; what is left of the gradient."""
        norm = math.sqrt(sum(g * g for g in grads))
        grads = [g * min(1.0, now["clip"] / (norm + 1e-6)) for g in grads]
        self.steps += 1
        mode = now["weight_decay_mode"]
        if mode == "coupled":
            return [g + now["weight_decay"] * w for g, w in zip(grads, self.weights, strict=True)]
        factor = 1 - now["weight_decay"] * (now["lr"] if mode == "decoupled" else 1.0)
        self.weights = [w * factor for w in self.weights]
        return grads

    def adamw(self, grads: list[float], now: dict[str, Any]) -> None:
        b1, b2 = now["betas"]
        for i, g in enumerate(self.decayed(grads, now)):
            self.m[i] = b1 * self.m[i] + (1 - b1) * g
            self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
            mean, square = self.m[i] / (1 - b1**self.steps), self.v[i] / (1 - b2**self.steps)
            self.weights[i] -= now["lr"] * mean / (math.sqrt(square) + EPS)

    def lion(self, grads: list[float], now: dict[str, Any]) -> None:
        b1, b2 = now["betas"]
        for i, g in enumerate(self.decayed(grads, now)):
            self.weights[i] -= now["lr"] * math.copysign(1.0, b1 * self.m[i] + (1 - b1) * g)
            self.m[i] = b2 * self.m[i] + (1 - b2) * g

    def muon(self, grads: list[float], now: dict[str, Any]) -> None:
        mu = now["momentum"]
        grads = self.decayed(grads, now)
        self.m = [mu * m + (1 - mu) * g for m, g in zip(self.m, grads, strict=True)]
        ahead = [(1 - mu) * g + mu * m for m, g in zip(self.m, grads, strict=True)] if now["nesterov"] else self.m
        norm = math.sqrt(sum(x * x for x in ahead))
        for i, x in enumerate(ahead):
            x /= norm
            for a, b, c in TRIPLES:
                x = a * x + b * x**3 + c * x**5
            self.weights[i] -= now["lr"] * 0.2 * math.sqrt(2) * now["extra_scale"] * x


def train(
    module: nn.Module, param: Tensor, rule: Any, steps: list[dict[str, Any]], *, is_matrix: bool
) -> list[list[float]]:
    """Weights after each step, with the live options of that step."""
    matrix, other = (rule, layerwise.AdamW(lr=0.9)) if is_matrix else (layerwise.Muon(lr=0.9), rule)
    optimizer = layerwise.Optimizer(module, matrix=matrix, other=other, clip_grad_norm=NUMBERS[0]["clip"])
    found = []
    for grads, now in zip(GRADS, steps, strict=True):
        for group in optimizer.param_groups:
            group.update({name: value for name, value in now.items() if name in group})
        param.grad = torch.diag(torch.tensor(grads)) if is_matrix else torch.tensor(grads)
        optimizer.step()
        found.append(param.detach().diagonal().tolist() if is_matrix else param.detach().tolist())
    return found


AT_FIRST: dict[str, Any] = {"lr": 0.9, "weight_decay": 0.9}
"""What holds only until somebody writes into the param groups."""


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_rules_for_vectors_follow_their_live_options(kind: str, first: int) -> None:
    at_first = {**AT_FIRST, "weight_decay_mode": MODES[first - 1], "betas": (0.1, 0.2)}
    rule = layerwise.AdamW(**at_first, eps=EPS) if kind == "adamw" else layerwise.Lion(**at_first)
    module, expected = Vector(), Scalars()
    found = train(module, module.gain, rule, numbers(first), is_matrix=False)
    for step, (grads, now) in enumerate(zip(GRADS, numbers(first), strict=True)):
        (expected.adamw if kind == "adamw" else expected.lion)(grads, now)
        assert found[step] == pytest.approx(expected.weights, rel=1e-5)


@pytest.mark.parametrize("first", range(3))
def test_muon_follows_its_live_options(first: int) -> None:
    how: dict[str, Any] = {"coefficients": TRIPLES, "steps": 2, "ns_dtype": "fp32"}
    at_first = {"weight_decay_mode": MODES[first - 1], "nesterov": first % 2 == 1, "momentum": 0.1, "extra_scale": 0.1}
    module, expected = Diagonal(), Scalars()
    rule = layerwise.Muon(**AT_FIRST, **at_first, **how)
    found = train(module, module.layer.weight, rule, numbers(first), is_matrix=True)
    for step, (grads, now) in enumerate(zip(GRADS, numbers(first), strict=True)):
        expected.muon(grads, now)
        assert found[step] == pytest.approx(expected.weights, rel=1e-5)


@pytest.mark.parametrize("ns_dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", ["muon", "normuon", "adamuon"])
def test_a_direction_is_made_by_the_form_of_its_shape_in_the_dtype_and_with_the_coefficients_asked_for(
    kind: str, ns_dtype: str
) -> None:
    """Forms and dtypes differ in their last bits only, so bits are what is compared."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[ns_dtype]
    wire = torch.bfloat16 if ns_dtype == "bf16" else torch.float32
    seen = []
    forms = (("standard", 8), ("gram", 20))
    for (method, cols), coefficients, steps in itertools.product(forms, ("simple", "quintic"), (2, 5)):
        update_BMN = torch.randn(1, 6, cols, generator=torch.Generator().manual_seed(0))
        how = {"coefficients": coefficients, "steps": steps, "ns_dtype": ns_dtype}
        algorithm, options = MATRIX[kind], {**how, "beta2": 0.5, "eps": 0.1}
        state = {name: torch.zeros(1, *shape) for name, shape in RULES_BY_KIND[kind].home_state(6, cols).items()}
        found = algorithm.direction(update_BMN, options, state, Recorder())
        rounded = update_BMN.to(wire)
        polar = orthogonalize(
            rounded.sign() if kind == "adamuon" else rounded,
            schedule=coefficient_schedule(coefficients, steps),
            method=method,
            dtype=dtype,
        )
        moment = next((torch.zeros_like(tensor) for tensor in state.values()), torch.zeros(0))
        if kind != "muon":
            normalise = normalise_rows if kind == "normuon" else normalise_elements
            polar = normalise(polar, moment, beta2=0.5, eps=0.1)
        assert found.dtype == wire
        assert torch.equal(found, polar.to(wire)), how
        seen.append(found)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(seen, 2))

"""What planner and engine both read off a rule: its state, and what its matrices travel in."""

from __future__ import annotations

import pytest
import torch

import layerwise
from layerwise.config.rules import RULES_BY_KIND, AdaMuon, AdamW, Lion, Muon, NorMuon, Rule
from layerwise.dtypes import DType

STATE: dict[str, tuple[tuple[str, ...], dict[str, tuple[int, ...]]]] = {
    "muon": (("momentum",), {}),
    "normuon": (("momentum",), {"row_moment": (6,)}),
    "adamuon": (("momentum",), {"second_moment": (6, 4)}),
    "adamw": (("exp_avg", "exp_avg_sq"), {}),
    "lion": (("exp_avg",), {}),
}
"""By element, and with a matrix of 6 x 4 at its home. Names are in checkpoints."""


def test_every_rule_says_what_it_keeps() -> None:
    assert {kind: (rule.state_names, rule.home_state(6, 4)) for kind, rule in RULES_BY_KIND.items()} == STATE


@pytest.mark.parametrize("rule", [Muon(lr=0.1), NorMuon(lr=0.1), AdaMuon(lr=0.1), AdamW(lr=0.1), Lion(lr=0.1)])
def test_an_optimizer_keeps_that_and_nothing_else(rule: Rule) -> None:
    module = torch.nn.Linear(4, 6, bias=False)
    optimizer = layerwise.Optimizer(module, matrix=rule, other=AdamW(lr=0.1))
    by_element, at_home = STATE[rule.kind]
    expected: dict[str, list[int]] = {"step": []}
    expected |= {name: [6, 4] for name in by_element} | {f"{name}.0": list(shape) for name, shape in at_home.items()}
    assert {name: list(tensor.shape) for name, tensor in optimizer.state[module.weight].items()} == expected


@pytest.mark.parametrize("kind", [Muon, NorMuon, AdaMuon])
def test_matrices_travel_in_bf16_where_that_is_what_they_are_rounded_to(kind: type[Muon]) -> None:
    found = {name: kind(lr=0.1, ns_dtype=name).wire_dtype for name in ("bf16", "fp16", "fp32")}  # type: ignore[arg-type]
    assert found == {"bf16": DType.BF16, "fp16": DType.FP32, "fp32": DType.FP32}
    assert AdamW(lr=0.1).wire_dtype is Lion(lr=0.1).wire_dtype is DType.BF16

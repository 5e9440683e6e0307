"""Steps that are launched before the host knows what became of their gradients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.engine import step as stepping
from layerwise.kernels.facts import has_own_kernels
from tests.worlds import Case, gradient

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not has_own_kernels(torch.device("cuda", 0)), reason="needs our own kernels"
)

ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "clipped": {
        "clip_grad_norm": 0.25,
        "gradient_policy": layerwise.GradientPolicy(norm_groups={"experts": "experts"}),
    },
    "skipped above": {
        "clip_grad_norm": 1.0,
        "gradient_policy": layerwise.GradientPolicy(skip_above=100.0, clip="other-only"),
    },
}


def build(dtype: torch.dtype, **asked: Any) -> tuple[nn.Module, layerwise.Optimizer]:
    module = Case(dtype=dtype).build().cuda()
    matrix = layerwise.Muon(lr=0.02, weight_decay=0.1)
    other = layerwise.AdamW(lr=0.003, weight_decay=0.1, weight_decay_mode="coupled")
    return module, layerwise.Optimizer(module, matrix=matrix, other=other, **asked)


def feed(module: nn.Module, step: int) -> None:
    """Gradients of step 2 hold NaN, and those of step 4 are very large."""
    for fqn, param in module.named_parameters():
        if param.requires_grad:
            values = gradient(fqn, param.shape, 0, step, 0) * (1024.0 if step == 4 else 1.0)
            if step == 2 and fqn == "tall.weight":
                values[3, 2] = math.nan
            param.grad = values.to(param.dtype).cuda()


def trained(dtype: torch.dtype, **asked: Any) -> tuple[list[Tensor], list[float]]:
    module, optimizer = build(dtype, **asked)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(7):
            feed(module, step)
            optimizer.step()
        stats = optimizer.stats
    state = [tensor for param in module.parameters() for tensor in optimizer.state.get(param, {}).values()]
    return [*module.parameters(), *state], [stats.step, stats.grad_norm, *stats.clip_coefficients.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ASKED)
def test_the_bits_are_those_of_a_host_that_decides_first(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, numbers = trained(dtype, **ASKED[name])
    monkeypatch.setattr(stepping, "has_own_kernels", lambda device: False)
    expected, others = trained(dtype, **ASKED[name])
    assert numbers == others
    assert numbers[0] == (5 if name == "skipped above" else 6)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ASKED)
def test_a_step_waits_for_nothing(name: str) -> None:
    module, optimizer = build(torch.float32, **ASKED[name])
    for step in (0, 1, 3, 5, 6):
        feed(module, step)
        if step > 3:  # compiled and recorded by then
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert optimizer.stepper._left is not None
    assert optimizer.stats.step == 5

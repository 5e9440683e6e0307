"""Our own element-wise kernels against the formulas in float64, on a GPU or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if not IS_INTERPRETED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from layerwise.kernels.triton_elementwise import fused_adamw_, fused_lion_, fused_momentum_

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
NUMELS = [1, 4095, 4096, 9001] if IS_INTERPRETED else [1, 4095, 4096, 3_000_001]


def runs(numel: int, count: int) -> list[Tensor]:
    """Numbers of many sizes in the middle of memory that must stay as it is."""
    generator = torch.Generator().manual_seed(numel)
    return [
        (torch.randn(numel + 2, generator=generator) * 2.0 ** torch.randint(-20, 4, (numel + 2,), generator=generator)).to(DEVICE)
        for _ in range(count)
    ]  # fmt: skip


def check(found: list[Tensor], expected: list[Tensor], before: list[Tensor]) -> None:
    for one, other, was in zip(found, expected, before, strict=True):
        torch.testing.assert_close(
            one[1:-1].double(), other[1:-1], rtol=2e-6, atol=5e-6
        )  # terms of up to 50 may cancel
        assert torch.equal(one[[0, -1]], was[[0, -1]])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("numel", NUMELS)
def test_momentum(numel: int, nesterov: bool) -> None:
    grad, state = before = runs(numel, 2)
    found = [tensor.clone() for tensor in before]
    fused_momentum_(found[0][1:-1], found[1][1:-1], momentum=0.9, nesterov=nesterov)
    moved = 0.9 * state.double() + (1 - 0.9) * grad.double()
    direction = (1 - 0.9) * grad.double() + 0.9 * moved if nesterov else moved
    check(found, [direction, moved], before)


@pytest.mark.parametrize("numel", NUMELS)
def test_adamw(numel: int) -> None:
    before = runs(numel, 4)
    before[3] = before[3].abs()
    found = [tensor.clone() for tensor in before]
    betas, eps, lr, step = (0.85, 0.93), 1e-7, 0.3, 3
    root, size = math.sqrt(1 - betas[1] ** step), lr / (1 - betas[0] ** step)
    inner = [tensor[1:-1] for tensor in found]
    fused_adamw_(*inner, betas=betas, root=root, eps=eps, size=size)
    master, grad, avg, avg_sq = (tensor.double() for tensor in before)
    terms = betas[0] * avg.abs() + (1 - betas[0]) * grad.abs()
    avg = betas[0] * avg + (1 - betas[0]) * grad
    avg_sq = betas[1] * avg_sq + (1 - betas[1]) * grad**2
    denominator = avg_sq.sqrt() / root + eps
    check(found[1:], [grad, avg, avg_sq], before[1:])
    # A mean whose terms cancel has the rounding of the terms, and so has what is divided by next to nothing.
    bound = 1e-6 * (master.abs() + size * terms / denominator)
    error = (found[0].double() - (master - size * avg / denominator)).abs()
    assert bool((error <= bound)[1:-1].all())
    assert torch.equal(found[0][[0, -1]], before[0][[0, -1]])


@pytest.mark.parametrize("numel", NUMELS)
def test_lion(numel: int) -> None:
    before = runs(numel, 3)
    before[1][: numel // 2], before[2][: numel // 3] = 0.0, 0.0  # where both are zero nothing moves
    found = [tensor.clone() for tensor in before]
    betas, lr = (0.8, 0.97), 0.25
    fused_lion_(*(tensor[1:-1] for tensor in found), lr=lr, betas=betas)
    master, grad, avg = (tensor.double() for tensor in before)
    direction = (betas[0] * avg + (1 - betas[0]) * grad).sign()
    check(found, [master - lr * direction, grad, betas[1] * avg + (1 - betas[1]) * grad], before)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, math.nan):
        tensors = [torch.ones(8, device=DEVICE) for _ in range(4)]
        tensors[1][3] = bad
        fused_adamw_(*tensors, betas=(0.9, 0.99), root=1.0, eps=1e-8, size=0.1)
        assert not torch.isfinite(tensors[2][3])
        assert torch.isfinite(tensors[0][[0, 1, 2, 4, 5, 6, 7]]).all()
    tensors = [torch.ones(8, device=DEVICE) for _ in range(3)]
    tensors[1][3] = math.nan
    fused_lion_(*tensors, lr=0.1, betas=(0.9, 0.99))
    assert torch.isnan(tensors[0][3])

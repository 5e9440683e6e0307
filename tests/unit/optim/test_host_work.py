"""What a step costs the host for every further param: counted in calls of Python, so that no clock has a say."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import layerwise

KERNELS = Path(layerwise.__file__).parent / "kernels"


def calls_of_a_step(module: nn.Module, *, change: bool = False) -> int:
    """Calls of functions, whether of Python or of C, in the third step. Arithmetic is left out: on the CPU it needs a call
    for every span."""
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(
        model, matrix=layerwise.AdamW(lr=0.1), other=layerwise.AdamW(lr=0.1), clip_grad_norm=1e-3
    )
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and not Path(frame.f_code.co_filename).is_relative_to(KERNELS)

    for step in range(3):
        torch.stack([param.sum() for param in model.parameters()]).sum().backward()
        if step == 2:
            if change:
                module.append(nn.ReLU())
            sys.setprofile(note)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    return calls


def modules(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.RMSNorm(4) for _ in range(count))


def per_param(**options: bool) -> float:
    few, many = (calls_of_a_step(modules(count), **options) for count in (40, 140))
    return (many - few) / 100


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer makes calls of its own")
def test_a_step_makes_hardly_any_calls_for_a_further_param() -> None:
    assert per_param() < 2.0


@pytest.mark.skipif(sys.gettrace() is not None, reason="a tracer makes calls of its own")
def test_only_a_step_after_a_change_walks_over_all_params() -> None:
    assert per_param(change=True) > 5.0

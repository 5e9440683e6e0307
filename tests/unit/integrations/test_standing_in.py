"""What accelerate has made around an optimizer steps the one that took its place, also where it scales losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import layerwise
from layerwise.integrations.accelerate import stand_in, take_over
from tests.ranks import run_ranks


def stepped(rank: int, world: int, scales: bool) -> tuple[int, bool, Any]:
    """A step through accelerate's wrapper: the steps that ours has taken, whether weights moved, and the state of the wrapper."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)  # the wrapper asks for its state
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scales else None
    module = nn.Linear(4, 6)
    before = module.weight.detach().clone()
    prepared = AcceleratedOptimizer(stand_in(module), scaler=scaler)
    own = layerwise.Optimizer(module, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    take_over(SimpleNamespace(scaler=scaler), prepared, own)
    loss = module(torch.ones(3, 4)).sum()
    (loss if scaler is None else scaler.scale(loss)).backward()
    prepared.step()
    return own.stats.step, not torch.equal(module.weight, before), prepared.step_was_skipped


@pytest.mark.slow
@pytest.mark.parametrize("scales", [False, True])
def test_ours_is_stepped(scales: bool) -> None:
    pytest.importorskip("accelerate")
    assert run_ranks(1, stepped, scales, meet=False) == [(1, True, False)]

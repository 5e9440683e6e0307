"""A checkpoint that is written in the background is of the moment that it was asked for, whatever the card does next. Needs CUDA; CI has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import layerwise
from tests.worlds import Hyper, rules

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")

SLEEP = 400_000_000
"""Cycles of the card: about a fifth of a second."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_come_after_it_are_not_in_it(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = layerwise.DataParallel(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).to("cuda", dtype))
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))

    def step(sleep: int = 0) -> None:
        loss = model(torch.ones(4, 64, device="cuda", dtype=dtype)).float().square().mean()
        torch.cuda._sleep(sleep)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    # What is saved is still being computed when it is asked for, and the next step is there before it is written.
    step(SLEEP)
    written = layerwise.save(tmp_path / "aside", model, optimizer, background=True)
    step()
    written.wait()
    after = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    layerwise.load(tmp_path / "aside", model, optimizer)
    loaded = {name: param.detach().clone() for name, param in model.module.named_parameters()}
    assert optimizer.engine.count.steps == 2
    assert all(not torch.equal(after[name], loaded[name]) for name in after)
    layerwise.save(tmp_path / "spot", model, optimizer)
    assert (tmp_path / "spot" / "__0_0.distcp").read_bytes() == (tmp_path / "aside" / "__0_0.distcp").read_bytes()
    step()
    again = {name: param.detach() for name, param in model.module.named_parameters()}
    assert all(torch.equal(after[name], again[name]) for name in after)

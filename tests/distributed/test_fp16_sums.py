"""Gradients in fp16 whose sum over ranks is out of range, while their average is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import layerwise
from tests.ranks import run_ranks
from tests.worlds import deliver

LARGE, NUMEL = 40000.0, 24
"""Twice as much is inf in fp16, and this is not."""


def train(
    rank: int, world: int, layout: str, reducer: str, rounds: int, dtype: torch.dtype
) -> tuple[list[float], set[float], float]:
    """Norm, momenta and loss scale after one step with the same large gradient on every rank."""
    module = nn.Linear(6, 4, bias=False)
    model = layerwise.DataParallel(module, layout=layout, reducer=reducer, grad_dtype=dtype)
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.AdamW(lr=0.1, betas=(0.5, 0.5)),
        other=layerwise.AdamW(lr=0.1),
        loss_scale=None,
    )
    for _ in range(rounds):  # without no_sync(): what comes after the first is late
        deliver(model, {"weight": torch.full((4, 6), LARGE / rounds)}, sync=True)
    optimizer.step()
    stats = optimizer.stats
    momenta = {value for state in optimizer.state.values() for value in state["exp_avg"].tolist()}
    return [stats.grad_norm, float(stats.skipped)], momenta, stats.loss_scale


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("layout", "reducer", "rounds"),
    [
        ("flat", "collective", 1),
        ("flat", "collective", 2),
        ("flat", "ordered", 1),
        ("padded", "collective", 1),
        ("compact", "collective", 1),
        ("replicated", "collective", 1),
    ],
)
def test_an_average_within_range_does_not_overflow_on_its_way(
    layout: str, reducer: str, rounds: int, world: int
) -> None:
    found = run_ranks(world, train, layout, reducer, rounds, torch.float16)
    assert all(numbers == [LARGE * math.sqrt(NUMEL), 0.0] for numbers, _, _ in found)
    assert set().union(*(momenta for _, momenta, _ in found)) == {LARGE / 2}
    assert {scale for *_, scale in found} == {1.0}


def test_bf16_reaches_as_far_as_fp32_and_is_summed_as_it_is() -> None:
    found = run_ranks(2, train, "flat", "collective", 1, torch.bfloat16)
    rounded = float(torch.tensor(LARGE, dtype=torch.bfloat16))
    assert set().union(*(momenta for _, momenta, _ in found)) == {rounded / 2}

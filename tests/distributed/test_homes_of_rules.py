"""Homes of matrices are balanced by what the rule that will run costs, where an optimizer lays a model out."""

from __future__ import annotations

import pytest
from torch import nn

import layerwise
from tests.ranks import run_ranks

COSTS = {1: {32: 18, 8: 6}, 5: {32: 60, 8: 30}}
"""By steps, in n cubed FLOPs, with n = 8: 6 for a step of a square matrix; the wide one has sides of ratio r = 4 and takes the Gram
form, 4 r + 2 for one step and 8 r + 28 for five."""


def loads(rank: int, world: int, steps: int, is_sharded: bool) -> list[int]:
    """What each rank is home to."""
    model = nn.Sequential(*(nn.Linear(columns, 8, bias=False) for columns in (32, 8, 8, 8)))
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    more = {} if is_sharded else {"gradients": "reduced", "layout": "flat"}
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=0.1, steps=steps),
        other=layerwise.AdamW(lr=0.1),
        rules=[layerwise.RouteRule(pattern="*", to="matrix")],
        **more,
    )
    found = [0] * world
    for work in optimizer.plan.works:
        for item in work.items:
            for home in item.homes:
                found[home] += COSTS[steps][max(item.matrix.logical_shape)]
    return found


@pytest.mark.parametrize("is_sharded", [False, True])
def test_homes_are_balanced_by_the_steps_that_will_run(is_sharded: bool) -> None:
    """One wide matrix is worth three square ones in one step, and two in five."""
    for steps, most in {1: 18, 5: 90}.items():
        first, second = run_ranks(2, loads, steps, is_sharded)
        assert first == second
        assert max(first) == most, (steps, first)

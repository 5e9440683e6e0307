"""Homes of matrices are balanced by what the rule that will run costs, where an optimizer lays a model out."""

from __future__ import annotations

import pytest
from torch import nn

import layerwise
from tests.ranks import run_ranks

COSTS = {"standard": {32: 90, 8: 30}, "auto": {32: 60, 8: 30}}
"""Five steps in n cubed FLOPs, with n = 8: 10 (2 r + 1) in the standard form for sides of ratio r, 8 r + 28 in the Gram form, which
`auto` takes from 2 on."""


def loads(rank: int, world: int, method: str, is_sharded: bool) -> list[int]:
    """What each rank is home to."""
    model = nn.Sequential(*(nn.Linear(columns, 8, bias=False) for columns in (32, 8, 8, 8)))
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    more = {} if is_sharded else {"gradients": "reduced", "layout": "flat"}
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=0.1, method=method),
        other=layerwise.AdamW(lr=0.1),
        rules=[layerwise.RouteRule(pattern="*", to="matrix")],
        **more,
    )
    found = [0] * world
    for work in optimizer.plan.works:
        for item in work.items:
            for home in item.homes:
                found[home] += COSTS[method][max(item.matrix.logical_shape)]
    return found


@pytest.mark.parametrize("is_sharded", [False, True])
def test_homes_are_balanced_by_the_form_that_will_run(is_sharded: bool) -> None:
    """One wide matrix is worth three square ones in the standard form, and two in the other."""
    for method in COSTS:
        first, second = run_ranks(2, loads, method, is_sharded)
        assert first == second
        assert max(first) == 90, (method, first)

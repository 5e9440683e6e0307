"""How many broadcasts the uneven all-gathers of a step are made of."""

from __future__ import annotations

import pytest

from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.planner.presets import preset


def broadcasts(plan: Plan) -> int:
    """One for every rank that owns some of a bucket."""
    return sum(
        sum(numel > 0 for numel in bucket.shard_numels())
        for bucket in plan.buckets
        if bucket.publisher == "uneven_all_gather"
    )


@pytest.mark.parametrize(("model", "count"), [("llama3-8b", 128), ("llama3-70b", 320), ("deepseek-v3", 601)])
def test_a_step_on_512_ranks_has_as_many_as_docs_layouts_says_and_no_more_than_params(model: str, count: int) -> None:
    plan = make_plan(preset(model), Options(layout="compact"), world=512)
    matrices = [route for route in plan.routes.values() if route.family == "matrix"]
    assert broadcasts(plan) == count <= len(matrices)

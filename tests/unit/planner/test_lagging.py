"""What a rank holds at most where reductions lag behind backward."""

from __future__ import annotations

import pytest

from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.planner.memory import lagging_nbytes
from layerwise.planner.report import column_of
from layerwise.routing.spec import table_of

TABLE = table_of([(f"layer{index}.weight", (64, 64)) for index in range(5)], dtype=DType.BF16)
NUMEL = 64 * 64


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, 0),
        ({"shard_grads": True}, 3 * NUMEL * 4),
        ({"shard_grads": True, "grad_dtype": DType.BF16}, 3 * NUMEL * 2),
        # What the other rank sends, and this one's own part, before they are added up.
        ({"shard_grads": True, "reducer": "ordered"}, 3 * NUMEL * 4 + 3 * NUMEL * 4),
    ],
)
def test_all_full_gradients_of_a_backward_may_be_there(options: dict[str, object], more: int) -> None:
    plan = make_plan(TABLE, Options(layout="flat", bucket_numel=1, **options), world=2)  # type: ignore[arg-type]
    assert lagging_nbytes(plan) == more
    column = column_of(plan)
    assert column.at_most_nbytes == column.memory.total + more


def test_two_buckets_never_lag() -> None:
    plan = make_plan(TABLE, Options(layout="flat", bucket_numel=3 * NUMEL, shard_grads=True), world=2)
    assert len(plan.buckets) == 2
    assert lagging_nbytes(plan) == 0

"""Layouts side by side: which are compared, which one is marked, and what is said about those that do not fit."""

from __future__ import annotations

import math

import pytest

from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.planner.choice import CANDIDATES
from layerwise.planner.presets import preset
from layerwise.planner.report import SIDE_BY_SIDE, Comparison, Setting, column_of, compare
from layerwise.routing.spec import ParamSpec, ParamTable, table_of


def chosen(comparison: Comparison) -> list[str]:
    return [column.layout for column in comparison.columns if column.is_chosen]


def test_the_best_one_is_marked() -> None:
    table, setting = preset("gpt2"), Setting(world=8)
    found = compare(table, setting)
    assert [column.layout for column in found.columns] == list(SIDE_BY_SIDE)
    (choice,) = found.choices
    assert chosen(found) == [choice.layout]
    assert choice.buffer == "dense/matrix"
    assert [score.layout for score in choice.scores] == list(CANDIDATES)
    assert found.left_out == {}
    assert found.matrices == 72


def test_a_mixture_has_a_column_of_its_own() -> None:
    """Large experts in a small domain fit whole; small dense params in a large one do not."""
    setting = Setting(world=512, worlds={"expert": 4})
    found = compare(preset("qwen3-235b-a22b", expert_parallel=128), setting)
    mixture = {"dense/matrix": "flat", "expert/matrix": "padded"}
    assert {choice.buffer: choice.layout for choice in found.choices} == mixture
    assert [column.layout for column in found.columns] == [*SIDE_BY_SIDE, "flat + padded"]
    assert chosen(found) == ["flat + padded"]


def test_one_layout_alone_is_not_compared_with_anything() -> None:
    found = compare(preset("gpt2"), Setting(world=8), ["padded"])
    assert [column.layout for column in found.columns] == ["padded"]
    assert (chosen(found), found.choices) == ([], ())


def test_of_layouts_of_which_only_one_can_be_best_none_is_marked() -> None:
    found = compare(preset("gpt2"), Setting(world=8), ["flat", "replicated"])
    assert (chosen(found), found.choices) == ([], ())


def test_on_one_rank_the_first_of_equal_layouts_is_marked() -> None:
    found = compare(preset("gpt2"), Setting(world=1))
    assert (chosen(found), found.choices) == (["flat"], ())


def test_layouts_that_the_setting_refuses_are_left_out_with_the_reason() -> None:
    found = compare(preset("gpt2"), Setting(world=8, options=Options(shard_grads=True)))
    assert [column.layout for column in found.columns] == ["flat", "padded"]
    assert list(found.left_out) == ["compact", "replicated"]
    assert "its gradients are all-reduced" in found.left_out["compact"]
    with pytest.raises(ValueError, match="its gradients are all-reduced"):
        compare(preset("gpt2"), Setting(world=8, options=Options(shard_grads=True)), ["compact"])


def test_a_plan_that_somebody_made_gives_the_same_column() -> None:
    """What `model.plan` is to a live model."""
    table = preset("gpt2", dtype=DType.FP32)
    setting = Setting(
        world=3, options=Options(grad_dtype=DType.BF16, bucket_numel=10**6, reducer="ordered", shard_grads=True)
    )
    (column,) = compare(table, setting, ["flat"]).columns
    plan = make_plan(
        table,
        Options(layout="flat", grad_dtype=DType.BF16, bucket_numel=10**6, reducer="ordered", shard_grads=True),
        world=3,
    )
    assert column_of(plan) == column
    assert column.to_json() == column_of(plan).to_json()


def stacked(experts: int, domain: str = "dense") -> ParamTable:
    stack = ParamSpec(fqn="experts", shape=(experts, 64, 64), dtype=DType.BF16, domain=domain)
    return ParamTable((*table_of([(f"{number}.weight", (64, 64)) for number in range(8)]), stack))


def test_a_stack_that_one_rank_must_hold_whole_is_hinted_at() -> None:
    hint = compare(stacked(12), Setting(world=8)).hint
    assert hint is not None
    assert "padded and compact keep a stack of 12 experts whole on one rank" in hint
    assert f"--ep with a divisor of {math.gcd(12, 8)}" in hint


@pytest.mark.parametrize(
    ("table", "setting", "layouts"),
    [
        (stacked(12, "expert"), Setting(world=8), None),  # they are spread already
        (stacked(12), Setting(world=8), ["flat"]),  # nothing keeps them whole
        (stacked(12), Setting(world=7), None),  # no number of ranks divides both
        (preset("gpt2"), Setting(world=64), None),
        (stacked(12), Setting(world=1), None),
    ],
)
def test_no_hint_where_it_would_not_help(table: ParamTable, setting: Setting, layouts: list[str] | None) -> None:
    assert compare(table, setting, layouts).hint is None


def test_a_model_without_matrices_has_nothing_to_orthogonalise() -> None:
    table = ParamTable((ParamSpec(fqn="norm.weight", shape=(64,), dtype=DType.BF16),))
    found = compare(table, Setting(world=4))
    for column in found.columns:
        assert (column.work.ms, column.memory.slots) == (0.0, 0)
    assert chosen(found) == ["flat"]

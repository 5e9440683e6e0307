"""What the packings of `padded` give for known models: the reference's own figures, and less padding than those."""

import json
from functools import cache
from typing import Any

import pytest

from benchmarks.layouts import MEASURED, MEASURED_SHAPES, RESULTS, Figures, exposed_percent, figures, reference_figures
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan

ROWS = [
    (layout, model, world, measured)
    for layout, by_model in MEASURED.items()
    for model, by_world in by_model.items()
    for world, measured in by_world.items()
]
POINTS = sorted({(model, world) for _, model, world, _ in ROWS})


@cache
def planned(model: str, world: int, layout: str) -> Plan:
    return make_plan(MEASURED_SHAPES[model], Options(layout=layout), world=world)


def found(model: str, world: int, layout: str) -> dict[str, Any]:
    return figures(planned(model, world, layout))


@pytest.mark.parametrize(
    ("model", "matrices", "billions"),
    [
        ("Llama-8B", 128, 6.98),
        ("Llama-70B TP8", 320, 8.56),
        ("DeepSeek-V3 dense", 485, 15.3),
        ("DeepSeek-V3 experts", 928, 20.4),
    ],
)
def test_the_models_are_those_that_were_measured(model: str, matrices: int, billions: float) -> None:
    plan = planned(model, 8, "flat")
    assert sum(len(work.items) for work in plan.works) == len(plan.table) == matrices
    assert sum(param.numel for param in plan.table) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("layout", "model", "world", "measured"), ROWS)
def test_the_reference_packings_give_the_figures_of_megatrons_own_code(
    layout: str, model: str, world: int, measured: Figures
) -> None:
    ours = reference_figures(planned(model, world, layout))
    assert ours["waste_percent"] == pytest.approx(measured.waste_percent, abs=1)
    assert ours["buckets"] == measured.buckets
    if measured.megatron_imbalance is not None:
        # Measured figures have two digits, the largest one has one.
        assert ours["megatron_imbalance"] == pytest.approx(measured.megatron_imbalance, abs=0.02)


@pytest.mark.parametrize(("model", "world"), POINTS)
def test_ours_pads_no_more_balances_no_worse_and_overlaps_no_less(model: str, world: int) -> None:
    ours = found(model, world, "padded")
    for layout in ("padded:reference", "padded:reference-numel"):
        theirs = found(model, world, layout)
        assert ours["waste_percent"] <= theirs["waste_percent"]
        # Padding comes first: the older reference may balance better where it pads more.
        pads_less = layout == "padded:reference-numel" and ours["waste_percent"] < theirs["waste_percent"]
        assert pads_less or ours["imbalance"] <= theirs["imbalance"]
    assert exposed_percent(planned(model, world, "padded")) <= exposed_percent(
        planned(model, world, "padded:reference")
    )


@pytest.mark.parametrize(
    ("model", "world", "at_most"),
    [
        ("Llama-8B", 8, 4),
        ("Llama-70B TP8", 32, 3),
        ("Llama-70B TP8", 64, 4),
        ("Llama-70B TP8", 128, 4),
        ("DeepSeek-V3 dense", 32, 1),
        ("DeepSeek-V3 experts", 32, 1.2),
    ],
)
def test_ours_pads_little_where_the_reference_pads_much(model: str, world: int, at_most: float) -> None:
    assert found(model, world, "padded")["waste_percent"] <= at_most


def test_the_committed_figures_are_those_of_today() -> None:
    report = json.loads(RESULTS.read_text())
    assert report["worst_difference_points"] < 1
    committed = {(row["layout"], row["model"], row["world"]): row for row in report["reference"]}
    assert set(committed) == {(layout, model, world) for layout, model, world, _ in ROWS}
    for (layout, model, world), row in committed.items():
        assert row["found"] == reference_figures(planned(model, world, layout))
        assert row["ours"] == found(model, world, "padded")

"""Padding, buckets and balance of `padded` for known models: those that Megatron-LM's own layout code gives."""

import json

import pytest

from benchmarks.layouts import MEASURED, MEASURED_SHAPES, RESULTS, Figures, figures, preset_padding, reference_figures
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.planner.presets import PRESETS

ROWS = [(model, world, measured) for model, by_world in MEASURED.items() for world, measured in by_world.items()]


def planned(model: str, world: int) -> Plan:
    return make_plan(MEASURED_SHAPES[model], Options(layout="padded"), world=world)


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
    plan = planned(model, 8)
    assert sum(len(work.items) for work in plan.works) == len(plan.table) == matrices
    assert sum(param.numel for param in plan.table) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("model", "world", "measured"), ROWS)
def test_padded_gives_the_figures_of_megatrons_own_code(model: str, world: int, measured: Figures) -> None:
    found = reference_figures(planned(model, world))
    assert found["waste_percent"] == pytest.approx(measured.waste_percent, abs=1)
    assert found["buckets"] == measured.buckets
    # Measured figures have two digits, the largest one has one.
    assert found["megatron_imbalance"] == pytest.approx(measured.megatron_imbalance, abs=0.02)


@pytest.mark.parametrize(("world", "percent"), [(64, "7.7"), (128, "115"), (512, "762")])
def test_padding_of_the_matrices_of_llama_8b_is_megatrons_to_the_digit(world: int, percent: str) -> None:
    waste = figures(planned("Llama-8B", world))["waste_percent"]
    assert f"{waste:.{len(percent.partition('.')[2])}f}" == percent


def test_the_committed_figures_are_those_of_today() -> None:
    report = json.loads(RESULTS.read_text())
    assert report["worst_difference_points"] < 1
    committed = {(row["model"], row["world"]): row["found"] for row in report["reference"]}
    assert committed == {(model, world): reference_figures(planned(model, world)) for model, world, _ in ROWS}


@pytest.mark.parametrize("model", PRESETS)
def test_the_committed_padding_of_presets_is_that_of_today(model: str) -> None:
    committed = [row for row in json.loads(RESULTS.read_text())["padding"] if row["model"] == model]
    assert [row["world"] for row in committed] == [8, 64, 512]
    assert committed[:2] == [preset_padding(model, world) for world in (8, 64)]

"""A plan made of a config alone is the plan of the live model: the same digest, for the families known without
transformers."""

from __future__ import annotations

import pytest

from layerwise.layout.plan import make_plan
from layerwise.models.table import param_table
from layerwise.planner.hf_config import MODEL_TYPES, hf_table
from tests.hf.models import MODELS, build

KNOWN = [name for name in MODELS if name in MODEL_TYPES or name == "gemma3"]


def test_most_families_are_known() -> None:
    assert len(KNOWN) == 8


@pytest.mark.parametrize("name", KNOWN)
def test_a_plan_of_the_config_has_the_digest_of_the_live_model(name: str) -> None:
    config = MODELS[name]()[1].to_dict()
    assert make_plan(hf_table(config), world=3).digest == make_plan(param_table(build(name)), world=3).digest

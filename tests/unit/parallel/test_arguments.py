"""From an argument to the plan: every option is written once on its way."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch

import layerwise
from layerwise.dtypes import DType
from layerwise.engine.settings import Settings
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan
from layerwise.planner.report import Setting
from layerwise.routing.rules import RouteRule


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def test_an_option_has_one_home() -> None:
    for holder in (Plan, Settings):
        assert "options" in names(holder)
        assert not names(holder) & names(Options)
    # `rules` there are update rules.
    assert names(Setting) & names(Options) == {"rules"}


ASKED: dict[str, Any] = {
    "layout": "compact",
    "rules": [RouteRule(pattern="weight", to="matrix")],
    "strict": True,
    "reducer": "ordered",
    "param_gather": "bf16",
    "shard_grads": True,
    "bucket_mib": 0.5,
    "grad_dtype": torch.float32,
}


def test_what_a_user_asks_for_arrives_in_the_plan() -> None:
    given = {**ASKED, "shard_grads": False}
    found = layerwise.DataParallel(torch.nn.Linear(4, 4, bias=False), **given).plan.options
    assert found == Options(
        layout="compact",
        rules=(RouteRule(pattern="weight", to="matrix"),),
        strict=True,
        grad_dtype=DType.FP32,
        bucket_numel=131072,
        reducer="ordered",
        param_gather="bf16",
    )
    other = {"reducer": "collective", "grad_dtype": torch.bfloat16}
    found = layerwise.DataParallel(torch.nn.Linear(4, 4, bias=False), **{**ASKED, **other}).plan.options
    assert (found.shard_grads, found.grad_dtype, found.bucket_numel) == (True, DType.BF16, 262144)
    public = set(inspect.signature(layerwise.DataParallel).parameters) & (names(Options) | {"bucket_mib"})
    assert public == set(ASKED)

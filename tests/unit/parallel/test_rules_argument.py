"""Values of `rules=`: rules that a followed forward gives, the path of a rules file, and a recorded routing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise.trace
from layerwise.errors import ConfigError
from layerwise.models.table import param_table
from layerwise.routing.files import rules_to_toml
from layerwise.routing.record import routing_to_json
from layerwise.routing.refusals import RefusedError

WIDTH = 8
INPUT = torch.zeros(2, 5, WIDTH)
RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.02), "other": layerwise.AdamW(lr=1e-3)}


class Gated(nn.Module):
    """A projection onto a gate and what it gates, under a name that says nothing of it."""

    def __init__(self, name: str = "up") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(WIDTH, 2 * WIDTH, bias=False))
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.get_submodule(self._name)(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)


def gated(name: str = "up") -> nn.Module:
    return nn.Sequential(Gated(name), Gated(name))


def heights(plan: Any, fqn: str) -> list[int]:
    return [matrix.rows for matrix in plan.routes[fqn].matrices]


def test_rules_of_a_forward_step_as_if_the_module_had_said_so() -> None:
    torch.manual_seed(0)
    model = gated()
    other = gated()
    other.load_state_dict(model.state_dict())
    rules = layerwise.trace.follow(model, {"input": INPUT})
    split = layerwise.Split(grid=(2 * WIDTH, WIDTH), roles="rc", blocks=(WIDTH, WIDTH))
    assert rules == [layerwise.RouteRule(pattern="*.up.weight", to="matrix", split=split)]
    traced = layerwise.Optimizer(model, rules=rules, **RULES)
    told = layerwise.Optimizer(
        other, rules=[layerwise.RouteRule(pattern="*.up.weight", to="matrix", row_blocks=(8, 8))], **RULES
    )
    assert heights(traced.plan, "0.up.weight") == heights(told.plan, "0.up.weight") == [8, 8]
    x = torch.randn(2, 5, WIDTH)
    for module, optimizer in ((model, traced), (other, told)):
        module(x).square().sum().backward()
        optimizer.step()
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_rules_of_the_user_come_before_those_of_the_forward() -> None:
    mine = [layerwise.RouteRule(pattern="0.up.weight", to="matrix", split="whole")]
    rules = layerwise.trace.follow(gated(), INPUT, rules=mine)
    assert [rule.pattern for rule in rules] == ["0.up.weight", "1.up.weight"]
    plan = layerwise.DataParallel(gated(), rules=rules).plan
    assert (heights(plan, "0.up.weight"), heights(plan, "1.up.weight")) == ([16], [8, 8])


def test_a_param_that_routing_refuses_gets_the_rule_of_its_forward() -> None:
    with pytest.raises(RefusedError, match="looks fused"):
        layerwise.DataParallel(gated("qkv"))
    model = layerwise.DataParallel(gated("qkv"), rules=layerwise.trace.follow(gated("qkv"), (INPUT,)))
    assert heights(model.plan, "0.qkv.weight") == [8, 8]


class Clear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


def test_a_forward_that_agrees_with_routing_needs_no_rules() -> None:
    assert layerwise.trace.follow(Clear(), INPUT) == []


class HalfSeen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.used(x)


def test_a_param_that_the_forward_does_not_use_goes_by_its_type_and_is_named() -> None:
    with pytest.warns(UserWarning, match=re.escape("does not show what becomes of 1 params")):
        rules = layerwise.trace.follow(HalfSeen(), INPUT)
    assert (
        layerwise.DataParallel(HalfSeen(), rules=rules).plan.route("idle.weight").reason == "is the weight of a Linear"
    )
    assert len(param_table(HalfSeen())) == 4


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (3, TypeError, "example_inputs must be a tensor"),
        (torch.zeros(2, 3), ValueError, "cannot be followed on example_inputs: RuntimeError"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(inputs: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        layerwise.trace.follow(gated(), inputs)


# -- files -----------------------------------------------------------------------------------------


def recorded(path: Path) -> layerwise.DataParallel:
    """A model that goes by its forward, whose routing is written to the file."""
    model = layerwise.DataParallel(gated(), rules=layerwise.trace.follow(gated(), INPUT))
    path.write_text(routing_to_json(model.plan.table, model.plan.routes))
    return model


@pytest.mark.parametrize("wrapped", [True, False])
def test_rules_may_be_the_path_of_a_rules_file(wrapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(rules_to_toml(layerwise.trace.follow(gated(), INPUT)))
    other = layerwise.RouteRule(pattern="0.down.weight", to="other")
    for rules in (path, str(path), [other, path]):
        model: Any = (
            layerwise.DataParallel(gated(), rules=rules)
            if wrapped
            else layerwise.Optimizer(gated(), rules=rules, **RULES)
        )
        assert heights(model.plan, "0.up.weight") == heights(model.plan, "1.up.weight") == [8, 8]
        assert model.plan.route("0.down.weight").family == ("other" if isinstance(rules, list) else "matrix")


def test_a_recorded_routing_is_what_a_run_goes_by(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    model = recorded(path)
    pinned = layerwise.DataParallel(gated(), rules=path)
    assert heights(pinned.plan, "0.up.weight") == heights(pinned.plan, "1.up.weight") == [8, 8]
    assert {fqn: route.matrices for fqn, route in pinned.plan.routes.items()} == {
        fqn: route.matrices for fqn, route in model.plan.routes.items()
    }
    assert [line["names"] for line in json.loads(path.read_text())["params"]] == [["*.up.weight"], ["*.down.weight"]]


def test_rules_of_the_user_come_before_a_recorded_routing_and_nothing_after_it(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    recorded(path)
    rule = layerwise.RouteRule(pattern="0.up.weight", to="matrix", split="whole")
    plan = layerwise.DataParallel(gated(), rules=[rule, path]).plan
    assert (heights(plan, "0.up.weight"), heights(plan, "1.up.weight")) == ([16], [8, 8])
    with pytest.raises(ValueError, match=re.escape("is entry 1 of 2 in rules")):
        layerwise.DataParallel(gated(), rules=[path, rule])


def test_a_recorded_routing_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "routing.json"
    recorded(path)
    with pytest.raises(
        ValueError, match=re.escape("it says nothing of '0.gate.weight', '1.gate.weight' in this shape")
    ):
        layerwise.DataParallel(gated("gate"), rules=str(path))
    with pytest.raises(ValueError, match="of which the model has more or fewer"):
        layerwise.Optimizer(nn.Sequential(Gated()), rules=str(path), **RULES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "is no recorded routing"),
        ("[[rule", "is not valid TOML"),
        ("[[rules]]", "a file of rules holds [[rule]] tables"),
    ],
)
def test_a_file_that_is_neither_rules_nor_a_recorded_routing_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "routing.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        layerwise.DataParallel(gated(), rules=str(path))


def test_rules_of_another_kind_are_refused() -> None:
    with pytest.raises(
        TypeError, match=re.escape("rules must be a list of layerwise.RouteRule, or the path of a rules file, got 3")
    ):
        layerwise.DataParallel(gated(), rules=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rules holds '', and there is no such file"):
        layerwise.DataParallel(gated(), rules="")


def test_an_optimizer_of_a_wrapped_model_takes_no_rules() -> None:
    model = layerwise.DataParallel(gated())
    with pytest.raises(ValueError, match="rules or strict were passed"):
        layerwise.Optimizer(model, rules=layerwise.trace.follow(gated(), INPUT), **RULES)

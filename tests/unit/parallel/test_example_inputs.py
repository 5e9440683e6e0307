"""A forward that is followed: it disagrees with routing, decides, or was recorded before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.errors import ConfigError
from layerwise.models.table import param_table
from layerwise.routing.evidence import DisagreementError
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


@pytest.mark.parametrize("wrapped", [True, False])
def test_routing_that_disagrees_with_the_forward_is_refused_with_both_readings(wrapped: bool) -> None:
    def build() -> object:
        if wrapped:
            return layerwise.DataParallel(gated(), example_inputs=INPUT)
        return layerwise.Optimizer(gated(), example_inputs=(INPUT,), **RULES)

    with pytest.raises(DisagreementError) as caught:
        build()
    assert str(caught.value).startswith(
        "routing and the forward read 2 params differently:\n  2 params '*.up.weight' of shape (16, 8): routing says matrix (16x8), "
        "since it is the weight of a Linear; the forward says matrix (8x8, 8x8): it is multiplied, in row blocks of 8, 8\n"
    )


def test_the_forward_decides_where_it_is_asked_to_and_steps_as_if_the_module_had_said_so() -> None:
    torch.manual_seed(0)
    model = gated()
    other = gated()
    other.load_state_dict(model.state_dict())
    traced = layerwise.Optimizer(model, example_inputs={"input": INPUT}, routing="trace", **RULES)
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


def test_rules_of_the_user_come_before_what_was_seen() -> None:
    rules = [layerwise.RouteRule(pattern="*.up.weight", to="matrix", split="whole")]
    assert heights(layerwise.DataParallel(gated(), rules=rules, example_inputs=INPUT).plan, "1.up.weight") == [16]
    model = layerwise.DataParallel(gated(), rules=rules, example_inputs=INPUT, routing="trace")
    assert heights(model.plan, "1.up.weight") == [16]
    assert model.plan.route("0.down.weight").reason.startswith("was followed in the forward: it is multiplied")


def test_a_refusal_names_the_split_that_was_seen() -> None:
    with pytest.raises(RefusedError, match=re.escape("its forward shows how: it is multiplied, in row blocks of 8, 8")):
        layerwise.DataParallel(gated("qkv"), example_inputs=INPUT)
    model = layerwise.DataParallel(gated("qkv"), example_inputs=INPUT, routing="trace")
    assert heights(model.plan, "0.qkv.weight") == [8, 8]


def test_a_recorded_routing_is_what_a_run_goes_by(tmp_path: Path) -> None:
    model = layerwise.DataParallel(gated(), example_inputs=INPUT, routing="trace")
    path = tmp_path / "routing.json"
    path.write_text(routing_to_json(model.plan.table, model.plan.routes))
    pinned = layerwise.DataParallel(gated(), routing=path)
    assert heights(pinned.plan, "0.up.weight") == heights(pinned.plan, "1.up.weight") == [8, 8]
    assert {fqn: route.matrices for fqn, route in pinned.plan.routes.items()} == {
        fqn: route.matrices for fqn, route in model.plan.routes.items()
    }
    assert [line["names"] for line in json.loads(path.read_text())["params"]] == [["*.up.weight"], ["*.down.weight"]]


def test_a_recorded_routing_of_another_model_is_refused(tmp_path: Path) -> None:
    model = layerwise.DataParallel(gated(), example_inputs=INPUT, routing="trace")
    path = tmp_path / "routing.json"
    path.write_text(routing_to_json(model.plan.table, model.plan.routes))
    with pytest.raises(
        ValueError, match=re.escape("it says nothing of '0.gate.weight', '1.gate.weight' in this shape")
    ):
        layerwise.DataParallel(gated("gate"), routing=str(path))
    with pytest.raises(ValueError, match="of which the model has more or fewer"):
        layerwise.Optimizer(nn.Sequential(Gated()), routing=str(path), **RULES)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "cannot be read as JSON"), ("{}", "is no recorded routing"), (None, "no such file")]
)
def test_a_file_that_is_no_recorded_routing_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "routing.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        layerwise.DataParallel(gated(), routing=str(path))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"routing": "trace"}, ValueError, "routing='trace' needs example_inputs"),
        ({"routing": 3}, TypeError, "routing must be 'table', 'trace' or the path"),
        ({"example_inputs": 3}, TypeError, "example_inputs must be a tensor"),
        ({"example_inputs": torch.zeros(2, 3)}, ValueError, "cannot be followed on example_inputs: RuntimeError"),
        ({"example_inputs": INPUT, "routing": "x.json"}, ValueError, "were both given"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        layerwise.DataParallel(gated(), **arguments)


def test_an_optimizer_of_a_wrapped_model_takes_neither() -> None:
    model = layerwise.DataParallel(gated())
    with pytest.raises(ValueError, match="rules, strict, example_inputs or routing were passed"):
        layerwise.Optimizer(model, example_inputs=INPUT, **RULES)


class HalfSeen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.used(x)


def test_what_was_not_seen_goes_by_its_type_and_is_named() -> None:
    with pytest.warns(UserWarning, match=re.escape("did not see what becomes of 1 params")):
        model = layerwise.DataParallel(HalfSeen(), example_inputs=INPUT, routing="trace")
    assert model.plan.route("idle.weight").reason == "is the weight of a Linear"
    assert len(param_table(HalfSeen())) == 4

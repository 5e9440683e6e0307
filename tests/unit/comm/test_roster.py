from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise.comm.groups import NO_GROUPS
from layerwise.comm.roster import Roster, _copies, _describe_ties, check_alike, cuts_of_ties
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.models.table import named_trainables
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from tests.ranks import run_ranks


def copy_of(fqn: str, shape: tuple[int, ...] = (7, 4), dtype: str = "torch.float32") -> dict[str, object]:
    return {"fqn": fqn, "shape": list(shape), "dtype": dtype}


def test_one_stage_asks_nobody_and_has_no_copies() -> None:
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
    roster = Roster.of(NO_GROUPS, [module], named_trainables(module), (), {})
    assert roster.fqns == (("0.weight", "1.weight", "1.bias"),)
    assert roster.copies == {}
    assert roster.stages_by_tie == {}
    assert roster.vocabularies == {(7, 4)}
    assert not roster.has_experts
    check_alike(NO_GROUPS, roster, "is stored", {})


def test_copies_are_found_on_the_stages_that_name_them() -> None:
    found = _copies(
        [
            {"embedding": copy_of("embed.weight")},
            {"norm": copy_of("a", (3,))},
            {"norm": copy_of("b", (3,)), "embedding": copy_of("head.weight")},
        ]
    )
    assert found == {"embedding": {0: "embed.weight", 2: "head.weight"}, "norm": {1: "a", 2: "b"}}
    roster = Roster(((), (), ()), found, frozenset(), has_experts=False)
    assert roster.stages_by_tie == {"embedding": (0, 2), "norm": (1, 2)}


WRONG: dict[str, tuple[list[dict[str, Any]], str]] = {
    "on one stage": (
        [{}, {"embedding": copy_of("embed.weight")}, {}],
        "tie 'embedding' is on stage 1 only ('embed.weight', of 3 stages): expected a copy on another one. Name it in ties= of both.",
    ),
    "another shape": (
        [{"t": copy_of("a")}, {"t": copy_of("b", (7, 5))}],
        "tie 't' has shape [7, 4] on stage 0 ('a') and [7, 5] on stage 1 ('b'): copies of one weight must be alike.",
    ),
    "another dtype on the third": (
        [{"t": copy_of("a")}, {"t": copy_of("b")}, {"t": copy_of("c", dtype="torch.bfloat16")}],
        "tie 't' has dtype torch.float32 on stage 0 ('a') and torch.bfloat16 on stage 2 ('c'): copies of one weight must be alike.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_copies_that_are_not_alike_are_named_with_their_stages(name: str) -> None:
    described, text = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(text)):
        _copies(described)


def test_a_tie_names_a_trainable_param_of_its_stage() -> None:
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4).requires_grad_(False))
    params, frozen = named_trainables(module), ["1.weight", "1.bias"]
    assert _describe_ties({"t": "0.weight"}, params, frozen) == {"t": copy_of("0.weight")}
    with pytest.raises(ValueError, match=r"tie 't' names '0\.wieght', .* Did you mean '0\.weight'\?"):
        _describe_ties({"t": "0.wieght"}, params, frozen)
    with pytest.raises(
        ValueError, match=r"tie 't' names '1\.weight', which is frozen: expected a param that is trained"
    ):
        _describe_ties({"t": "1.weight"}, params, frozen)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("flat", {"elements": "128", "shards": "{'equal': 2}"}),
        ("compact", {"elements": "30", "shards": "{'borders': [0, 0, 30]}"}),
        ("replicated", {"elements": "128", "shards": "{'copies': 2}"}),
    ],
)
def test_how_a_tied_weight_is_stored_and_routed_is_told_in_words(layout: str, expected: dict[str, str]) -> None:
    params = (
        ParamSpec(fqn="tied", shape=(6, 5), module_kind=ModuleKind.LINEAR, module_type="Linear", tie="t"),
        ParamSpec(fqn="free", shape=(6, 5), module_kind=ModuleKind.LINEAR, module_type="Linear"),
    )
    rule = RouteRule(pattern="tied", to="matrix", options={"lr": 0.5})
    plan = make_plan(ParamTable(params), Options(layout=layout, rules=[rule]), world=2)
    route = {"route": "matrix", "matrices": "[(6, 5)]", "options": "{'lr': 0.5}"}
    assert cuts_of_ties(plan) == {"t": {"layout": layout, **expected, **route}}


def rules_of_my_own(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("pp", "dp"))
    rules = [layerwise.RouteRule(pattern="weight", to="other")] if rank else None
    return layerwise.DataParallel(nn.Linear(4, 4), mesh=mesh, rules=rules).plan.routes["weight"].family


def test_stages_may_have_rules_of_their_own() -> None:
    assert run_ranks(3, rules_of_my_own) == ["matrix", "other", "other"]

"""Domains, chunks and ties as a table of params sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layerwise.models.table import (
    domains_by_prefix,
    named_buffers,
    named_params,
    named_trainables,
    param_table,
    vocabulary_shapes,
)
from layerwise.routing.spec import ModuleKind


class Experts(nn.Module):
    """Says of some of its params which ranks hold copies of them."""

    def __init__(self, declared: Any = None) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 3, 4))
        self.bias = nn.Parameter(torch.zeros(2, 3))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("counts", torch.zeros(2))
        self.declared = {"up": "expert", "bias": "expert"} if declared is None else declared

    def param_domains(self) -> Any:
        return self.declared


class Block(nn.Module):
    def __init__(self, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moe = experts or Experts()
        self.register_buffer("mask", torch.zeros(1))


def test_declared_params_are_in_the_domain_of_experts_and_others_are_dense() -> None:
    found = {param.fqn: param.domain for param in param_table(Block())}
    assert found == {
        "first.weight": "dense",
        "first.bias": "dense",
        "moe.up": "expert",
        "moe.bias": "expert",
        "moe.frozen": "dense",
    }


def test_a_module_may_declare_params_of_its_children() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def param_domains(self) -> dict[str, str]:
            return {"inner.weight": "expert"}

    table = param_table(nn.Sequential(Outer()))
    assert table.find("0.inner.weight").domain == "expert"
    assert table.find("0.inner.bias").domain == "dense"


WRONG: list[tuple[Any, type[Exception], str]] = [
    (["up"], TypeError, r"Experts\.param_domains\(\) returned list: expected a dict from param name to domain\."),
    (
        {"uq": "expert"},
        ValueError,
        r"Experts\.param_domains\(\) names 'uq', which is no param of it\. Its params: bias, frozen, up\.",
    ),
    (
        {"up": "experts"},
        ValueError,
        r"Experts\.param_domains\(\) puts 'up' into domain 'experts': expected one of 'dense', 'expert'\.",
    ),
]


@pytest.mark.parametrize(("declared", "error", "text"), WRONG)
def test_a_declaration_that_fits_nothing_is_refused_by_name(declared: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        param_table(Block(Experts(declared)))


def test_buffers_beside_experts_belong_to_their_domain_and_params_go_by_their_own_word() -> None:
    domain_of = domains_by_prefix(Block())
    assert domain_of("moe.counts") == "expert"
    assert domain_of("moe.frozen") == "dense"
    assert domain_of("mask") == "dense"
    assert domain_of("first.weight") == "dense"
    in_chunks = domains_by_prefix(nn.Linear(2, 2), Block())
    assert in_chunks("1.moe.counts") == "expert"
    assert in_chunks("0.weight") == "dense"


def test_names_of_one_module_have_no_prefix_and_those_of_chunks_their_number() -> None:
    assert [fqn for fqn, _ in named_params(nn.Linear(2, 2))] == ["weight", "bias"]
    chunks = nn.Linear(2, 2), Block()
    assert [fqn for fqn, _ in named_params(*chunks)][:3] == ["0.weight", "0.bias", "1.first.weight"]
    assert [fqn for fqn, _ in named_buffers(*chunks)] == ["1.mask", "1.moe.counts"]
    assert "1.moe.frozen" not in named_trainables(*chunks)
    table = param_table(*chunks)
    assert [(param.fqn, param.chunk) for param in table][:3] == [
        ("0.weight", 0),
        ("0.bias", 0),
        ("1.first.weight", 1),
    ]
    assert [param.fqn for param in table] == [fqn for fqn, _ in named_params(*chunks)]


def test_a_weight_that_two_chunks_share_is_one_param_of_the_first_with_both_names() -> None:
    embedding, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embedding.weight
    chunks = nn.Sequential(embedding), nn.Sequential(nn.Linear(4, 4), head)
    table = param_table(*chunks)
    shared = table.find("1.1.weight")
    assert (shared.fqn, shared.aliases, shared.chunk) == ("0.0.weight", ("1.1.weight",), 0)
    assert shared.alias_kinds == (ModuleKind.LINEAR,)
    assert [fqn for fqn, _ in named_params(*chunks)] == ["0.0.weight", "1.0.weight", "1.0.bias"]


def test_a_tie_is_in_the_table_and_only_with_the_param_it_names() -> None:
    table = param_table(nn.Linear(3, 3), ties={"shared": "weight"})
    assert [(param.fqn, param.tie) for param in table] == [("weight", "shared"), ("bias", "")]


def test_a_head_knows_an_embedding_of_another_stage_by_its_shape() -> None:
    stage = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    assert not param_table(stage).find("1.weight").maps_to_vocabulary
    elsewhere = vocabulary_shapes(nn.Sequential(nn.Embedding(7, 4)))
    assert elsewhere == {(7, 4)}
    assert param_table(stage, vocabularies=elsewhere).find("1.weight").maps_to_vocabulary

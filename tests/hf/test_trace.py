"""Following the forward of real models against routing: neither reads the other, and both say the same."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from layerwise.models.forward.parts import trace_model
from layerwise.models.forward.trace import Trace
from layerwise.models.table import param_table
from layerwise.routing.compare import compare, rules_for
from layerwise.routing.files import rules_from_toml, rules_to_toml
from layerwise.routing.readings import Role
from layerwise.routing.rules import route_params
from tests.hf.families import FAMILIES, build_family
from tests.hf.models import MODELS, build, transformers
from tests.hf.tables import GOLDEN, table_of
from tests.marks import sampled

NOT_SEEN = {
    "llava": ("model.multi_modal_projector.",),  # what joins the towers needs images among the tokens
    "idefics3": ("model.connector.",),
    "qwen2_vl": ("model.visual.merger.mlp.2.",),
    "xlnet": ("transformer.layer.", "transformer.mask_emb"),  # relative segments, which one text does not have
    "wav2vec2": (),
}
"""Params that their inputs do not reach, by the beginning of their names."""
QUICK = ("gpt2", "falcon", "qwen3_moe", "deepseek_v3", "mamba2", "t5", "clip")
QUICK_FAMILIES = ("lfm2", "diffllama", "deberta", "jetmoe", "speech_to_text")


@cache
def model(name: str) -> nn.Module:
    return build(name) if name in MODELS else build_family(name)


@cache
def followed(name: str) -> Trace:
    return trace_model(model(name))


@pytest.mark.parametrize("name", sampled([*MODELS, *FAMILIES], *QUICK, *QUICK_FAMILIES))
def test_the_forward_shows_what_routing_says(name: str) -> None:
    table, found = param_table(model(name)), followed(name)
    assert found.problem == ""
    assert not [item.sentence for item in compare(table, route_params(table), found.readings)]
    unseen = [fqn for fqn, reading in found.readings.items() if reading.role is Role.UNSEEN]
    assert not [fqn for fqn in unseen if not fqn.startswith(NOT_SEEN.get(name, ()) or ("-",))]


@pytest.mark.parametrize("name", sampled(FAMILIES, *QUICK_FAMILIES))
def test_the_golden_table_of_a_family_holds(name: str) -> None:
    assert table_of(model(name)) == (GOLDEN / f"{name}.txt").read_text(), (
        "python -m tests.hf.update, then read the diff"
    )


def test_a_wrong_table_is_caught() -> None:
    """A control: a table that takes a fused weight for one matrix, an expert for another, and a router for a map."""
    table = param_table(model("qwen3_moe"))
    wrong = type(table)(
        tuple(
            replace(
                param,
                split=None,
                routes_to=0,
                module_type="Linear" if "gate.weight" in param.fqn else param.module_type,
            )
            for param in table
        )
    )
    routes = {}
    for param in wrong:
        bare = replace(param, looks_fused="")
        routes.update(route_params(type(table)((bare,))))
    caught = {item.param.fqn for item in compare(wrong, routes, followed("qwen3_moe").readings)}
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.gate.weight"} <= caught
    assert "model.layers.1.self_attn.q_proj.weight" not in caught


def test_rules_from_a_trace_make_routing_say_what_was_seen() -> None:
    table = param_table(model("gpt_neox"))
    blind = type(table)(tuple(replace(param, split=None, looks_fused="") for param in table))
    readings = followed("gpt_neox").readings
    differ = compare(blind, route_params(blind), readings)
    assert {item.param.fqn for item in differ} == {
        f"gpt_neox.layers.{n}.attention.query_key_value.weight" for n in range(2)
    }
    rules = rules_from_toml(rules_to_toml(rules_for(differ)), "rules.toml")
    assert len(rules) == 1
    told, known = route_params(blind, rules), route_params(table)
    assert all(told[fqn].matrices == known[fqn].matrices for fqn in known)


@pytest.mark.slow
def test_one_block_of_an_8b_model_takes_less_than_three_seconds() -> None:
    config = transformers.LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        large = transformers.LlamaForCausalLM(config)
    trace_model(model("gpt2"))  # imports are not the trace's
    started = time.process_time()
    found = trace_model(large)
    assert time.process_time() - started < 3
    assert found.readings["model.layers.31.mlp.down_proj.weight"].role is Role.MAP

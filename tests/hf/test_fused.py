"""Fused weights are split as the model's own forward splits them: what its code path hands on (queries, keys, gates ...)
equals what each of our logical matrices makes of the same input, in the same order."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layerwise.models.table import param_table
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import route_params
from tests.hf.models import build, transformers

BATCH, SEQUENCE = 2, 5


def cut(weight: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """A logical matrix, (out, in), taken out of its weight by its box."""
    window = tuple(slice(a, b) for a, b in zip(matrix.box.starts, matrix.box.stops, strict=True))
    found = weight.reshape(matrix.grid)[window].reshape(matrix.rows, matrix.cols)
    return found.T if matrix.transposed else found


class Model:
    """A small model on the CPU with weights large enough to tell apart, and the matrices of its params."""

    def __init__(self, name: str, **settings: object) -> None:
        self.module = build(name, "cpu").eval()
        for setting, value in settings.items():
            setattr(self.module.config, setting, value)
        torch.manual_seed(1)
        with torch.no_grad():
            for param in self.module.parameters():
                param.normal_() if param.ndim > 1 else param.zero_()
            for fqn, param in self.module.named_parameters():
                if "norm" in fqn and fqn.endswith("weight"):
                    param.fill_(1.0)
        self.routes = route_params(param_table(self.module))
        self.width: int = self.module.config.hidden_size

    def matrices(self, fqn: str) -> list[torch.Tensor]:
        weight = self.module.get_parameter(fqn).detach()
        return [cut(weight, matrix) for matrix in self.routes[fqn].matrices]

    def input(self) -> torch.Tensor:
        return torch.randn(BATCH, SEQUENCE, self.width)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def joined(heads: torch.Tensor) -> torch.Tensor:
    """(batch, heads, sequence, dim) -> (batch, sequence, heads * dim)."""
    return heads.transpose(1, 2).flatten(2)


@pytest.fixture
def attended() -> list[torch.Tensor]:
    """Query, key and value as they enter attention, in models that ask transformers for its attention function."""
    seen: list[torch.Tensor] = []

    def record(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        seen.extend((query, key, value))
        repeated = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return repeated.transpose(1, 2), None

    transformers.AttentionInterface.register("record", record)
    return seen


def unrotated(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a rotation that does nothing, so that queries arrive as they were projected."""
    return torch.ones(BATCH, SEQUENCE, dim), torch.zeros(BATCH, SEQUENCE, dim)


def test_gpt2_splits_columns_of_a_transposed_weight(attended: list[torch.Tensor]) -> None:
    model = Model("gpt2", _attn_implementation="record")
    x = model.input()
    model.module.get_submodule("transformer.h.0.attn")(x)
    expected = [x @ matrix.T for matrix in model.matrices("transformer.h.0.attn.c_attn.weight")]
    assert_same([joined(part) for part in attended], expected)


def test_every_conv1d_is_a_linear_layer_of_its_transposed_weight() -> None:
    model = Model("gpt2")
    x = model.input()
    (matrix,) = model.matrices("transformer.h.0.mlp.c_fc.weight")
    assert matrix.shape == (52, 24)
    assert_same([model.module.get_submodule("transformer.h.0.mlp.c_fc")(x)], [x @ matrix.T])


def test_gpt_neox_splits_head_by_head(attended: list[torch.Tensor]) -> None:
    model = Model("gpt_neox", _attn_implementation="record")
    x = model.input()
    attention = model.module.get_submodule("gpt_neox.layers.0.attention")
    attention(x, None, position_embeddings=unrotated(attention.rotary_ndims))
    expected = [x @ matrix.T for matrix in model.matrices("gpt_neox.layers.0.attention.query_key_value.weight")]
    assert_same([joined(part) for part in attended], expected)


def test_phi3_splits_unequal_row_blocks(attended: list[torch.Tensor]) -> None:
    model = Model("phi3", _attn_implementation="record")
    x = model.input()
    attention = model.module.get_submodule("model.layers.0.self_attn")
    attention(x, position_embeddings=unrotated(attention.head_dim), attention_mask=None)
    expected = [x @ matrix.T for matrix in model.matrices("model.layers.0.self_attn.qkv_proj.weight")]
    assert_same([joined(part) for part in attended], expected)


class Recorder(nn.Module):
    """Stands in for an activation: keeps what it is given and lets the other factor through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return torch.ones_like(x)


def test_phi3_splits_gate_and_up_in_halves() -> None:
    model = Model("phi3")
    x = model.input()
    mlp = model.module.get_submodule("model.layers.0.mlp")
    mlp.activation_fn = gate = Recorder()
    ups: list[torch.Tensor] = []
    mlp.down_proj.register_forward_pre_hook(lambda _, inputs: ups.append(inputs[0]))
    mlp(x)
    expected = [x @ matrix.T for matrix in model.matrices("model.layers.0.mlp.gate_up_proj.weight")]
    assert_same([*gate.seen, *ups], expected)


def by_group(repeated: torch.Tensor, groups: int) -> torch.Tensor:
    """One of the equal copies that Falcon makes of each key for the queries of its group."""
    found = repeated.unflatten(2, (groups, -1))
    assert torch.equal(found, found[:, :, :, :1].expand_as(found))
    return found[:, :, :, 0]


@pytest.mark.parametrize(("name", "groups"), [("falcon", 2), ("falcon_multi_query", 1), ("falcon_per_head", 6)])
def test_falcon_splits_each_of_its_layouts(name: str, groups: int) -> None:
    model = Model(name)
    x = model.input()
    attention = model.module.get_submodule("transformer.h.0.self_attention")
    query, key, value = attention._split_heads(attention.query_key_value(x))
    found = [query, by_group(key, groups), by_group(value, groups)]
    expected = [x @ matrix.T for matrix in model.matrices("transformer.h.0.self_attention.query_key_value.weight")]
    assert_same([part.flatten(2) for part in found], expected)


def test_bloom_splits_head_by_head() -> None:
    model = Model("bloom")
    x = model.input()
    attention = model.module.get_submodule("transformer.h.0.self_attention")
    found = attention._reshape(attention.query_key_value(x))
    expected = [x @ matrix.T for matrix in model.matrices("transformer.h.0.self_attention.query_key_value.weight")]
    assert_same([joined(part) for part in found], expected)


EXPERTS = [
    ("qwen3_moe", "model.layers.1.mlp.experts"),
    ("mixtral", "model.layers.0.mlp.experts"),
    ("deepseek_v3", "model.layers.1.mlp.experts"),
    ("jamba", "model.layers.1.feed_forward.experts"),
]


@pytest.mark.parametrize(("name", "prefix"), EXPERTS)
def test_experts_split_gate_and_up_in_halves_of_each_expert(name: str, prefix: str) -> None:
    model = Model(name, _experts_implementation="eager")
    experts = model.module.get_submodule(prefix)
    gate_up, down = model.matrices(f"{prefix}.gate_up_proj"), model.matrices(f"{prefix}.down_proj")
    tokens = torch.randn(3, model.width)
    for index in range(experts.num_experts):
        experts.act_fn = gate = Recorder()
        output = experts(tokens, torch.full((3, 1), index), torch.ones(3, 1))
        up = tokens @ gate_up[2 * index + 1].T
        assert_same([*gate.seen, output], [tokens @ gate_up[2 * index].T, up @ down[index].T])


def test_gpt_oss_experts_take_turns_and_are_stored_transposed() -> None:
    model = Model("gpt_oss", _experts_implementation="eager")
    prefix = "model.layers.0.mlp.experts"
    experts = model.module.get_submodule(prefix)
    nn.init.zeros_(experts.gate_up_proj_bias)
    nn.init.zeros_(experts.down_proj_bias)
    gate_up, down = model.matrices(f"{prefix}.gate_up_proj"), model.matrices(f"{prefix}.down_proj")
    tokens = torch.randn(3, model.width)
    for index in range(experts.num_experts):
        gate, up = (tokens @ matrix.T for matrix in gate_up[2 * index : 2 * index + 2])
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        expected = ((up + 1) * gate * torch.sigmoid(gate * experts.alpha)) @ down[index].T
        assert_same([experts(tokens, torch.full((3, 1), index), torch.ones(3, 1))], [expected])


def test_deepseek_splits_the_latent_from_the_rotary_key_and_keys_from_values(attended: list[torch.Tensor]) -> None:
    model = Model("deepseek_v3", _attn_implementation="record", rope_interleave=False)
    x = model.input()
    prefix = "model.layers.0.self_attn"
    attention = model.module.get_submodule(prefix)
    latents: list[torch.Tensor] = []
    attention.kv_a_layernorm.register_forward_pre_hook(lambda _, inputs: latents.append(inputs[0]))
    attention(x, unrotated(attention.qk_rope_head_dim), None)
    query, key, value = attended
    nope, rotary = key.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=-1)
    down = [x @ matrix.T for matrix in model.matrices(f"{prefix}.kv_a_proj_with_mqa.weight")]
    assert_same([latents[0], rotary[:, 0]], down)
    latent = attention.kv_a_layernorm(down[0])
    expected = [latent @ matrix.T for matrix in model.matrices(f"{prefix}.kv_b_proj.weight")]
    assert_same([joined(nope), joined(value)], expected)
    (whole_query,) = model.matrices(f"{prefix}.q_b_proj.weight")
    assert_same([joined(query)], [attention.q_a_layernorm(attention.q_a_proj(x)) @ whole_query.T])


def modeling(name: str) -> ModuleType:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def passed_through(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    """Stands in for the depth-wise convolution."""
    return x


def recording(seen: dict[str, Any], names: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    """Stands in for a scan: keeps its arguments by name and returns the first."""

    def scan(*arguments: torch.Tensor, **more: object) -> torch.Tensor:
        seen.update(zip(names, arguments, strict=True), **more)
        return arguments[0]

    return scan


def test_mamba2_splits_gate_input_b_c_and_time_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("mamba2")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(modeling("mamba2"), "causal_conv1d_fn", passed_through)
    monkeypatch.setattr(modeling("mamba2"), "mamba2_chunk_scan", recording(seen, ("x", "dt", "A", "B", "C")))
    mixer = model.module.get_submodule("backbone.layers.0.mixer")
    mixer.norm.register_forward_pre_hook(lambda _, inputs: seen.update(gate=inputs[1]))
    x = model.input()
    mixer(x)
    found = [seen["gate"], seen["x"].flatten(2), seen["B"].flatten(2), seen["C"].flatten(2), seen["dt"]]
    assert_same(found, [x @ matrix.T for matrix in model.matrices("backbone.layers.0.mixer.in_proj.weight")])


def test_jamba_splits_input_from_gate_and_the_time_step_from_b_and_c(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("jamba")
    seen: dict[str, Any] = {}
    monkeypatch.setattr(modeling("jamba"), "causal_conv1d_fn", passed_through)
    monkeypatch.setattr(modeling("jamba"), "mamba_selective_scan", recording(seen, ("x", "dt", "A", "B", "C")))
    mixer = model.module.get_submodule("model.layers.0.mamba")
    selected: list[torch.Tensor] = []
    for norm in (mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm):
        norm.register_forward_pre_hook(lambda _, inputs: selected.append(inputs[0]))
    x = model.input()
    mixer(x)
    hidden, gate = (x @ matrix.T for matrix in model.matrices("model.layers.0.mamba.in_proj.weight"))
    assert_same([seen["x"].transpose(1, 2), seen["z"].transpose(1, 2)], [hidden, gate])
    assert_same(selected, [hidden @ matrix.T for matrix in model.matrices("model.layers.0.mamba.x_proj.weight")])


def test_a_split_along_the_wrong_order_is_caught() -> None:
    """A control: Bloom's weight cut into thirds is not what its forward does."""
    model = Model("bloom")
    x = model.input()
    attention = model.module.get_submodule("transformer.h.0.self_attention")
    found = attention._reshape(attention.query_key_value(x))
    thirds = attention.query_key_value.weight.detach().chunk(3)
    with pytest.raises(AssertionError):
        assert_same([joined(part) for part in found], [F.linear(x, third) for third in thirds])

"""Splits of classes known by name, without their library; tests/hf checks them against the real ones."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layerwise.models.known.classes import is_transposed_linear, known_splits
from layerwise.models.splits import fused_name
from layerwise.models.table import param_table
from layerwise.routing.rules import Route, RouteRule, route_params
from layerwise.routing.split import Split, interleaved_rows, row_blocks, stack, transposed


def class_named(name: str, **children: nn.Module) -> nn.Module:
    """A module of a class of that name."""
    module: nn.Module = type(name, (nn.Module,), {})()
    for child, layer in children.items():
        module.add_module(child, layer)
    return module


class Conv1D(nn.Module):
    """Like the one of transformers: a linear layer that stores (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))


def routes(module: nn.Module) -> dict[str, Route]:
    return route_params(param_table(module))


def test_torchtitans_fused_linear_is_groups_of_queries_each_with_its_key_and_value() -> None:
    fused = class_named("FusedQKVLinear", wqkv=nn.Linear(6, 2 * (3 + 2) * 4, bias=False))
    fused.heads_per_kv, fused.r_dim, fused.head_dim = 3, 5, 4  # type: ignore[assignment]
    split = known_splits(fused)["wqkv.weight"]
    assert split == interleaved_rows((40, 6), 2, (12, 4, 4))
    route = routes(nn.ModuleDict({"qkv": fused}))["qkv.wqkv.weight"]
    assert route.family == "matrix"
    assert [(matrix.rows, matrix.cols) for matrix in route.matrices] == [(24, 6), (8, 6), (8, 6)]
    with pytest.raises(ValueError, match="FusedQKVLinear is the name of a class whose fused weights are known, but"):
        known_splits(class_named("FusedQKVLinear", wqkv=nn.Linear(6, 40)))


def test_torch_attention_is_query_key_and_value_one_after_the_other() -> None:
    attention = nn.MultiheadAttention(6, 2, bias=False)
    split = known_splits(attention)["in_proj_weight"]
    assert split == row_blocks((18, 6), (6, 6, 6))
    query, key, value = attention.in_proj_weight.detach().split(split.blocks)
    x = torch.randn(5, 1, 6)
    apart, _ = F.multi_head_attention_forward(
        x, x, x, 6, 2, None, None, None, None, False, 0.0, attention.out_proj.weight, None,
        use_separate_proj_weight=True, q_proj_weight=query, k_proj_weight=key, v_proj_weight=value,
    )  # fmt: skip
    torch.testing.assert_close(attention(x, x, x)[0], apart)


def test_torch_attention_is_not_left_to_a_fallback() -> None:
    table = param_table(nn.MultiheadAttention(6, 2))
    assert len(route_params(table, strict=True)["in_proj_weight"].matrices) == 3


def test_torch_attention_of_unequal_widths_has_three_weights_and_its_biases_are_none() -> None:
    attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, add_bias_kv=True)
    found = route_params(param_table(attention), strict=True)
    assert {fqn for fqn, route in found.items() if route.family == "matrix"} == {
        "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight",
    }  # fmt: skip


def test_a_class_that_nobody_knows_has_no_splits() -> None:
    assert known_splits(nn.Linear(3, 4)) == {}


def test_subclasses_of_a_known_class_split_like_it() -> None:
    class Special(nn.MultiheadAttention):
        pass

    assert known_splits(Special(6, 2)) == {"in_proj_weight": row_blocks((18, 6), (6, 6, 6))}


def test_cross_attention_of_gpt2_is_key_and_value() -> None:
    attention = class_named("GPT2Attention", c_attn=Conv1D(8, 4), q_attn=Conv1D(4, 4))
    attention.embed_dim = 4
    found = routes(nn.ModuleList([attention]))
    assert found["0.c_attn.weight"].reason.endswith("in row blocks of 4, 4, stored transposed")
    assert found["0.q_attn.weight"].reason == "is the weight of a Conv1D, stored transposed"


def test_a_transposed_weight_with_a_fused_name_still_needs_someone_to_explain_it() -> None:
    with pytest.raises(ValueError, match=re.escape("looks fused ('c_attn'), and more than one reading fits")):
        routes(class_named("Odd", c_attn=Conv1D(12, 4)))


@pytest.mark.parametrize(
    ("is_transposed", "is_concatenated", "shape", "split"),
    [
        (False, True, (3, 8, 5), stack((3, 8, 5), sizes=(4, 4))),
        (True, True, (3, 5, 8), stack((3, 5, 8), transposed=True, sizes=(4, 4))),
        (False, False, (3, 8, 5), Split(grid=(3, 4, 2, 5), roles="arac")),
        (True, False, (3, 5, 8), Split(grid=(3, 5, 4, 2), roles="acra")),
    ],
)
def test_experts_are_split_as_they_say_they_are_stored(
    is_transposed: bool, is_concatenated: bool, shape: tuple[int, ...], split: Split
) -> None:
    experts = class_named("SomeExperts")
    experts.is_transposed, experts.is_concatenated = is_transposed, is_concatenated
    experts.gate_up_proj = nn.Parameter(torch.empty(shape))
    assert known_splits(experts) == {"gate_up_proj": split}


def test_experts_that_do_not_say_how_they_are_stored_are_refused() -> None:
    experts = class_named("SomeExperts")
    experts.gate_up_proj = nn.Parameter(torch.empty(3, 8, 5))
    with pytest.raises(ValueError, match=re.escape("looks fused ('gate_up_proj'), and more than one reading fits")):
        routes(experts)


def test_a_class_of_a_known_name_that_does_not_fit_is_refused_in_words() -> None:
    mixer = class_named("Mamba2Mixer", in_proj=nn.Linear(4, 9))
    expected = (
        "Mamba2Mixer is the name of a class whose fused weights are known, but this module does not fit: neither it nor "
        "its config has 'intermediate_size'. Give it a method matrix_splits() that says how they split."
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        routes(mixer)


def test_the_rules_of_the_user_come_before_what_does_not_fit() -> None:
    mixer = class_named("Mamba2Mixer", in_proj=nn.Linear(4, 9))
    found = route_params(param_table(mixer), [RouteRule(pattern="in_proj.weight", to="matrix", row_blocks=(4, 5))])
    assert [matrix.rows for matrix in found["in_proj.weight"].matrices] == [4, 5]


def test_latent_attention_without_a_rotary_part_has_one_block_less() -> None:
    attention = class_named("SomeAttention", kv_a_proj_with_mqa=nn.Linear(8, 6), kv_b_proj=nn.Linear(6, 18))
    attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim, attention.v_head_dim = 6, 0, 4, 5
    found = known_splits(attention)
    assert found["kv_a_proj_with_mqa.weight"] == row_blocks((6, 8), (6,))
    assert found["kv_b_proj.weight"] == interleaved_rows((18, 6), 2, (4, 5))


@pytest.mark.parametrize(
    ("layer", "gates"),
    [(nn.LSTM(5, 4, num_layers=2, proj_size=3, bidirectional=True), 4), (nn.GRU(5, 4), 3), (nn.LSTMCell(5, 4), 4)],
)
def test_the_gates_of_recurrent_layers_are_matrices_of_their_own(layer: nn.Module, gates: int) -> None:
    found = route_params(param_table(layer), strict=True)
    for fqn, route in found.items():
        if fqn.startswith(("weight_ih", "weight_hh")):
            assert [matrix.rows for matrix in route.matrices] == [4] * gates
        elif fqn.startswith("weight_hr"):
            assert len(route.matrices) == 1
        else:
            assert route.family == "other"


def test_a_gate_that_holds_its_layer_is_a_router_beside_experts() -> None:
    gate = class_named("SomeGate", wg=nn.Linear(6, 4, bias=False))
    experts = class_named("SomeGroupedExperts")
    experts.down = nn.Parameter(torch.empty(4, 6, 5))
    found = routes(class_named("Mlp", gate=gate, experts=experts))
    assert found["gate.wg.weight"].reason.startswith("is a router that chooses among 4 experts")


def test_a_parametrized_module_is_known_as_what_it_was() -> None:
    layer = torch.nn.utils.parametrizations.spectral_norm(Conv1D(12, 4))
    assert is_transposed_linear(layer)
    found = routes(nn.ModuleDict({"c_fc": layer}))["c_fc.parametrizations.weight.original"]
    assert found.reason == "is the weight of a Conv1D, stored transposed"


def test_experts_one_below_the_other_are_matrices_apart() -> None:
    experts = class_named("DbrxExpertGLU")
    experts.moe_num_experts = 3
    for name in ("w1", "v1", "w2"):
        setattr(experts, name, nn.Parameter(torch.empty(12, 5)))
    found = routes(experts)
    assert [matrix.logical_shape for matrix in found["w1"].matrices] == [(4, 5)] * 3
    assert [matrix.logical_shape for matrix in found["w2"].matrices] == [(5, 4)] * 3


def neox_attention(bias: bool = False) -> nn.Module:
    attention = class_named("GPTNeoXAttention", query_key_value=nn.Linear(6, 18, bias=bias))
    attention.head_size = 3
    return attention


def test_the_word_of_the_user_counts_more_than_what_is_known() -> None:
    attention = neox_attention()
    type(attention).matrix_splits = lambda self: {"query_key_value.weight": (12, 6)}
    assert param_table(attention).find("query_key_value.weight").split == row_blocks((18, 6), (12, 6))


def test_a_projection_that_an_adapter_has_wrapped_is_still_known() -> None:
    attention = neox_attention()
    wrapped = class_named("LoraLinear", base_layer=attention.query_key_value)
    attention.query_key_value = wrapped
    split = param_table(attention).find("query_key_value.base_layer.weight").split
    assert split == interleaved_rows((18, 6), 2, (3, 3, 3))


def test_frozen_projections_need_not_fit() -> None:
    """Quantised weights have shapes of their own."""
    attention = neox_attention().requires_grad_(False)
    attention.query_key_value.weight = nn.Parameter(torch.zeros(54, 1, dtype=torch.uint8), requires_grad=False)
    assert known_splits(attention) == {}
    assert routes(attention)["query_key_value.weight"].family == "frozen"


def test_conv1d_is_known_by_its_storage_not_by_its_name_alone() -> None:
    layer = Conv1D(4, 6)
    assert param_table(nn.ModuleDict({"fc": layer})).find("fc.weight").split == transposed((6, 4))
    layer.weight = nn.Parameter(torch.empty(4, 6))
    assert param_table(nn.ModuleDict({"fc": layer})).find("fc.weight").split is None


def subsampler() -> nn.Module:
    return class_named("Conv1dSubsampler", conv_layers=nn.ModuleList([nn.Conv1d(5, 16, 3), nn.Conv1d(8, 12, 3)]))


def test_convolutions_with_gates_are_two_matrices() -> None:
    pointwise = {
        "pointwise_conv1": nn.Conv1d(8, 16, 1),
        "pointwise_conv2": nn.Conv1d(8, 8, 1),
    }  # as conformers have them
    found = known_splits(class_named("GatedConvolutionModule", **pointwise))
    assert {name: split.blocks for name, split in found.items()} == {"pointwise_conv1.weight": (8, 8)}
    found = known_splits(subsampler())
    assert {name: split.blocks for name, split in found.items()} == {
        "conv_layers.0.weight": (8, 8),
        "conv_layers.1.weight": (6, 6),
    }


def test_frozen_projections_further_in_are_not_looked_at() -> None:
    assert known_splits(subsampler().requires_grad_(False)) == {}


def test_a_vision_attention_that_is_called_just_that_is_known_by_what_it_holds() -> None:
    attention = class_named("VisionAttention", qkv=nn.Linear(4, 12))
    with pytest.raises(ValueError, match="looks fused"):
        routes(attention)
    attention.dim, attention.num_key_value_groups = 4, 1
    assert known_splits(attention) == {"qkv.weight": row_blocks((12, 4), (4, 4, 4))}


def test_rows_of_all_layers_are_a_matrix_for_each() -> None:
    module = class_named("EmbeddingGemma2TextPLE", per_layer_model_projection=nn.Linear(5, 12))
    module.hidden_size_per_layer_input = 4
    assert known_splits(module) == {"per_layer_model_projection.weight": row_blocks((12, 5), (4, 4, 4))}


def test_kernels_that_are_predicted_are_those_of_each_layer() -> None:
    convs = {"kernel_conv": nn.Conv1d(3, 24, 3), "bias_conv": nn.Conv1d(3, 8, 3)}
    module = class_named("UnivNetKernelPredictor", **convs)
    module.conv_layers = 2
    assert known_splits(module) == {
        "kernel_conv.weight": row_blocks((24, 3, 3), (12, 12)),
        "bias_conv.weight": row_blocks((8, 3, 3), (4, 4)),
    }


def test_pairs_that_are_added_to_gate_and_up_are_halves_like_them() -> None:
    module = class_named("Zamba2MLP", gate_up_proj=nn.Linear(4, 12))
    pair = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 12))
    module.gate_up_proj_adapter_list = nn.ModuleList([nn.Identity(), pair])
    assert known_splits(module) == {
        "gate_up_proj.weight": row_blocks((12, 4), (6, 6)),
        "gate_up_proj_adapter_list.1.1.weight": row_blocks((12, 2), (6, 6)),
    }


FUSED = [
    "qkv", "qkv_proj", "to_qkv", "Wqkv", "wqkv", "in_proj_qkvz", "linear_qkv", "attn_qkv", "fused_qkv", "qkv_fused", "mixed_qkv", "fc_qkv",
    "query_key_value", "key_value", "kv", "to_kv", "linear_kv", "kv_a_proj_with_mqa", "kv_b_proj", "wkv_a", "W_pack", "c_attn",
    "in_proj_weight", "gate_up", "gate_up_proj", "fused_gate_up", "gate_and_up", "w13",
]  # fmt: skip
ONE = [
    "q_proj", "k_proj", "key", "value", "gate", "up_proj", "kv_down", "kv_norm", "kv_a", "wkv", "q_up", "attn_gate", "proj_up_gate", "rwkv",
    "gated_update", "upper", "to_out", "in_proj",
]  # fmt: skip


@pytest.mark.parametrize(("names", "is_fused"), [(FUSED, True), (ONE, False)])
def test_a_name_says_that_a_weight_is_several_in_one(names: list[str], is_fused: bool) -> None:
    for name in names:
        for fqn in (f"blocks.0.{name}.weight", f"blocks.0.{name}.0.weight", f"blocks.0.{name}.base_layer.weight"):
            assert fused_name(fqn) == (name if is_fused else ""), fqn

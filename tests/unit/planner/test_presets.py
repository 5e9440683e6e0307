import re
from collections import Counter

import pytest

from layerwise.dtypes import DType
from layerwise.planner.decoder import EXPERT_DOMAIN
from layerwise.planner.presets import PRESETS, preset
from layerwise.routing.rules import route_params
from layerwise.routing.spec import ParamTable


def matrix_shapes(table: ParamTable, domain: str = "dense") -> Counter[tuple[int, int]]:
    """How many matrices of each shape the default rules find."""
    routes = route_params(table)
    return Counter(
        (matrix.rows, matrix.cols) for param in table if param.domain == domain for matrix in routes[param.fqn].matrices
    )


@pytest.mark.parametrize(
    ("name", "numel"),
    [
        ("gpt2", 124_439_808),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v3", 671_026_419_200),
        ("kimi-k2", 1_026_408_232_448),
    ],
)
def test_a_preset_has_as_many_elements_as_the_published_model(name: str, numel: int) -> None:
    assert sum(param.numel for param in preset(name)) == numel


def test_every_preset_is_tested() -> None:
    assert PRESETS == (
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
        "deepseek-v3",
        "kimi-k2",
        "gpt2",
    )


@pytest.mark.parametrize("name", PRESETS)
def test_embeddings_heads_routers_norms_and_biases_are_no_matrices(name: str) -> None:
    table = preset(name)
    routes = route_params(table)
    others = {param.fqn for param in table if routes[param.fqn].family == "other"}
    tables_and_heads = {
        param.fqn
        for param in table
        if param.fqn in others and len(param.shape) == 2 and not param.fqn.endswith(".gate.weight")
    }
    expected = {"gpt2": {"transformer.wte.weight", "transformer.wpe.weight"}}
    assert tables_and_heads == expected.get(name, {"model.embed_tokens.weight", "lm_head.weight"})
    assert all(param.fqn in others or not param.trainable for param in table if len(param.shape) == 1)


def test_llama_8b_has_the_matrices_of_its_model_card() -> None:
    assert matrix_shapes(preset("llama3-8b")) == {
        (4096, 4096): 64,  # Q and O
        (1024, 4096): 64,  # K and V
        (14336, 4096): 64,  # gate and up
        (4096, 14336): 32,
    }


def test_llama_70b_has_the_matrices_of_its_model_card() -> None:
    assert matrix_shapes(preset("llama3-70b")) == {
        (8192, 8192): 160,
        (1024, 8192): 160,
        (28672, 8192): 160,
        (8192, 28672): 80,
    }


def test_llama_405b_has_the_matrices_of_its_model_card() -> None:
    assert matrix_shapes(preset("llama3-405b")) == {
        (16384, 16384): 252,
        (1024, 16384): 252,
        (53248, 16384): 252,
        (16384, 53248): 126,
    }


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "expert"), [("qwen3-30b-a3b", 48, 2048, 768), ("qwen3-235b-a22b", 94, 4096, 1536)]
)
def test_qwen3_has_heads_wider_than_its_hidden_size_and_experts_in_every_layer(
    name: str, layers: int, hidden: int, expert: int
) -> None:
    table = preset(name, expert_parallel=8)
    query = 2 * hidden
    assert matrix_shapes(table) == {(query, hidden): layers, (512, hidden): 2 * layers, (hidden, query): layers}
    assert matrix_shapes(table, EXPERT_DOMAIN) == {(expert, hidden): layers * 16 * 2, (hidden, expert): layers * 16}
    norms = [param.shape for param in table if param.fqn.endswith(("q_norm.weight", "k_norm.weight"))]
    assert norms == [(128,)] * 2 * layers, "one scale for all heads"
    assert not [param.fqn for param in table if param.fqn.endswith("bias")]


def test_deepseek_v3_has_latent_attention_three_dense_layers_and_a_shared_expert() -> None:
    table = preset("deepseek-v3", expert_parallel=32)
    assert matrix_shapes(table) == {
        (1536, 7168): 61,
        (24576, 1536): 61,
        (576, 7168): 61,
        (32768, 512): 61,
        (7168, 16384): 61,
        (18432, 7168): 6,
        (7168, 18432): 3,
        (2048, 7168): 116,
        (7168, 2048): 58,
    }
    assert matrix_shapes(table, EXPERT_DOMAIN) == {(2048, 7168): 58 * 8 * 2, (7168, 2048): 58 * 8}


def test_kimi_k2_has_half_the_heads_and_384_experts() -> None:
    table = preset("kimi-k2", expert_parallel=16)
    dense = matrix_shapes(table)
    assert (dense[12288, 1536], dense[16384, 512], dense[7168, 8192]) == (61, 61, 61)
    assert (384, 7168) not in dense, "routers are no matrices"
    assert matrix_shapes(table, EXPERT_DOMAIN) == {(2048, 7168): 60 * 24 * 2, (7168, 2048): 60 * 24}


def test_gpt2_ties_its_head_to_its_embedding() -> None:
    table = preset("gpt2")
    assert table.find("lm_head.weight") is table.find("transformer.wte.weight")
    reason = route_params(table)["transformer.wte.weight"].reason
    assert reason.startswith("is an embedding table (Embedding, tied to 'lm_head.weight')")
    assert matrix_shapes(table) == {(768, 768): 48, (3072, 768): 12, (768, 3072): 12}


def test_experts_have_a_domain_of_their_own_only_where_they_are_parallel() -> None:
    assert {param.domain for param in preset("deepseek-v3")} == {"dense"}
    split = preset("deepseek-v3", expert_parallel=64)
    assert {param.fqn.split(".")[-1] for param in split if param.domain == EXPERT_DOMAIN} == {"w1", "w2", "w3"}
    assert split.find("model.layers.3.mlp.experts.w1").shape == (4, 2048, 7168)


def test_the_bias_that_balances_experts_is_frozen() -> None:
    routes = route_params(preset("deepseek-v3", expert_parallel=256))
    assert [fqn for fqn, route in routes.items() if route.family == "frozen"] == [
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in range(3, 61)
    ]


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP32])
def test_every_param_has_the_dtype_asked_for(dtype: DType) -> None:
    assert {param.dtype for param in preset("gpt2", dtype=dtype)} == {dtype}


@pytest.mark.parametrize(
    ("name", "expert_parallel", "expected"),
    [
        ("lama3-8b", 1, "preset 'lama3-8b' is unknown. Did you mean 'llama3-8b'?"),
        (
            "mixtral",
            1,
            "preset 'mixtral' is unknown. Known: deepseek-v3, gpt2, kimi-k2, llama3-405b, llama3-70b, llama3-8b, "
            "qwen3-235b-a22b, qwen3-30b-a3b.",
        ),
        ("gpt2", 0, "expert_parallel must be at least 1, got 0."),
        ("gpt2", 2, "preset 'gpt2' has no experts: expert_parallel must be 1, got 2."),
        ("kimi-k2", 7, "preset 'kimi-k2' has 384 routed experts: expert_parallel must divide them, got 7."),
    ],
)
def test_a_preset_that_cannot_be_says_why(name: str, expert_parallel: int, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        preset(name, expert_parallel=expert_parallel)

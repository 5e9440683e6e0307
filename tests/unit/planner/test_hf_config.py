"""Tables made of a config alone: against the totals of published models, and against the golden tables of live ones."""

import re
from pathlib import Path

import pytest

from layerwise.dtypes import DType
from layerwise.planner.hf_config import MODEL_TYPES, UnknownFamilyError, hf_table
from layerwise.planner.presets import preset
from layerwise.routing.rules import route_params
from layerwise.routing.spec import ParamTable

GOLDEN = Path(__file__).parents[2] / "golden" / "routes"

Config = dict[str, object]


def sizes(model_type: str, hidden: int, inner: int, layers: int, heads: tuple[int, int], vocab: int) -> Config:
    """The keys that nearly every config has."""
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
    }


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
DEEPSEEK_V3: Config = {
    **sizes("deepseek_v3", 7168, 18432, 61, (128, 128), 129280), **LATENT, "q_lora_rank": 1536,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "first_k_dense_replace": 3,
    "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
}  # fmt: skip
KIMI_K2: Config = {
    **DEEPSEEK_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "vocab_size": 163840,
    "first_k_dense_replace": 1,
}  # fmt: skip
QWEN3_30B: Config = {
    **sizes("qwen3_moe", 2048, 6144, 48, (32, 4), 151936), "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
LLAMA_8B = sizes("llama", 4096, 14336, 32, (32, 8), 128256)

PUBLISHED: dict[str, tuple[Config, int]] = {
    "meta-llama/Meta-Llama-3-8B": (LLAMA_8B, 8_030_261_248),
    "meta-llama/Llama-3.2-1B": (
        {**sizes("llama", 2048, 8192, 16, (32, 8), 128256), "head_dim": 64, "tie_word_embeddings": True},
        1_235_814_400,
    ),
    "mistralai/Mistral-7B-v0.1": (sizes("mistral", 4096, 14336, 32, (32, 8), 32000), 7_241_732_096),
    "mistralai/Mixtral-8x7B-v0.1": (
        {**sizes("mixtral", 4096, 14336, 32, (32, 8), 32000), "num_local_experts": 8},
        46_702_792_704,
    ),
    "Qwen/Qwen2-7B": (sizes("qwen2", 3584, 18944, 28, (28, 4), 152064), 7_615_616_512),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {
            **sizes("qwen2_moe", 2048, 5632, 24, (16, 16), 151936), "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632, "num_experts": 60, "decoder_sparse_step": 1,
        },
        14_315_784_192,
    ),
    "Qwen/Qwen3-8B": ({**sizes("qwen3", 4096, 12288, 36, (32, 8), 151936), "head_dim": 128}, 8_190_735_360),
    "Qwen/Qwen3-30B-A3B": (QWEN3_30B, 30_532_122_624),
    "google/gemma-7b": ({**sizes("gemma", 3072, 24576, 28, (16, 16), 256000), "head_dim": 256}, 8_537_680_896),
    "google/gemma-2-9b": ({**sizes("gemma2", 3584, 14336, 42, (16, 8), 256000), "head_dim": 256}, 9_241_705_984),
    "google/gemma-3-1b-pt": ({**sizes("gemma3_text", 1152, 6912, 26, (4, 1), 262144), "head_dim": 256}, 999_885_952),
    "allenai/OLMo-2-1124-7B": (sizes("olmo2", 4096, 11008, 32, (32, 32), 100352), 7_298_617_344),
    "microsoft/Phi-3-mini-4k-instruct": (sizes("phi3", 3072, 8192, 32, (32, 32), 32064), 3_821_079_552),
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            **sizes("deepseek_v2", 2048, 10944, 27, (16, 16), 102400), **LATENT, "q_lora_rank": None,
            "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_routed_experts": 64, "first_k_dense_replace": 1,
        },
        15_706_484_224,
    ),
    # Without the biases of the load balancer, which transformers keeps as buffers: 256 (384) for each sparse layer.
    "deepseek-ai/DeepSeek-V3": (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
    "moonshotai/Kimi-K2-Base": (KIMI_K2, 1_026_408_232_448 - 60 * 384),
    "openai-community/gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "EleutherAI/pythia-160m": (sizes("gpt_neox", 768, 3072, 12, (12, 12), 50304), 162_322_944),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_makes_as_many_elements_as_the_published_model_has(name: str) -> None:
    config, numel = PUBLISHED[name]
    assert sum(param.numel for param in hf_table(config)) == numel


def test_every_family_has_a_published_model() -> None:
    assert {config["model_type"] for config, _ in PUBLISHED.values()} == set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("name", "config"), [("llama3-8b", LLAMA_8B), ("qwen3-30b-a3b", QWEN3_30B), ("deepseek-v3", DEEPSEEK_V3)]
)
def test_a_preset_and_its_config_have_the_same_elements_under_each_family(name: str, config: Config) -> None:
    def by_family(table: ParamTable) -> dict[str, int]:
        routes = route_params(table)
        return {
            family: sum(param.numel for param in table if routes[param.fqn].family == family)
            for family in ("matrix", "other")
        }

    assert by_family(hf_table(config, expert_parallel=1)) == by_family(preset(name))


# -- against live models, whose routes are in tests/golden ------------------------------------------

SMALL = sizes("", 24, 52, 2, (6, 2), 97)
GOLDEN_CONFIGS: dict[str, Config] = {
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_positions": 40, "n_embd": 24, "n_layer": 2, "n_inner": 52},
    "gpt_neox": sizes("gpt_neox", 24, 52, 2, (3, 3), 97),
    "llama": {**SMALL, "model_type": "llama", "head_dim": 8},
    "gemma3": {**SMALL, "model_type": "gemma3_text", "head_dim": 8},
    "phi3": {**SMALL, "model_type": "phi3"},
    "qwen3_moe": {
        **SMALL, "model_type": "qwen3_moe", "head_dim": 8, "moe_intermediate_size": 20, "num_experts": 5,
        "mlp_only_layers": [0],
    },
    "mixtral": {**SMALL, "model_type": "mixtral", "num_local_experts": 5},
    "deepseek_v3": {
        **sizes("deepseek_v3", 24, 52, 2, (3, 3), 97), "moe_intermediate_size": 20, "n_shared_experts": 2,
        "n_routed_experts": 6, "kv_lora_rank": 14, "q_lora_rank": 18, "qk_rope_head_dim": 4, "qk_nope_head_dim": 10,
        "v_head_dim": 12, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def golden_rows(name: str) -> list[tuple[str, ...]]:
    """Columns are two or more spaces apart."""
    lines = (GOLDEN / f"{name}.txt").read_text().splitlines()
    return [tuple(re.split(r" {2,}", line.strip())) for line in lines]


def rows_of(table: ParamTable) -> list[tuple[str, ...]]:
    routes = route_params(table)
    rows = []
    for param in table:
        route = routes[param.fqn]
        shapes = [matrix.logical_shape for matrix in route.matrices]
        counted = " + ".join(f"{shapes.count(shape)} of {shape[0]}x{shape[1]}" for shape in dict.fromkeys(shapes))
        rows.append((param.fqn, "x".join(map(str, param.shape)), route.family, counted or "-", route.reason))
    return rows


@pytest.mark.parametrize("name", GOLDEN_CONFIGS)
def test_a_config_makes_the_table_of_the_live_model(name: str) -> None:
    assert rows_of(hf_table(GOLDEN_CONFIGS[name])) == golden_rows(name)


# -- variants ---------------------------------------------------------------------------------------

LLAMA: Config = {**SMALL, "model_type": "llama"}


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    return {param.fqn: param.shape for param in hf_table(config)}


def test_biases_follow_their_switch() -> None:
    plain, biased = shapes_of(LLAMA), shapes_of({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert not [fqn for fqn in plain if fqn.endswith("bias")]
    assert biased["model.layers.0.self_attn.k_proj.bias"] == (8,)
    assert biased["model.layers.1.mlp.up_proj.bias"] == (52,)
    assert len([fqn for fqn in biased if fqn.endswith("bias")]) == 2 * 7


def test_qwen2_has_biases_on_query_key_and_value_alone() -> None:
    found = shapes_of({**SMALL, "model_type": "qwen2"})
    biases = [fqn.removeprefix("model.layers.1.") for fqn in found if "layers.1." in fqn and fqn.endswith("bias")]
    assert biases == ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"]


@pytest.mark.parametrize(("model_type", "expected"), [("qwen3", (8, 8)), ("gemma3_text", (8, 8)), ("olmo2", (48, 16))])
def test_norms_of_queries_and_keys_are_per_head_or_over_all_heads(model_type: str, expected: tuple[int, int]) -> None:
    found = shapes_of({**SMALL, "model_type": model_type, "head_dim": 8})
    norms = [f"model.layers.0.self_attn.{leaf}_norm.weight" for leaf in "qk"]
    assert tuple(found[norm] for norm in norms) == ((expected[0],), (expected[1],))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gemma", "gpt_neox"])
def test_a_tied_head_is_an_alias_of_the_embedding(model_type: str, tied: bool) -> None:
    table = hf_table({**SMALL, "model_type": model_type, "tie_word_embeddings": tied})
    assert (table.find("lm_head.weight") is table.params[0]) is tied


def test_only_gemma_and_gpt2_tie_their_head_without_being_told() -> None:
    tied = {
        str(config["model_type"])
        for config, _ in PUBLISHED.values()
        if "tie_word_embeddings" not in config and hf_table(config).params[0].aliases
    }
    assert tied == {"gemma", "gemma2", "gemma3_text", "gpt2"}


def test_missing_key_value_heads_mean_as_many_as_query_heads_where_the_family_says_so() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert shapes_of(without)["model.layers.0.self_attn.k_proj.weight"] == (24, 24)
    with pytest.raises(ValueError, match="has no 'num_key_value_heads'"):
        hf_table({**without, "model_type": "mistral"})


def test_sparse_layers_are_those_of_the_config() -> None:
    config: Config = {
        **SMALL, "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 4, "moe_intermediate_size": 20,
        "decoder_sparse_step": 2, "mlp_only_layers": [3],
    }  # fmt: skip
    sparse = {int(fqn.split(".")[2]) for fqn in shapes_of(config) if ".experts." in fqn}
    assert sparse == {1, 5}
    assert not [fqn for fqn in shapes_of({**config, "num_experts": 0}) if ".experts." in fqn]


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_number_of_experts_goes_by_either_of_its_names(model_type: str, key: str) -> None:
    config: Config = {**SMALL, "model_type": model_type, "moe_intermediate_size": 20, key: 5}
    assert shapes_of(config)["model.layers.1.mlp.gate.weight"] == (5, 24)


def test_experts_split_over_expert_parallel_ranks_into_a_domain_of_their_own() -> None:
    table = hf_table(QWEN3_30B, expert_parallel=8)
    assert table.find("model.layers.0.mlp.experts.gate_up_proj").shape == (16, 1536, 2048)
    assert {param.fqn.split(".")[-1] for param in table if param.domain == "expert"} == {"gate_up_proj", "down_proj"}
    assert {param.domain for param in hf_table(QWEN3_30B)} == {"dense"}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, DType.FP32), ({"torch_dtype": "bfloat16"}, DType.BF16), ({"dtype": "torch.float16"}, DType.FP16)],
)
def test_the_dtype_is_that_of_the_config(keys: Config, expected: DType) -> None:
    assert {param.dtype for param in hf_table({**LLAMA, **keys})} == {expected}
    assert {param.dtype for param in hf_table({**LLAMA, **keys}, dtype=DType.BF16)} == {DType.BF16}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": None}, "c.json has no 'hidden_size': expected a whole number of at least 1."),
        ({"vocab_size": "97"}, "c.json: 'vocab_size' must be a whole number of at least 1, got '97'."),
        ({"num_hidden_layers": 0}, "c.json: 'num_hidden_layers' must be a whole number of at least 1, got 0."),
        ({"num_hidden_layers": True}, "c.json: 'num_hidden_layers' must be a whole number of at least 1, got True."),
        ({"attention_bias": 1}, "c.json: 'attention_bias' must be true or false, got 1."),
        (
            {"num_attention_heads": 7},
            "c.json: 'hidden_size' 24 must be a multiple of 'num_attention_heads' 7, or 'head_dim' must say how wide a "
            "head is.",
        ),
        ({"dtype": "int8"}, "c.json: 'dtype' must be one of float32, bfloat16, float16, got 'int8'."),
        ({"model_type": "qwen3_moe", "num_experts": "all"}, "c.json: 'num_experts' must be a whole number of at least 0"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": "none"},
            "c.json: 'mlp_only_layers' must be a list of whole numbers, got 'none'.",
        ),
        ({"model_type": "deepseek_v3"}, "c.json has no 'q_lora_rank': expected a whole number of at least 1, or null."),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_says_which_key(changes: Config, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        hf_table({**LLAMA, **changes}, "c.json")


def test_experts_that_do_not_divide_name_the_config() -> None:
    with pytest.raises(ValueError, match=re.escape("c.json has 128 routed experts: expert_parallel must divide them")):
        hf_table(QWEN3_30B, "c.json", expert_parallel=7)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "lama"}, "'model_type' 'lama' is not a family known here. Did you mean 'llama'?"),
        ({"model_type": None}, "'model_type' None is not a family known here. Known: deepseek_v2, deepseek_v3,"),
        ({"architectures": ["LlamaForTokenClassification"]}, "'LlamaForTokenClassification' is not a causal language"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "a gpt2 with cross attention is not a family known"),
    ],
)
def test_what_only_transformers_can_build_is_an_error_of_its_own(changes: Config, expected: str) -> None:
    with pytest.raises(UnknownFamilyError, match=re.escape(expected)):
        hf_table({**LLAMA, **changes}, "c.json")


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"]])
def test_a_causal_language_model_is_built_whether_or_not_it_is_named(architectures: object) -> None:
    assert len(hf_table({**LLAMA, "architectures": architectures})) == 2 + 2 * 9 + 1

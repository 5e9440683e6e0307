"""Small models of Hugging Face `transformers`, built from configs. All sizes of a model differ where they can, so that a
split along the wrong one does not add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'layerwise[hf]'")

Config = object


def _gpt2() -> tuple[type, Config]:
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=52, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel, config


def _gpt_neox() -> tuple[type, Config]:
    config = transformers.GPTNeoXConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=52,
        max_position_embeddings=40, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM, config


def _llama() -> tuple[type, Config]:
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=40, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM, config


def _gemma3() -> tuple[type, Config]:
    config = transformers.Gemma3TextConfig(
        vocab_size=97, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=40,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM, config


def _phi3() -> tuple[type, Config]:
    config = transformers.Phi3Config(
        vocab_size=97, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=40, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Phi3ForCausalLM, config


def _falcon(**variant: object) -> tuple[type, Config]:
    config = transformers.FalconConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, ffn_hidden_size=52, **variant
    )
    return transformers.FalconForCausalLM, config


def _falcon_grouped() -> tuple[type, Config]:
    return _falcon(new_decoder_architecture=True, num_kv_heads=2)


def _falcon_multi_query() -> tuple[type, Config]:
    return _falcon(new_decoder_architecture=False, multi_query=True)


def _falcon_per_head() -> tuple[type, Config]:
    return _falcon(new_decoder_architecture=False, multi_query=False, bias=True)


def _bloom() -> tuple[type, Config]:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=24, n_layer=2, n_head=3)
    return transformers.BloomForCausalLM, config


def _qwen3_moe() -> tuple[type, Config]:
    config = transformers.Qwen3MoeConfig(
        vocab_size=97, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
        max_position_embeddings=40, mlp_only_layers=[0], tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM, config


def _mixtral() -> tuple[type, Config]:
    config = transformers.MixtralConfig(
        vocab_size=97, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, max_position_embeddings=40,
    )  # fmt: skip
    return transformers.MixtralForCausalLM, config


def _deepseek_v3() -> tuple[type, Config]:
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=24, intermediate_size=52, moe_intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, n_shared_experts=2, n_routed_experts=6, kv_lora_rank=14,
        q_lora_rank=18, qk_rope_head_dim=4, qk_nope_head_dim=10, v_head_dim=12, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=40,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM, config


def _mamba2() -> tuple[type, Config]:
    config = transformers.Mamba2Config(
        vocab_size=97, hidden_size=24, num_hidden_layers=2, num_heads=6, head_dim=8, state_size=10, n_groups=2,
        expand=2, conv_kernel=4, chunk_size=8, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Mamba2ForCausalLM, config


def _jamba() -> tuple[type, Config]:
    config = transformers.JambaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, num_experts=5, num_experts_per_tok=2, expert_layer_period=2, expert_layer_offset=1,
        attn_layer_period=2, attn_layer_offset=1, mamba_d_state=10, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=7,
    )  # fmt: skip
    return transformers.JambaForCausalLM, config


def _bert_config(**settings: object) -> Config:
    return transformers.BertConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=52,
        max_position_embeddings=24, **settings,
    )  # fmt: skip


def _bert() -> tuple[type, Config]:
    return transformers.BertForPreTraining, _bert_config()


def _bert_classifier() -> tuple[type, Config]:
    return transformers.BertForSequenceClassification, _bert_config(num_labels=5)


def _t5() -> tuple[type, Config]:
    config = transformers.T5Config(
        vocab_size=97, d_model=24, d_kv=10, d_ff=52, num_layers=2, num_heads=3, relative_attention_num_buckets=16,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration, config


def _vit() -> tuple[type, Config]:
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=52, image_size=16, patch_size=4,
        num_labels=7,
    )  # fmt: skip
    return transformers.ViTForImageClassification, config


def _clip() -> tuple[type, Config]:
    shared = {"num_hidden_layers": 2, "projection_dim": 14}
    text = {
        "vocab_size": 97, "hidden_size": 24, "intermediate_size": 52, "num_attention_heads": 3,
        "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, **shared,
    }  # fmt: skip
    vision = {
        "hidden_size": 30, "intermediate_size": 44, "num_attention_heads": 5, "image_size": 16, "patch_size": 4, **shared,
    }  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=14)
    return transformers.CLIPModel, config


def _whisper() -> tuple[type, Config]:
    config = transformers.WhisperConfig(
        vocab_size=97, num_mel_bins=16, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3,
        decoder_attention_heads=3, encoder_ffn_dim=52, decoder_ffn_dim=44, max_source_positions=30,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration, config


def _gpt_oss() -> tuple[type, Config]:
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, num_local_experts=5, num_experts_per_tok=2, max_position_embeddings=40,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return transformers.GptOssForCausalLM, config


MODELS: dict[str, Callable[[], tuple[type, Config]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "falcon": _falcon_grouped,
    "falcon_multi_query": _falcon_multi_query,
    "falcon_per_head": _falcon_per_head,
    "bloom": _bloom,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "mamba2": _mamba2,
    "jamba": _jamba,
    "bert": _bert,
    "bert_classifier": _bert_classifier,
    "t5": _t5,
    "vit": _vit,
    "clip": _clip,
    "whisper": _whisper,
}


def build(name: str, device: str = "meta") -> nn.Module:
    """The model of that name: shapes only on the meta device, random weights on the CPU."""
    model_class, config = MODELS[name]()
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = model_class(config)
    return model

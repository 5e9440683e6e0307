"""More families of `transformers`, from their own default configs with few layers: those that names alone get wrong."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.hf.models import Config, transformers


def _of(model: str, config: str, **settings: object) -> Callable[[], tuple[type, Config]]:
    return lambda: (getattr(transformers, model), getattr(transformers, config)(**settings))


def _llava() -> tuple[type, Config]:
    text = transformers.LlamaConfig(num_hidden_layers=1)
    vision = transformers.CLIPVisionConfig(num_hidden_layers=2)
    return transformers.LlavaForConditionalGeneration, transformers.LlavaConfig(text_config=text, vision_config=vision)


def _idefics3() -> tuple[type, Config]:
    text = transformers.LlamaConfig(num_hidden_layers=1)
    config = transformers.Idefics3Config(text_config=text, vision_config={"num_hidden_layers": 1})
    return transformers.Idefics3ForConditionalGeneration, config


def _mllama() -> tuple[type, Config]:
    text = {
        "num_hidden_layers": 2,
        "cross_attention_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    }
    vision = {
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 2560,
    }
    config = transformers.MllamaConfig(text_config=text, vision_config=vision)
    return transformers.MllamaForConditionalGeneration, config


def _qwen2_vl() -> tuple[type, Config]:
    config = transformers.Qwen2VLConfig(text_config={"num_hidden_layers": 1}, vision_config={"depth": 1})
    return transformers.Qwen2VLForConditionalGeneration, config


def _dbrx() -> tuple[type, Config]:
    config = transformers.DbrxConfig(n_layers=1, d_model=48, n_heads=4, vocab_size=97)
    config.attn_config.rope_theta, config.attn_config.clip_qkv = 10_000.0, 8.0  # its defaults have none
    config.ffn_config.ffn_hidden_size, config.ffn_config.moe_num_experts, config.ffn_config.hidden_size = 20, 5, 48
    return transformers.DbrxForCausalLM, config


FAMILIES: dict[str, Callable[[], tuple[type, Config]]] = {
    "convnext": _of("ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1, 1, 1]),
    "cvt": _of("CvtForImageClassification", "CvtConfig", depth=[1, 2, 3]),
    "dbrx": _dbrx,
    "deberta": _of("DebertaForMaskedLM", "DebertaConfig", num_hidden_layers=1, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "deepseek_v2": _of("DeepseekV2ForCausalLM", "DeepseekV2Config", num_hidden_layers=2, num_experts_per_tok=2, n_routed_experts=6),
    "diffllama": _of("DiffLlamaForCausalLM", "DiffLlamaConfig", num_hidden_layers=1),
    "falcon_h1": _of("FalconH1ForCausalLM", "FalconH1Config", num_hidden_layers=1),
    "glm4_moe": _of("Glm4MoeForCausalLM", "Glm4MoeConfig", num_hidden_layers=2, n_routed_experts=8),
    "granitemoeshared": _of("GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", num_hidden_layers=1, shared_intermediate_size=512),
    "hunyuan_v1_moe": _of("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", num_hidden_layers=1, num_experts=8, moe_topk=2, head_dim=128),
    "idefics3": _idefics3,
    "jetmoe": _of("JetMoeForCausalLM", "JetMoeConfig", num_hidden_layers=1),
    "kimi_linear": _of("KimiLinearForCausalLM", "KimiLinearConfig", num_hidden_layers=4),
    "lfm2": _of("Lfm2ForCausalLM", "Lfm2Config", num_hidden_layers=3, layer_types=["conv", "conv", "full_attention"]),
    "llava": _llava,
    "mllama": _mllama,
    "parakeet_ctc": _of("ParakeetForCTC", "ParakeetCTCConfig", encoder_config={"num_hidden_layers": 1}),
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _of("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", num_hidden_layers=4),
    "qwen3_next": _of("Qwen3NextForCausalLM", "Qwen3NextConfig", num_hidden_layers=4, num_experts=12),
    "recurrent_gemma": _of("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", num_hidden_layers=3),
    "rwkv": _of("RwkvForCausalLM", "RwkvConfig", num_hidden_layers=2),
    "speech_to_text": _of("Speech2TextForConditionalGeneration", "Speech2TextConfig", encoder_layers=1, decoder_layers=1),
    "swin": _of("SwinForImageClassification", "SwinConfig", depths=[2, 1], num_heads=[3, 6]),
    "wav2vec2": _of("Wav2Vec2ForCTC", "Wav2Vec2Config", num_hidden_layers=1),
    "xlnet": _of("XLNetLMHeadModel", "XLNetConfig", n_layer=1),
}  # fmt: skip


def build_family(name: str) -> nn.Module:
    """The model of that name, shapes only."""
    model_class, config = FAMILIES[name]()
    with torch.device("meta"):
        model: nn.Module = model_class(config)
    return model

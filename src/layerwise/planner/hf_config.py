"""From a Hugging Face `config.json` to a table of params, for the common families, without torch or transformers.

Each family follows what its class in transformers registers: names, order, biases, norms and stacked experts, so a plan
made here has the digest of the plan that the live model would get. Sizes must be in the config; switches, which many
configs leave out, have the defaults of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from layerwise.dtypes import DType
from layerwise.errors import did_you_mean
from layerwise.planner.decoder import (
    PRE_NORMS,
    Decoder,
    Experts,
    Gpt2,
    GptNeox,
    GroupedQuery,
    Latent,
    Shape,
    table_of_shape,
)
from layerwise.routing.spec import ParamTable

_SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
"""How the names of architectures end that are a decoder with a head onto its vocabulary."""
_DTYPES = {"float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16}


class UnknownFamilyError(ValueError):
    """A config of a model whose params are not known here; transformers may know them."""


def hf_table(
    config: Mapping[str, object], where: str = "config", *, expert_parallel: int = 1, dtype: DType | None = None
) -> ParamTable:
    """The params of the model that a Hugging Face config describes; `where` is how an error calls the config.

    Without a `dtype` it is the config's own, and fp32 where that says none. With `expert_parallel` above 1 only the
    routed experts of one rank are in the table, in a domain of their own.

    >>> config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "vocab_size": 256, "n_positions": 32}
    >>> sum(param.numel for param in hf_table(config))
    118528
    """
    read = _Config(config, where)
    shape = _shape_of(read)
    chosen = _dtype_of(read) if dtype is None else dtype
    return table_of_shape(shape, where, expert_parallel=expert_parallel, dtype=chosen)


@dataclass(frozen=True, slots=True)
class _Config:
    """A config whose values are checked as they are read; errors name the config and the key."""

    values: Mapping[str, object]
    where: str

    def size(self, *names: str, default: int | None = None) -> int:
        """A positive number under any of these names."""
        found = next((number for name in names if (number := self._number(name, least=1)) is not None), default)
        if found is None:
            raise ValueError(f"{self.where} has no {names[0]!r}: expected a whole number of at least 1.")
        return found

    def count(self, *names: str) -> int:
        """A number under any of these names that may be 0; null is 0 too."""
        return self._present(names, least=0) or 0

    def optional(self, name: str) -> int | None:
        """A positive number or null."""
        return self._present((name,), least=1)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name!r} must be true or false, got {value!r}.")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of numbers; where it is missing or null it has none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(_is_whole(number) for number in value):
            raise ValueError(f"{self.where}: {name!r} must be a list of whole numbers, got {value!r}.")
        return tuple(value)

    def _present(self, names: tuple[str, ...], least: int) -> int | None:
        """Null says something, so a missing key is not taken for it."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            raise ValueError(f"{self.where} has no {names[0]!r}: expected a whole number of at least {least}, or null.")
        return self._number(name, least)

    def _number(self, name: str, least: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or not _is_whole(value) or value < least:
            raise ValueError(f"{self.where}: {name!r} must be a whole number of at least {least}, got {value!r}.")
        return value


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shape_of(config: _Config) -> Shape:
    model_type = config.values.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = did_you_mean(str(model_type), _FAMILIES)
        raise UnknownFamilyError(f"{config.where}: 'model_type' {model_type!r} is not a family known here.{known}")
    architectures = config.values.get("architectures")
    first = architectures[0] if isinstance(architectures, list | tuple) and architectures else None
    if first is not None and not str(first).endswith(_LANGUAGE_MODELS):
        raise UnknownFamilyError(f"{config.where}: architecture {first!r} is not a causal language model.")
    return family(config)


def _dtype_of(config: _Config) -> DType:
    named = config.values.get("dtype", config.values.get("torch_dtype"))
    if named is None:
        return DType.FP32
    found = _DTYPES.get(str(named).removeprefix("torch."))
    if found is None:
        raise ValueError(f"{config.where}: 'dtype' must be one of {', '.join(_DTYPES)}, got {named!r}.")
    return found


# -- what families share ---------------------------------------------------------------------------


def _decoder(config: _Config, classes: str, attention: GroupedQuery | Latent, *, ties_head: bool = False) -> Decoder:
    return Decoder(
        hidden=config.size("hidden_size"),
        layers=config.size("num_hidden_layers"),
        vocab=config.size("vocab_size"),
        intermediate=config.size("intermediate_size"),
        attention=attention,
        ties_head=config.flag("tie_word_embeddings", default=ties_head),
        classes=classes,
        fused=False,
    )


def _grouped_query(
    config: _Config, *, head_dim: int | None = None, may_omit_kv_heads: bool = False, bias: str = ""
) -> GroupedQuery:
    """Attention; `head_dim` where the config has none (None: an equal part of the hidden size), and `bias` the key that
    gives all four projections one."""
    heads = config.size("num_attention_heads")
    is_left_out = may_omit_kv_heads and "num_key_value_heads" not in config.values
    kv_heads = heads if is_left_out else config.optional("num_key_value_heads") or heads
    has_bias = config.flag(bias) if bias else False
    head = _head_dim(config, heads, head_dim)
    return GroupedQuery(heads=heads, kv_heads=kv_heads, head_dim=head, qkv_bias=has_bias, out_bias=has_bias)


def _head_dim(config: _Config, heads: int, default: int | None = None) -> int:
    hidden = config.size("hidden_size")
    if default is None and config.values.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"{config.where}: 'hidden_size' {hidden} must be a multiple of 'num_attention_heads' {heads}, or 'head_dim' "
            "must say how wide a head is."
        )
    return config.size("head_dim", default=hidden // heads if default is None else default)


def _sparse_layers(config: _Config) -> tuple[int, ...]:
    """Qwen: every n-th layer, but not those that are dense by name."""
    step, dense = config.size("decoder_sparse_step", default=1), config.numbers("mlp_only_layers")
    layers = range(config.size("num_hidden_layers"))
    return tuple(layer for layer in layers if (layer + 1) % step == 0 and layer not in dense)


def _qwen_experts(config: _Config) -> Experts | None:
    count = config.count("num_experts", "num_local_experts")
    if not count:
        return None
    return Experts(count=count, intermediate=config.size("moe_intermediate_size"), layers=_sparse_layers(config))


# -- families --------------------------------------------------------------------------------------


def _llama(config: _Config) -> Decoder:
    attention = _grouped_query(config, may_omit_kv_heads=True, bias="attention_bias")
    return replace(_decoder(config, "Llama", attention), mlp_bias=config.flag("mlp_bias"))


def _mistral(config: _Config) -> Decoder:
    return _decoder(config, "Mistral", _grouped_query(config))


def _mixtral(config: _Config) -> Decoder:
    decoder = _decoder(config, "Mixtral", _grouped_query(config))
    count, layers = config.size("num_local_experts", "num_experts"), tuple(range(decoder.layers))
    return replace(decoder, experts=Experts(count=count, intermediate=decoder.intermediate, layers=layers))


def _qwen2(config: _Config) -> Decoder:
    return _decoder(config, "Qwen2", replace(_grouped_query(config), qkv_bias=True))


def _qwen2_moe(config: _Config) -> Decoder:
    attention = replace(_grouped_query(config), qkv_bias=config.flag("qkv_bias", default=True))
    experts = _qwen_experts(config)
    if experts is not None:
        shared = config.size("shared_expert_intermediate_size")
        experts = replace(experts, shared_intermediate=shared, shared_name="shared_expert", gates_shared=True)
    return replace(_decoder(config, "Qwen2Moe", attention), experts=experts)


def _qwen3(config: _Config) -> Decoder:
    attention = _grouped_query(config, head_dim=128, bias="attention_bias")
    return _decoder(config, "Qwen3", replace(attention, qk_norm="head"))


def _qwen3_moe(config: _Config) -> Decoder:
    attention = replace(_grouped_query(config, bias="attention_bias"), qk_norm="head")
    experts = _qwen_experts(config)
    if experts is not None:
        experts = replace(experts, router_first=False)
    return replace(_decoder(config, "Qwen3Moe", attention), experts=experts)


def _gemma(config: _Config) -> Decoder:
    attention = _grouped_query(config, head_dim=256, bias="attention_bias")
    decoder = _decoder(config, "Gemma", attention, ties_head=True)
    return replace(decoder, embedding_class="GemmaTextScaledWordEmbedding")


def _gemma2(config: _Config) -> Decoder:
    return replace(
        _gemma(config), classes="Gemma2", embedding_class="Gemma2TextScaledWordEmbedding", norms=_SANDWICH_NORMS
    )


def _gemma3(config: _Config) -> Decoder:
    attention = replace(_grouped_query(config, head_dim=256, bias="attention_bias"), qk_norm="head")
    return replace(
        _gemma2(config), classes="Gemma3", embedding_class="Gemma3TextScaledWordEmbedding", attention=attention
    )


def _olmo2(config: _Config) -> Decoder:
    attention = _grouped_query(config, may_omit_kv_heads=True, bias="attention_bias")
    return replace(_decoder(config, "Olmo2", replace(attention, qk_norm="whole")), norms=_POST_NORMS)


def _phi3(config: _Config) -> Decoder:
    return replace(_decoder(config, "Phi3", _grouped_query(config, may_omit_kv_heads=True)), fused=True)


def _deepseek(config: _Config, classes: str) -> Decoder:
    attention = Latent(
        heads=config.size("num_attention_heads"),
        q_rank=config.optional("q_lora_rank"),
        kv_rank=config.size("kv_lora_rank"),
        nope_dim=config.size("qk_nope_head_dim"),
        rope_dim=config.size("qk_rope_head_dim"),
        value_dim=config.size("v_head_dim"),
        bias=config.flag("attention_bias"),
    )
    decoder = _decoder(config, classes, attention)
    width = config.size("moe_intermediate_size")
    experts = Experts(
        count=config.size("n_routed_experts", "num_local_experts"),
        intermediate=width,
        layers=tuple(range(config.count("first_k_dense_replace"), decoder.layers)),
        shared_intermediate=config.count("n_shared_experts") * width,
        router_first=False,
    )
    return replace(decoder, experts=experts)


def _deepseek_v2(config: _Config) -> Decoder:
    return replace(_deepseek(config, "DeepseekV2"), mlp_bias=config.flag("mlp_bias"))


def _deepseek_v3(config: _Config) -> Decoder:
    return _deepseek(config, "DeepseekV3")


def _gpt2(config: _Config) -> Gpt2:
    if config.flag("add_cross_attention"):
        raise UnknownFamilyError(f"{config.where}: a gpt2 with cross attention is not a family known here.")
    hidden = config.size("n_embd", "hidden_size")
    return Gpt2(
        hidden=hidden,
        layers=config.size("n_layer", "num_hidden_layers"),
        vocab=config.size("vocab_size"),
        positions=config.size("n_positions", "max_position_embeddings"),
        inner=config.size("n_inner", default=4 * hidden),
        ties_head=config.flag("tie_word_embeddings", default=True),
        transposed=True,
    )


def _gpt_neox(config: _Config) -> GptNeox:
    heads = config.size("num_attention_heads")
    _head_dim(config, heads)
    return GptNeox(
        hidden=config.size("hidden_size"),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        vocab=config.size("vocab_size"),
        intermediate=config.size("intermediate_size"),
        attention_bias=config.flag("attention_bias", default=True),
        ties_head=config.flag("tie_word_embeddings"),
    )


_FAMILIES: dict[str, Callable[[_Config], Shape]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,  # DeepSeek-V3 with other numbers, under a name of its own
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}

MODEL_TYPES: tuple[str, ...] = tuple(_FAMILIES)
"""Values of `model_type` whose params are known without transformers."""

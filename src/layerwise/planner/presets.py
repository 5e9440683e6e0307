"""Named models, so that plans of large ones need neither torch nor the model.

Numbers are those of the published `config.json` of each model; params are in the training form (`planner.decoder`).
"""

from __future__ import annotations

from layerwise.dtypes import DType
from layerwise.errors import did_you_mean
from layerwise.planner.decoder import Decoder, Experts, Gpt2, GroupedQuery, Latent, Shape, table_of_shape
from layerwise.routing.spec import ParamTable

_LLAMA3_VOCAB = 128256
_QWEN3_VOCAB = 151936


def _llama3(*, hidden: int, layers: int, heads: int, intermediate: int) -> Decoder:
    attention = GroupedQuery(heads=heads, kv_heads=8, head_dim=hidden // heads)
    return Decoder(hidden=hidden, layers=layers, vocab=_LLAMA3_VOCAB, intermediate=intermediate, attention=attention)


def _qwen3_moe(*, hidden: int, layers: int, heads: int, intermediate: int, expert_intermediate: int) -> Decoder:
    """Heads are wider than hidden / heads; every layer has experts, so the dense width is not used."""
    return Decoder(
        hidden=hidden,
        layers=layers,
        vocab=_QWEN3_VOCAB,
        intermediate=intermediate,
        attention=GroupedQuery(heads=heads, kv_heads=4, head_dim=128, qk_norm="head"),
        experts=Experts(count=128, intermediate=expert_intermediate, layers=tuple(range(layers))),
    )


def _deepseek_v3(*, heads: int, routed_experts: int, dense_layers: int, vocab: int) -> Decoder:
    """What DeepSeek-V3 and Kimi K2 share, and the four numbers they do not."""
    layers, expert_intermediate = 61, 2048
    return Decoder(
        hidden=7168,
        layers=layers,
        vocab=vocab,
        intermediate=18432,
        attention=Latent(heads=heads, q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        experts=Experts(
            count=routed_experts,
            intermediate=expert_intermediate,
            layers=tuple(range(dense_layers, layers)),
            shared_intermediate=expert_intermediate,
            has_balance_bias=True,
        ),
    )


_SHAPES: dict[str, Shape] = {
    # meta-llama/Meta-Llama-3-8B: 8,030,261,248 params.
    "llama3-8b": _llama3(hidden=4096, layers=32, heads=32, intermediate=14336),
    # meta-llama/Meta-Llama-3-70B: 70,553,706,496 params.
    "llama3-70b": _llama3(hidden=8192, layers=80, heads=64, intermediate=28672),
    # meta-llama/Llama-3.1-405B: 405,853,388,800 params.
    "llama3-405b": _llama3(hidden=16384, layers=126, heads=128, intermediate=53248),
    # Qwen/Qwen3-30B-A3B: 30,532,122,624 params.
    "qwen3-30b-a3b": _qwen3_moe(hidden=2048, layers=48, heads=32, intermediate=6144, expert_intermediate=768),
    # Qwen/Qwen3-235B-A22B: 235,093,634,560 params.
    "qwen3-235b-a22b": _qwen3_moe(hidden=4096, layers=94, heads=64, intermediate=12288, expert_intermediate=1536),
    # deepseek-ai/DeepSeek-V3: 671 B params without the multi-token-prediction layer.
    "deepseek-v3": _deepseek_v3(heads=128, routed_experts=256, dense_layers=3, vocab=129280),
    # moonshotai/Kimi-K2-Base: 1.03 T params.
    "kimi-k2": _deepseek_v3(heads=64, routed_experts=384, dense_layers=1, vocab=163840),
    # openai-community/gpt2: 124,439,808 params. Weights as nn.Linear holds them; the checkpoint holds transposes.
    "gpt2": Gpt2(hidden=768, layers=12, vocab=50257, positions=1024, inner=3072),
}

PRESETS: tuple[str, ...] = tuple(_SHAPES)
"""Names that `preset` knows."""


def preset(name: str, *, expert_parallel: int = 1, dtype: DType = DType.BF16) -> ParamTable:
    """The params of a known model, as one of its pipeline- and tensor-unsharded ranks holds them.

    With `expert_parallel` above 1 only the routed experts of one rank are in the table, in a domain of their own.

    >>> sum(param.numel for param in preset("gpt2"))
    124439808
    """
    shape = _SHAPES.get(name)
    if shape is None:
        raise ValueError(f"preset {name!r} is unknown." + did_you_mean(name, PRESETS))
    return table_of_shape(shape, f"preset {name!r}", expert_parallel=expert_parallel, dtype=dtype)

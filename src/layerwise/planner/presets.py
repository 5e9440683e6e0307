"""Named model shapes as tables of params, so that plans of large models need neither torch nor the model.

Numbers are those of the published `config.json` of each model; names follow the checkpoints, with query, key and value
fused into one weight and gate and up into another, as training systems fuse them. Fused rows are listed block by block
(Q, K, V): Megatron interleaves them by query group, which changes neither shapes nor counts. Routed experts are stacks
`(local experts, rows, columns)`, one each for gate (w1), down (w2) and up (w3).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from layerwise.dtypes import DType
from layerwise.errors import did_you_mean
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import row_blocks

EXPERT_DOMAIN = "expert"
"""Domain of routed experts under expert parallelism: fewer ranks hold copies of them than of the dense params."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Llama:
    """Grouped-query attention and SwiGLU, head not tied."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeepSeek:
    """Multi-head latent attention and experts, head not tied. Defaults are what DeepSeek-V3 and Kimi-K2 share."""

    heads: int
    routed_experts: int
    dense_layers: int
    vocab: int
    hidden: int = 7168
    layers: int = 61
    intermediate: int = 18432
    expert_intermediate: int = 2048
    shared_experts: int = 1
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gpt2:
    """Multi-head attention with biases, learned positions, head tied to the embedding."""

    hidden: int
    layers: int
    vocab: int
    positions: int


_Shape: TypeAlias = _Llama | _DeepSeek | _Gpt2


def _embedding(fqn: str, rows: int, cols: int, *, tied_head: str = "") -> ParamSpec:
    spec = ParamSpec(fqn=f"{fqn}.weight", shape=(rows, cols), module_kind=ModuleKind.EMBEDDING, module_type="Embedding")
    return replace(spec, aliases=(tied_head,), alias_kinds=(ModuleKind.LINEAR,)) if tied_head else spec


def _linear(fqn: str, rows: int, cols: int, blocks: tuple[int, ...] = ()) -> ParamSpec:
    return ParamSpec(
        fqn=f"{fqn}.weight",
        shape=(rows, cols),
        module_kind=ModuleKind.LINEAR,
        module_type="Linear",
        split=row_blocks((rows, cols), blocks) if blocks else None,
    )


def _bias(fqn: str, size: int) -> ParamSpec:
    return ParamSpec(fqn=f"{fqn}.bias", shape=(size,), module_kind=ModuleKind.LINEAR, module_type="Linear")


def _rms_norm(fqn: str, size: int) -> ParamSpec:
    return ParamSpec(fqn=f"{fqn}.weight", shape=(size,), module_kind=ModuleKind.NORM, module_type="RMSNorm")


def _layer_norm(fqn: str, size: int) -> Iterator[ParamSpec]:
    for leaf in ("weight", "bias"):
        yield ParamSpec(fqn=f"{fqn}.{leaf}", shape=(size,), module_kind=ModuleKind.NORM, module_type="LayerNorm")


def _head(rows: int, cols: int) -> ParamSpec:
    return replace(_linear("lm_head", rows, cols), maps_to_vocabulary=True)


def _swiglu(fqn: str, hidden: int, intermediate: int) -> Iterator[ParamSpec]:
    yield _linear(f"{fqn}.gate_up_proj", 2 * intermediate, hidden, (intermediate, intermediate))
    yield _linear(f"{fqn}.down_proj", hidden, intermediate)


def _llama(shape: _Llama) -> Iterator[ParamSpec]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield _embedding("model.embed_tokens", shape.vocab, shape.hidden)
    for layer in (f"model.layers.{number}" for number in range(shape.layers)):
        yield _rms_norm(f"{layer}.input_layernorm", shape.hidden)
        yield _linear(f"{layer}.self_attn.qkv_proj", query + 2 * key, shape.hidden, (query, key, key))
        yield _linear(f"{layer}.self_attn.o_proj", shape.hidden, query)
        yield _rms_norm(f"{layer}.post_attention_layernorm", shape.hidden)
        yield from _swiglu(f"{layer}.mlp", shape.hidden, shape.intermediate)
    yield _rms_norm("model.norm", shape.hidden)
    yield _head(shape.vocab, shape.hidden)


def _latent_attention(fqn: str, shape: _DeepSeek) -> Iterator[ParamSpec]:
    yield _linear(f"{fqn}.q_a_proj", shape.q_rank, shape.hidden)
    yield _rms_norm(f"{fqn}.q_a_layernorm", shape.q_rank)
    yield _linear(f"{fqn}.q_b_proj", shape.heads * (shape.nope_dim + shape.rope_dim), shape.q_rank)
    yield _linear(f"{fqn}.kv_a_proj_with_mqa", shape.kv_rank + shape.rope_dim, shape.hidden)
    yield _rms_norm(f"{fqn}.kv_a_layernorm", shape.kv_rank)
    yield _linear(f"{fqn}.kv_b_proj", shape.heads * (shape.nope_dim + shape.value_dim), shape.kv_rank)
    yield _linear(f"{fqn}.o_proj", shape.hidden, shape.heads * shape.value_dim)


def _experts(fqn: str, shape: _DeepSeek, expert_parallel: int) -> Iterator[ParamSpec]:
    yield replace(_linear(f"{fqn}.gate", shape.routed_experts, shape.hidden), routes_to=shape.routed_experts)
    # Moved by the load balancer and never by a gradient, so it is frozen for the optimizer.
    yield ParamSpec(
        fqn=f"{fqn}.gate.e_score_correction_bias",
        shape=(shape.routed_experts,),
        trainable=False,
        module_type="TopkRouter",
    )
    local = shape.routed_experts // expert_parallel
    domain = EXPERT_DOMAIN if expert_parallel > 1 else "dense"
    narrow = (shape.hidden, shape.expert_intermediate)
    for leaf, matrix in (("w1", narrow[::-1]), ("w2", narrow), ("w3", narrow[::-1])):
        yield ParamSpec(
            fqn=f"{fqn}.experts.{leaf}", shape=(local, *matrix), module_type="GroupedExperts", domain=domain
        )
    yield from _swiglu(f"{fqn}.shared_experts", shape.hidden, shape.shared_experts * shape.expert_intermediate)


def _deepseek(shape: _DeepSeek, expert_parallel: int) -> Iterator[ParamSpec]:
    yield _embedding("model.embed_tokens", shape.vocab, shape.hidden)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        yield _rms_norm(f"{layer}.input_layernorm", shape.hidden)
        yield from _latent_attention(f"{layer}.self_attn", shape)
        yield _rms_norm(f"{layer}.post_attention_layernorm", shape.hidden)
        if number < shape.dense_layers:
            yield from _swiglu(f"{layer}.mlp", shape.hidden, shape.intermediate)
        else:
            yield from _experts(f"{layer}.mlp", shape, expert_parallel)
    yield _rms_norm("model.norm", shape.hidden)
    yield _head(shape.vocab, shape.hidden)


def _gpt2(shape: _Gpt2) -> Iterator[ParamSpec]:
    """Weights as nn.Linear holds them, rows are outputs; the published checkpoint holds their transposes (Conv1D)."""
    width = shape.hidden
    yield _embedding("transformer.wte", shape.vocab, width, tied_head="lm_head.weight")
    yield _embedding("transformer.wpe", shape.positions, width)
    for layer in (f"transformer.h.{number}" for number in range(shape.layers)):
        yield from _layer_norm(f"{layer}.ln_1", width)
        yield _linear(f"{layer}.attn.c_attn", 3 * width, width, (width, width, width))
        yield _bias(f"{layer}.attn.c_attn", 3 * width)
        yield _linear(f"{layer}.attn.c_proj", width, width)
        yield _bias(f"{layer}.attn.c_proj", width)
        yield from _layer_norm(f"{layer}.ln_2", width)
        yield _linear(f"{layer}.mlp.c_fc", 4 * width, width)
        yield _bias(f"{layer}.mlp.c_fc", 4 * width)
        yield _linear(f"{layer}.mlp.c_proj", width, 4 * width)
        yield _bias(f"{layer}.mlp.c_proj", width)
    yield from _layer_norm("transformer.ln_f", width)


_SHAPES: dict[str, _Shape] = {
    # meta-llama/Meta-Llama-3-8B: 8,030,261,248 params.
    "llama3-8b": _Llama(hidden=4096, layers=32, heads=32, kv_heads=8, intermediate=14336, vocab=128256),
    # meta-llama/Meta-Llama-3-70B: 70,553,706,496 params.
    "llama3-70b": _Llama(hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, vocab=128256),
    # deepseek-ai/DeepSeek-V3: 671 B params without the multi-token-prediction layer.
    "deepseek-v3": _DeepSeek(heads=128, routed_experts=256, dense_layers=3, vocab=129280),
    # moonshotai/Kimi-K2-Base: 1.03 T params.
    "kimi-k2": _DeepSeek(heads=64, routed_experts=384, dense_layers=1, vocab=163840),
    # openai-community/gpt2: 124,439,808 params.
    "gpt2": _Gpt2(hidden=768, layers=12, vocab=50257, positions=1024),
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
    _check_expert_parallel(name, shape, expert_parallel)
    return ParamTable(tuple(replace(param, dtype=dtype) for param in _params_of(shape, expert_parallel)))


def _params_of(shape: _Shape, expert_parallel: int) -> Iterator[ParamSpec]:
    match shape:
        case _Llama():
            return _llama(shape)
        case _DeepSeek():
            return _deepseek(shape, expert_parallel)
        case _Gpt2():
            return _gpt2(shape)


def _check_expert_parallel(name: str, shape: _Shape, expert_parallel: int) -> None:
    if expert_parallel < 1:
        raise ValueError(f"expert_parallel must be at least 1, got {expert_parallel}.")
    experts = shape.routed_experts if isinstance(shape, _DeepSeek) else 0
    if not experts and expert_parallel > 1:
        raise ValueError(f"preset {name!r} has no experts: expert_parallel must be 1, got {expert_parallel}.")
    if experts % expert_parallel:
        raise ValueError(
            f"preset {name!r} has {experts} routed experts: expert_parallel must divide them, got {expert_parallel}."
        )

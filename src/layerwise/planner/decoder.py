"""Decoder-only language models in numbers, and the params that a model of those numbers has. No torch, no model.

Two forms of the same model differ in names, order and fusion, not in elements:

* the *training form*, of presets: query, key and value in one weight and gate and up in another, as training systems
  fuse them, block by block (Megatron interleaves query groups, which changes neither shapes nor counts); params in
  forward order; routed experts as three stacks `(local experts, rows, columns)`: gate (w1), down (w2) and up (w3).
* the *library form*, of Hugging Face configs: what the module of that library registers, name by name and in its order.
  It is told by `classes`, with which the names of that library's module classes begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from layerwise.dtypes import DType
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import Split, interleaved_rows, row_blocks, stack, transposed

EXPERT_DOMAIN = "expert"
"""Domain of routed experts under expert parallelism: fewer ranks hold copies of them than of the dense params."""

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
"""One norm before attention and one before what follows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedQuery:
    """Attention whose queries share keys and values in groups; with as many of one as of the other, plain multi-head."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "whole"] = "none"
    """Norms of queries and keys: with one scale for all heads, or over all heads at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention: queries, keys and values out of low-rank latents."""

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None
    """None: queries come from the hidden state in one step."""
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The feed-forward part of layers that choose among experts."""

    count: int
    intermediate: int
    layers: tuple[int, ...]
    """Layers that have experts; the others have a dense feed-forward."""
    shared_intermediate: int = 0
    """Width of all experts together that see every token; 0 for none."""
    shared_name: str = "shared_experts"
    gates_shared: bool = False
    """The shared expert's output is multiplied by a gate of its own."""
    router_first: bool = True
    """Library form: whether the module registers its router before its experts."""
    has_balance_bias: bool = False
    """Training form: the load balancer's bias on the router's scores is a param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """RMS norms, gated feed-forward, no learned positions: Llama and everything descended from it."""

    hidden: int
    layers: int
    vocab: int
    intermediate: int
    attention: GroupedQuery | Latent
    experts: Experts | None = None
    norms: tuple[str, ...] = PRE_NORMS
    mlp_bias: bool = False
    ties_head: bool = False
    classes: str = ""
    """Library form: how the names of the library's classes begin. Empty for the training form."""
    fused: bool = True
    """Query, key and value are one weight, gate and up another."""
    embedding_class: str = "Embedding"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt2:
    """Multi-head attention with biases, learned positions, layer norms."""

    hidden: int
    layers: int
    vocab: int
    positions: int
    inner: int
    ties_head: bool = True
    transposed: bool = False
    """Weights are stored (in, out), as in the published checkpoint (Conv1D); otherwise as nn.Linear holds them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GptNeox:
    """Multi-head attention with queries, keys and values fused head by head, layer norms, no learned positions."""

    hidden: int
    layers: int
    heads: int
    vocab: int
    intermediate: int
    attention_bias: bool = True
    ties_head: bool = False


Shape: TypeAlias = Decoder | Gpt2 | GptNeox


def table_of_shape(shape: Shape, name: str, *, expert_parallel: int = 1, dtype: DType = DType.BF16) -> ParamTable:
    """The params of a model as one of its pipeline- and tensor-unsharded ranks holds them; `name` is how an error calls
    the model. With `expert_parallel` above 1 only the routed experts of one rank are in it, in a domain of their own."""
    _check_expert_parallel(name, shape, expert_parallel)
    return ParamTable(tuple(replace(param, dtype=dtype) for param in _params_of(shape, expert_parallel)))


def _params_of(shape: Shape, expert_parallel: int) -> Iterator[ParamSpec]:
    match shape:
        case Decoder():
            return _decoder(shape, expert_parallel)
        case Gpt2():
            return _gpt2(shape)
        case GptNeox():
            return _gpt_neox(shape)


def _check_expert_parallel(name: str, shape: Shape, expert_parallel: int) -> None:
    if expert_parallel < 1:
        raise ValueError(f"expert_parallel must be at least 1, got {expert_parallel}.")
    experts = shape.experts if isinstance(shape, Decoder) else None
    if experts is None:
        if expert_parallel > 1:
            raise ValueError(f"{name} has no experts: expert_parallel must be 1, got {expert_parallel}.")
    elif experts.count % expert_parallel:
        raise ValueError(
            f"{name} has {experts.count} routed experts: expert_parallel must divide them, got {expert_parallel}."
        )


# -- single params ---------------------------------------------------------------------------------


def _embedding(fqn: str, rows: int, cols: int, *, module_type: str = "Embedding", tied_head: str = "") -> ParamSpec:
    spec = ParamSpec(fqn=f"{fqn}.weight", shape=(rows, cols), module_kind=ModuleKind.EMBEDDING, module_type=module_type)
    return replace(spec, aliases=(tied_head,), alias_kinds=(ModuleKind.LINEAR,)) if tied_head else spec


def _weight(fqn: str, rows: int, cols: int, split: Split | None = None) -> ParamSpec:
    return ParamSpec(
        fqn=f"{fqn}.weight", shape=(rows, cols), module_kind=ModuleKind.LINEAR, module_type="Linear", split=split
    )


def _linear(fqn: str, rows: int, cols: int, blocks: tuple[int, ...] = (), *, bias: bool = False) -> Iterator[ParamSpec]:
    """A linear layer, of row blocks one after the other where it is several in one."""
    yield _weight(fqn, rows, cols, row_blocks((rows, cols), blocks) if blocks else None)
    if bias:
        yield _bias(fqn, rows)


def _bias(fqn: str, size: int, module_type: str = "Linear") -> ParamSpec:
    return ParamSpec(fqn=f"{fqn}.bias", shape=(size,), module_kind=ModuleKind.LINEAR, module_type=module_type)


def _rms_norm(fqn: str, size: int, classes: str) -> ParamSpec:
    return ParamSpec(fqn=f"{fqn}.weight", shape=(size,), module_kind=ModuleKind.NORM, module_type=f"{classes}RMSNorm")


def _layer_norm(fqn: str, size: int) -> Iterator[ParamSpec]:
    for leaf in ("weight", "bias"):
        yield ParamSpec(fqn=f"{fqn}.{leaf}", shape=(size,), module_kind=ModuleKind.NORM, module_type="LayerNorm")


def _head(rows: int, cols: int) -> ParamSpec:
    return replace(_weight("lm_head", rows, cols), maps_to_vocabulary=True)


# -- Llama and everything descended from it --------------------------------------------------------


def _decoder(shape: Decoder, expert_parallel: int) -> Iterator[ParamSpec]:
    head = "lm_head.weight" if shape.ties_head else ""
    yield _embedding("model.embed_tokens", shape.vocab, shape.hidden, module_type=shape.embedding_class, tied_head=head)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        norms = [_rms_norm(f"{layer}.{norm}", shape.hidden, shape.classes) for norm in shape.norms]
        attention = _attention(f"{layer}.self_attn", shape)
        if shape.experts is not None and number in shape.experts.layers:
            feed_forward = _expert_layer(f"{layer}.mlp", shape, shape.experts, expert_parallel)
        else:
            feed_forward = _gated(f"{layer}.mlp", shape, shape.intermediate)
        if shape.classes:
            yield from (*attention, *feed_forward, *norms)
        else:
            yield from (*norms[:1], *attention, *norms[1:], *feed_forward)
    yield _rms_norm("model.norm", shape.hidden, shape.classes)
    if not shape.ties_head:
        yield _head(shape.vocab, shape.hidden)


def _attention(fqn: str, shape: Decoder) -> Iterator[ParamSpec]:
    if isinstance(shape.attention, Latent):
        return _latent(fqn, shape.attention, shape)
    return _grouped_query(fqn, shape.attention, shape)


def _grouped_query(fqn: str, attention: GroupedQuery, shape: Decoder) -> Iterator[ParamSpec]:
    query, key = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    if shape.fused:
        sizes = (query, key, key)
        projections = [*_linear(f"{fqn}.qkv_proj", query + 2 * key, shape.hidden, sizes, bias=attention.qkv_bias)]
    else:
        projections = [
            param
            for leaf, rows in (("q", query), ("k", key), ("v", key))
            for param in _linear(f"{fqn}.{leaf}_proj", rows, shape.hidden, bias=attention.qkv_bias)
        ]
    norms = []
    if attention.qk_norm != "none":
        widths = (attention.head_dim, attention.head_dim) if attention.qk_norm == "head" else (query, key)
        norms = [_rms_norm(f"{fqn}.{leaf}_norm", size, shape.classes) for leaf, size in zip("qk", widths, strict=True)]
    output = [*_linear(f"{fqn}.o_proj", shape.hidden, query, bias=attention.out_bias)]
    if not shape.classes:
        yield from (*projections, *norms, *output)
    elif shape.fused:  # Phi-3 registers its output first
        yield from (*output, *projections, *norms)
    else:
        yield from (*projections, *output, *norms)


def _latent(fqn: str, latent: Latent, shape: Decoder) -> Iterator[ParamSpec]:
    """The training form orthogonalises both latent projections whole, as training systems do; the library form takes
    them apart, as live models are."""
    query = latent.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield from _linear(f"{fqn}.q_proj", query, shape.hidden)
    else:
        yield from _linear(f"{fqn}.q_a_proj", latent.q_rank, shape.hidden, bias=latent.bias)
        yield _rms_norm(f"{fqn}.q_a_layernorm", latent.q_rank, shape.classes)
        yield from _linear(f"{fqn}.q_b_proj", query, latent.q_rank)
    apart = (latent.kv_rank, latent.rope_dim) if shape.classes else ()
    rows = latent.kv_rank + latent.rope_dim
    yield from _linear(f"{fqn}.kv_a_proj_with_mqa", rows, shape.hidden, apart, bias=latent.bias)
    yield _rms_norm(f"{fqn}.kv_a_layernorm", latent.kv_rank, shape.classes)
    up = (latent.heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    sizes = (latent.nope_dim, latent.value_dim)
    yield _weight(f"{fqn}.kv_b_proj", *up, interleaved_rows(up, latent.heads, sizes) if shape.classes else None)
    yield from _linear(f"{fqn}.o_proj", shape.hidden, latent.heads * latent.value_dim, bias=latent.bias)


def _gated(fqn: str, shape: Decoder, intermediate: int) -> Iterator[ParamSpec]:
    """Gate, up and down."""
    if shape.fused:
        sizes = (intermediate, intermediate)
        yield from _linear(f"{fqn}.gate_up_proj", 2 * intermediate, shape.hidden, sizes, bias=shape.mlp_bias)
    else:
        for leaf in ("gate", "up"):
            yield from _linear(f"{fqn}.{leaf}_proj", intermediate, shape.hidden, bias=shape.mlp_bias)
    yield from _linear(f"{fqn}.down_proj", shape.hidden, intermediate, bias=shape.mlp_bias)


def _expert_layer(fqn: str, shape: Decoder, experts: Experts, expert_parallel: int) -> Iterator[ParamSpec]:
    router = [replace(_weight(f"{fqn}.gate", experts.count, shape.hidden), routes_to=experts.count)]
    if experts.has_balance_bias:
        # Moved by the load balancer and never by a gradient, so it is frozen for the optimizer.
        bias = f"{fqn}.gate.e_score_correction_bias"
        router.append(ParamSpec(fqn=bias, shape=(experts.count,), trainable=False, module_type="TopkRouter"))
    routed = _routed(f"{fqn}.experts", shape, experts, expert_parallel)
    yield from (*router, *routed) if experts.router_first else (*routed, *router)
    if experts.shared_intermediate:
        yield from _gated(f"{fqn}.{experts.shared_name}", shape, experts.shared_intermediate)
    if experts.gates_shared:
        yield from _linear(f"{fqn}.{experts.shared_name}_gate", 1, shape.hidden)


def _routed(fqn: str, shape: Decoder, experts: Experts, expert_parallel: int) -> Iterator[ParamSpec]:
    """The stacks of the routed experts that one rank holds."""
    local, width = experts.count // expert_parallel, experts.intermediate
    down = (local, shape.hidden, width)
    stacks: tuple[tuple[str, tuple[int, int, int], Split | None], ...]
    if shape.classes:
        both = (local, 2 * width, shape.hidden)
        stacks = (("gate_up_proj", both, stack(both, sizes=(width, width))), ("down_proj", down, stack(down)))
    else:
        wide = (local, width, shape.hidden)
        stacks = (("w1", wide, None), ("w2", down, None), ("w3", wide, None))
    for leaf, size, split in stacks:
        yield ParamSpec(
            fqn=f"{fqn}.{leaf}",
            shape=size,
            module_type=f"{shape.classes}Experts" if shape.classes else "GroupedExperts",
            split=split,
            split_is_known=split is not None,
            domain=EXPERT_DOMAIN if expert_parallel > 1 else "dense",
        )


# -- older families --------------------------------------------------------------------------------


def _gpt2(shape: Gpt2) -> Iterator[ParamSpec]:
    width, inner = shape.hidden, shape.inner
    head = "lm_head.weight" if shape.ties_head else ""
    yield _embedding("transformer.wte", shape.vocab, width, tied_head=head)
    yield _embedding("transformer.wpe", shape.positions, width)
    for layer in (f"transformer.h.{number}" for number in range(shape.layers)):
        yield from _layer_norm(f"{layer}.ln_1", width)
        yield from _either_way(f"{layer}.attn.c_attn", 3 * width, width, (width, width, width), shape)
        yield from _either_way(f"{layer}.attn.c_proj", width, width, (), shape)
        yield from _layer_norm(f"{layer}.ln_2", width)
        yield from _either_way(f"{layer}.mlp.c_fc", inner, width, (), shape)
        yield from _either_way(f"{layer}.mlp.c_proj", width, inner, (), shape)
    yield from _layer_norm("transformer.ln_f", width)
    if not shape.ties_head:
        yield _head(shape.vocab, width)


def _either_way(fqn: str, rows: int, cols: int, blocks: tuple[int, ...], shape: Gpt2) -> Iterator[ParamSpec]:
    """A linear layer with bias, stored as the model stores it; rows are outputs."""
    if not shape.transposed:
        yield from _linear(fqn, rows, cols, blocks, bias=True)
        return
    stored = _weight(fqn, cols, rows, transposed((cols, rows), blocks))
    yield replace(stored, module_type="Conv1D")
    yield _bias(fqn, rows, "Conv1D")


def _gpt_neox(shape: GptNeox) -> Iterator[ParamSpec]:
    width, inner = shape.hidden, shape.intermediate
    qkv = (3 * width, width)
    head = (width // shape.heads,) * 3
    yield _embedding("gpt_neox.embed_in", shape.vocab, width, tied_head="lm_head.weight" if shape.ties_head else "")
    for layer in (f"gpt_neox.layers.{number}" for number in range(shape.layers)):
        yield from _layer_norm(f"{layer}.input_layernorm", width)
        yield from _layer_norm(f"{layer}.post_attention_layernorm", width)
        yield _weight(f"{layer}.attention.query_key_value", *qkv, interleaved_rows(qkv, shape.heads, head))
        if shape.attention_bias:
            yield _bias(f"{layer}.attention.query_key_value", 3 * width)
        yield from _linear(f"{layer}.attention.dense", width, width, bias=shape.attention_bias)
        yield from _linear(f"{layer}.mlp.dense_h_to_4h", inner, width, bias=True)
        yield from _linear(f"{layer}.mlp.dense_4h_to_h", width, inner, bias=True)
    yield from _layer_norm("gpt_neox.final_layer_norm", width)
    if not shape.ties_head:
        yield _head(shape.vocab, width)

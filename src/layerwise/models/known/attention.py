"""How attention fuses query, key and value: one after the other, head by head, in groups, from a latent."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from layerwise.models.known.sizes import (
    Describe,
    blocks,
    flag_of,
    head_dim_of,
    pair_of,
    shape_of,
    size_of,
    those_there,
    triple_of,
    wide_of,
)
from layerwise.routing.split import Split, interleaved_rows, row_blocks, transposed, whole


def torch_attention(module: nn.Module) -> Mapping[str, Split]:
    """torch's own attention keeps query, key and value one after the other, or apart where their widths differ."""
    shape = shape_of(module, "in_proj_weight")
    if shape:
        return {"in_proj_weight": row_blocks(shape, (shape[0] // 3,) * 3)}
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return {name: whole(shape) for name in names if (shape := shape_of(module, name))}


def conv1d_attention(module: nn.Module) -> Mapping[str, Split]:
    """GPT-2: (in, out) storage; query, key and value (in cross attention: key and value) one after the other."""
    rows, cols = pair_of(module, "c_attn.weight")
    width = size_of(module, "embed_dim", "split_size")
    return {"c_attn.weight": transposed((rows, cols), (width,) * (cols // width))}


def head_by_head(name: str) -> Describe:
    """Query, key and value of the first head, then of the second, and so on."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = pair_of(module, name)
        head = head_dim_of(module)
        return {name: interleaved_rows(shape, shape[0] // (3 * head), (head,) * 3)}

    return describe


def grouped_query(name: str) -> Describe:
    """All queries, all keys, all values, with fewer heads for the latter two."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = pair_of(module, name)
        head = head_dim_of(module)
        query = size_of(module, "num_heads", "num_attention_heads") * head
        shared = size_of(module, "num_key_value_heads") * head
        return {name: row_blocks(shape, (query, shared, shared))}

    return describe


def levit(name: str, *parts: str) -> Describe:
    """Head by head queries, keys and values, of which the last are wider."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        key, ratio = size_of(module, "key_dim"), size_of(module, "attention_ratio")
        sizes = tuple(ratio * key if part == "values" else key for part in parts)
        return {name: interleaved_rows(pair_of(module, name), size_of(module, "num_attention_heads"), sizes)}

    return describe


def separable_attention(module: nn.Module) -> Mapping[str, Split]:
    """MobileViT 2: one score, keys and values."""
    name = "qkv_proj.convolution.weight"
    shape = wide_of(module, name)
    return {name: row_blocks(shape, (1, shape[1], shape[1]))}


def falcon(module: nn.Module) -> Mapping[str, Split]:
    """Three layouts: groups of queries with their key and value; head by head; all queries, then one key and value."""
    name = "query_key_value.weight"
    shape = pair_of(module, name)
    head, heads = head_dim_of(module), size_of(module, "num_heads")
    if flag_of(module, "new_decoder_architecture"):
        groups = size_of(module, "num_kv_heads")
        return {name: interleaved_rows(shape, groups, (heads // groups * head, head, head))}
    if flag_of(module, "multi_query"):
        return {name: row_blocks(shape, (heads * head, head, head))}
    return {name: interleaved_rows(shape, heads, (head,) * 3)}


def query_groups(module: nn.Module) -> Mapping[str, Split]:
    """torchtitan: a group of queries with their key and value, then the next group."""
    shape, head = pair_of(module, "wqkv.weight"), size_of(module, "head_dim")
    queries = size_of(module, "heads_per_kv")
    return {"wqkv.weight": interleaved_rows(shape, shape[0] // ((queries + 2) * head), (queries * head, head, head))}


def bigcode(module: nn.Module) -> Mapping[str, Split]:
    """Multi-query keeps one key and one value after all queries; multi-head goes head by head."""
    name = "c_attn.weight"
    shape = pair_of(module, name)
    head, kv = size_of(module, "head_dim"), size_of(module, "kv_dim")
    if flag_of(module, "is_cross_attention"):
        return {name: row_blocks(shape, (shape[0] // 2,) * 2)}
    if flag_of(module, "multi_query"):
        return {name: row_blocks(shape, (size_of(module, "embed_dim"), kv, kv))}
    return {name: interleaved_rows(shape, size_of(module, "num_heads"), (head,) * 3)}


def latent_attention(module: nn.Module) -> Mapping[str, Split]:
    """MLA: the down-projection makes the latent and the shared rotary key; the up-projection makes each head's key and
    value. The query's two parts are only set apart for the rotation and joined again: they are one matrix."""
    if not all(shape_of(module, f"{name}.weight") for name in ("kv_a_proj_with_mqa", "kv_b_proj")):
        return {}
    latent, rotary = size_of(module, "kv_lora_rank"), size_of(module, "qk_rope_head_dim")
    key, value = size_of(module, "qk_nope_head_dim"), size_of(module, "v_head_dim")
    up = pair_of(module, "kv_b_proj.weight")
    return {
        "kv_a_proj_with_mqa.weight": row_blocks(
            pair_of(module, "kv_a_proj_with_mqa.weight"), those_there(latent, rotary)
        ),
        "kv_b_proj.weight": interleaved_rows(up, up[0] // (key + value), those_there(key, value)),
    }


def query_and_gate(module: nn.Module) -> Mapping[str, Split]:
    """Each head's query is followed by the gate of its output."""
    shape, head = pair_of(module, "q_proj.weight"), head_dim_of(module)
    heads = size_of(module, "num_attention_heads", "num_heads")
    if shape[0] != 2 * heads * head:  # without a gate
        return {}
    return {"q_proj.weight": interleaved_rows(shape, heads, (head, head))}


def deberta(module: nn.Module) -> Mapping[str, Split]:
    """The first version has query, key and value head by head; the second has them apart."""
    if not shape_of(module, "in_proj.weight"):
        return {}
    shape, heads = pair_of(module, "in_proj.weight"), size_of(module, "num_attention_heads")
    return {"in_proj.weight": interleaved_rows(shape, heads, (shape[0] // (3 * heads),) * 3)}


def query_with_gate(module: nn.Module) -> Mapping[str, Split]:
    """Latent attention whose queries come with a gate of each head's output."""
    shape, query, gate = (
        pair_of(module, "q_gate_proj.weight"),
        size_of(module, "qk_head_dim"),
        size_of(module, "v_head_dim"),
    )
    found = interleaved_rows(shape, shape[0] // (query + gate), (query, gate))
    return {**latent_attention(module), "q_gate_proj.weight": found}


def codegen(module: nn.Module) -> Mapping[str, Split]:
    """Query, value and key in four groups of heads: as many accelerators as it was first trained on."""
    shape = pair_of(module, "qkv_proj.weight")
    return {"qkv_proj.weight": interleaved_rows(shape, 4, (shape[0] // 12,) * 3)}


def first_gpt(module: nn.Module) -> Mapping[str, Split]:
    """Its attention is called just that: known by what it holds."""
    width, shape = getattr(module, "split_size", None), shape_of(module, "c_attn.weight")
    if not isinstance(width, int) or len(shape) != 2 or shape[1] != 3 * width:
        return latent_attention(module)
    return {"c_attn.weight": transposed((shape[0], shape[1]), (width,) * 3)}


def first_vision(module: nn.Module) -> Mapping[str, Split]:
    """Qwen2-VL's is called just that: known by what it holds."""
    width, shape = getattr(module, "dim", None), shape_of(module, "qkv.weight")
    if not isinstance(width, int) or shape != (3 * width, width) or getattr(module, "num_key_value_groups", None) != 1:
        return latent_attention(module)
    return blocks("qkv.weight", 3)(module)


def three_if_fused(module: nn.Module) -> Mapping[str, Split]:
    """LayoutLM 2 has query, key and value in one, or apart, as its config says."""
    return blocks("qkv_linear.weight", 3)(module) if shape_of(module, "qkv_linear.weight") else {}


def groups_apart(module: nn.Module) -> Mapping[str, Split]:
    """A linear layer for each group of heads, one below the other."""
    rows, cols = pair_of(module, "weight")
    groups = size_of(module, "n_groups")
    return {"weight": Split(grid=(groups, rows // groups, cols), roles="arc")}


def axes_of_heads(*inputs: str, outputs: tuple[str, ...] = ()) -> Describe:
    """Weights of three dims (width, heads, size) that are one matrix each: from the width, or onto it."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        found = {}
        for name in (*inputs, *outputs):
            width, heads, size = triple_of(shape_of(module, name))
            found[name] = Split(grid=(width, heads * size), roles="cr" if name in inputs else "rc")
        return found

    return describe


def bare_projection(module: nn.Module) -> Mapping[str, Split]:
    """X-CLIP's projection of prompts is a param of the model itself, stored (in, out)."""
    return {"prompts_visual_projection": transposed(pair_of(module, "prompts_visual_projection"))}

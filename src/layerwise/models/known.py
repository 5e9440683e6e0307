"""Module classes whose fused weights we know how to split, by class name, so that their library need not be imported.

Each entry follows the lines of the class's own forward that take the projection's output apart; tests/hf compares the
two. Sizes are read from the module or from its `config`, never guessed from the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from layerwise.models.names import named_children, unwrapped
from layerwise.routing.split import Split, interleaved_rows, row_blocks, stack, transposed, whole

Describe = Callable[[nn.Module], Mapping[str, Split]]


def _size(module: nn.Module, *names: str) -> int:
    """A size by any of these names, from the module or from its config."""
    for source in (module, getattr(module, "config", None)):
        for name in names:
            found = getattr(source, name, None)
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    raise ValueError(f"neither it nor its config has {' or '.join(repr(name) for name in names)}.")


def _flag(module: nn.Module, name: str) -> bool:
    return bool(getattr(module, name, getattr(getattr(module, "config", None), name, False)))


def _shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """The shape of the param of that name, also one of a child that an adapter has wrapped; empty if there is none."""
    path, _, leaf = name.rpartition(".")
    holder: object = module
    for part in path.split(".") if path else ():
        holder = getattr(holder, part, None)
    holder = getattr(holder, "base_layer", holder)
    return tuple(getattr(getattr(holder, leaf, None), "shape", ()))


def _pair(module: nn.Module, name: str) -> tuple[int, int]:
    shape = _shape(module, name)
    if len(shape) != 2:
        raise ValueError(f"it has no 2-D param {name!r}.")
    return shape[0], shape[1]


def _wide(module: nn.Module, name: str) -> tuple[int, ...]:
    shape = _shape(module, name)
    if len(shape) < 2:
        raise ValueError(f"it has no param {name!r} of two or more dims.")
    return shape


def _triple(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"its experts have shape {shape}, not three dims.")
    return shape[0], shape[1], shape[2]


def _head_dim(module: nn.Module) -> int:
    try:
        return _size(module, "head_dim", "head_size")
    except ValueError:
        return _size(module, "hidden_size") // _size(module, "num_attention_heads")


def _torch_attention(module: nn.Module) -> Mapping[str, Split]:
    """torch's own attention keeps query, key and value one after the other, or apart where their widths differ."""
    shape = _shape(module, "in_proj_weight")
    if shape:
        return {"in_proj_weight": row_blocks(shape, (shape[0] // 3,) * 3)}
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return {name: whole(shape) for name in names if (shape := _shape(module, name))}


def _recurrent(gates: int) -> Describe:
    """torch's own recurrent layers: the gates of each layer and direction one after the other, and the projection of the
    hidden state, which has none."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        found = {}
        for name, param in module.named_parameters(recurse=False):
            if name.startswith(("weight_ih", "weight_hh")):
                found[name] = row_blocks(tuple(param.shape), (param.shape[0] // gates,) * gates)
            elif name.startswith("weight_hr"):
                found[name] = whole(tuple(param.shape))
        return found

    return describe


def _conv1d_attention(module: nn.Module) -> Mapping[str, Split]:
    """GPT-2: (in, out) storage; query, key and value (in cross attention: key and value) one after the other."""
    rows, cols = _pair(module, "c_attn.weight")
    width = _size(module, "embed_dim", "split_size")
    return {"c_attn.weight": transposed((rows, cols), (width,) * (cols // width))}


def _head_by_head(name: str) -> Describe:
    """Query, key and value of the first head, then of the second, and so on."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = _pair(module, name)
        head = _head_dim(module)
        return {name: interleaved_rows(shape, shape[0] // (3 * head), (head,) * 3)}

    return describe


def _grouped_query(name: str) -> Describe:
    """All queries, all keys, all values, with fewer heads for the latter two."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = _pair(module, name)
        head = _head_dim(module)
        query = _size(module, "num_heads", "num_attention_heads") * head
        shared = _size(module, "num_key_value_heads") * head
        return {name: row_blocks(shape, (query, shared, shared))}

    return describe


def _blocks(name: str, count: int, of: Callable[[nn.Module, str], tuple[int, ...]] = _pair) -> Describe:
    """Equal row blocks one after the other; `of` says what dims the param may have."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = of(module, name)
        return {name: row_blocks(shape, (shape[0] // count,) * count)}

    return describe


def _gated_convolution(name: str) -> Describe:
    """A convolution onto twice the channels that come out, values and then gates, where the module has one."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = _shape(module, name)
        is_gated = len(shape) == 3 and shape[0] == 2 * shape[1]
        return {name: row_blocks(shape, (shape[0] // 2,) * 2)} if is_gated else {}

    return describe


def _levit(name: str, *parts: str) -> Describe:
    """Head by head queries, keys and values, of which the last are wider."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        key, ratio = _size(module, "key_dim"), _size(module, "attention_ratio")
        sizes = tuple(ratio * key if part == "values" else key for part in parts)
        return {name: interleaved_rows(_pair(module, name), _size(module, "num_attention_heads"), sizes)}

    return describe


def _focal(module: nn.Module) -> Mapping[str, Split]:
    """Queries, context, and a gate for each level and for all of them together."""
    shape = _pair(module, "projection_in.weight")
    return {"projection_in.weight": row_blocks(shape, (shape[1], shape[1], *(1,) * (shape[0] - 2 * shape[1])))}


def _separable_attention(module: nn.Module) -> Mapping[str, Split]:
    """MobileViT 2: one score, keys and values."""
    name = "qkv_proj.convolution.weight"
    shape = _wide(module, name)
    return {name: row_blocks(shape, (1, shape[1], shape[1]))}


def _subsampler(module: nn.Module) -> Mapping[str, Split]:
    """Convolutions one after the other, each with values and gates for the next one."""
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters() if name.endswith(".weight")}
    return {name: row_blocks(shape, (shape[0] // 2,) * 2) for name, shape in shapes.items() if len(shape) == 3}


def _falcon(module: nn.Module) -> Mapping[str, Split]:
    """Three layouts: groups of queries with their key and value; head by head; all queries, then one key and value."""
    name = "query_key_value.weight"
    shape = _pair(module, name)
    head, heads = _head_dim(module), _size(module, "num_heads")
    if _flag(module, "new_decoder_architecture"):
        groups = _size(module, "num_kv_heads")
        return {name: interleaved_rows(shape, groups, (heads // groups * head, head, head))}
    if _flag(module, "multi_query"):
        return {name: row_blocks(shape, (heads * head, head, head))}
    return {name: interleaved_rows(shape, heads, (head,) * 3)}


def _bigcode(module: nn.Module) -> Mapping[str, Split]:
    """Multi-query keeps one key and one value after all queries; multi-head goes head by head."""
    name = "c_attn.weight"
    shape = _pair(module, name)
    head, kv = _size(module, "head_dim"), _size(module, "kv_dim")
    if _flag(module, "is_cross_attention"):
        return {name: row_blocks(shape, (shape[0] // 2,) * 2)}
    if _flag(module, "multi_query"):
        return {name: row_blocks(shape, (_size(module, "embed_dim"), kv, kv))}
    return {name: interleaved_rows(shape, _size(module, "num_heads"), (head,) * 3)}


def _latent_attention(module: nn.Module) -> Mapping[str, Split]:
    """MLA: the down-projection makes the latent and the shared rotary key; the up-projection makes each head's key and
    value. The query's two parts are only set apart for the rotation and joined again: they are one matrix."""
    if not all(_shape(module, f"{name}.weight") for name in ("kv_a_proj_with_mqa", "kv_b_proj")):
        return {}
    latent, rotary = _size(module, "kv_lora_rank"), _size(module, "qk_rope_head_dim")
    key, value = _size(module, "qk_nope_head_dim"), _size(module, "v_head_dim")
    up = _pair(module, "kv_b_proj.weight")
    return {
        "kv_a_proj_with_mqa.weight": row_blocks(_pair(module, "kv_a_proj_with_mqa.weight"), _there(latent, rotary)),
        "kv_b_proj.weight": interleaved_rows(up, up[0] // (key + value), _there(key, value)),
    }


def _there(*sizes: int) -> tuple[int, ...]:
    """Sizes of the blocks that there are: keys may have no part that is rotated, or nothing else."""
    return tuple(size for size in sizes if size)


def _query_and_gate(module: nn.Module) -> Mapping[str, Split]:
    """Each head's query is followed by the gate of its output."""
    shape, head = _pair(module, "q_proj.weight"), _head_dim(module)
    heads = _size(module, "num_attention_heads", "num_heads")
    if shape[0] != 2 * heads * head:  # without a gate
        return {}
    return {"q_proj.weight": interleaved_rows(shape, heads, (head, head))}


def _delta_net(module: nn.Module) -> Mapping[str, Split]:
    """Gated delta nets: by key head, its query, key, values and gates; likewise the two rates of its value heads. Or query,
    key and value one after the other."""
    heads, groups = _size(module, "num_v_heads"), _size(module, "num_k_heads")
    key, value = _size(module, "head_k_dim"), heads // groups * _size(module, "head_v_dim")
    found = {}
    if shape := _shape(module, "in_proj_qkvz.weight"):
        found["in_proj_qkvz.weight"] = interleaved_rows((shape[0], shape[1]), groups, (key, key, value, value))
    if shape := _shape(module, "in_proj_ba.weight"):
        found["in_proj_ba.weight"] = interleaved_rows((shape[0], shape[1]), groups, (heads // groups,) * 2)
    if shape := _shape(module, "in_proj_qkv.weight"):
        found["in_proj_qkv.weight"] = row_blocks(shape, (groups * key, groups * key, groups * value))
    return found


def _deberta(module: nn.Module) -> Mapping[str, Split]:
    """The first version has query, key and value head by head; the second has them apart."""
    if not _shape(module, "in_proj.weight"):
        return {}
    shape, heads = _pair(module, "in_proj.weight"), _size(module, "num_attention_heads")
    return {"in_proj.weight": interleaved_rows(shape, heads, (shape[0] // (3 * heads),) * 3)}


def _rows_of_experts(module: nn.Module) -> Mapping[str, Split]:
    """DBRX: the experts' weights one below the other; the last of the three is stored transposed."""
    experts = _size(module, "moe_num_experts")
    found = {}
    for name, roles in (("w1", "arc"), ("v1", "arc"), ("w2", "acr")):
        rows, cols = _pair(module, name)
        found[name] = Split(grid=(experts, rows // experts, cols), roles=roles)
    return found


def _parallel_experts(gated: bool) -> Describe:
    """JetMoE: stacked experts, whose first layer makes gate and up, or the queries of attention."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        first, last = (_triple(_shape(module, f"{name}.weight")) for name in ("input_linear", "output_linear"))
        halves = (first[1] // 2,) * 2 if gated else ()
        return {"input_linear.weight": stack(first, sizes=halves), "output_linear.weight": stack(last)}

    return describe


def _query_with_gate(module: nn.Module) -> Mapping[str, Split]:
    """Latent attention whose queries come with a gate of each head's output."""
    shape, query, gate = _pair(module, "q_gate_proj.weight"), _size(module, "qk_head_dim"), _size(module, "v_head_dim")
    found = interleaved_rows(shape, shape[0] // (query + gate), (query, gate))
    return {**_latent_attention(module), "q_gate_proj.weight": found}


def _codegen(module: nn.Module) -> Mapping[str, Split]:
    """Query, value and key in four groups of heads: as many accelerators as it was first trained on."""
    shape = _pair(module, "qkv_proj.weight")
    return {"qkv_proj.weight": interleaved_rows(shape, 4, (shape[0] // 12,) * 3)}


def _first_gpt(module: nn.Module) -> Mapping[str, Split]:
    """Its attention is called just that: known by what it holds."""
    width, shape = getattr(module, "split_size", None), _shape(module, "c_attn.weight")
    if not isinstance(width, int) or len(shape) != 2 or shape[1] != 3 * width:
        return _latent_attention(module)
    return {"c_attn.weight": transposed((shape[0], shape[1]), (width,) * 3)}


def _first_vision(module: nn.Module) -> Mapping[str, Split]:
    """Qwen2-VL's is called just that: known by what it holds."""
    width, shape = getattr(module, "dim", None), _shape(module, "qkv.weight")
    if not isinstance(width, int) or shape != (3 * width, width) or getattr(module, "num_key_value_groups", None) != 1:
        return _latent_attention(module)
    return _blocks("qkv.weight", 3)(module)


def _three_if_fused(module: nn.Module) -> Mapping[str, Split]:
    """LayoutLM 2 has query, key and value in one, or apart, as its config says."""
    return _blocks("qkv_linear.weight", 3)(module) if _shape(module, "qkv_linear.weight") else {}


def _rows_of_layers(module: nn.Module) -> Mapping[str, Split]:
    """A projection whose rows belong to the layers of the model, one after the other."""
    name = "per_layer_model_projection.weight"
    shape, each = _pair(module, name), _size(module, "hidden_size_per_layer_input")
    return {name: row_blocks(shape, (each,) * (shape[0] // each))}


def _kernels_of_layers(module: nn.Module) -> Mapping[str, Split]:
    """UnivNet: channels that are the kernels, or biases, of the layers of a block, one layer after the other."""
    layers = _size(module, "conv_layers")
    return {name: _blocks(name, layers, _wide)(module)[name] for name in ("kernel_conv.weight", "bias_conv.weight")}


def _bare_projection(module: nn.Module) -> Mapping[str, Split]:
    """X-CLIP's projection of prompts is a param of the model itself, stored (in, out)."""
    return {"prompts_visual_projection": transposed(_pair(module, "prompts_visual_projection"))}


def _groups_apart(module: nn.Module) -> Mapping[str, Split]:
    """A linear layer for each group of heads, one below the other."""
    rows, cols = _pair(module, "weight")
    groups = _size(module, "n_groups")
    return {"weight": Split(grid=(groups, rows // groups, cols), roles="arc")}


def _hyper_connections(module: nn.Module) -> Mapping[str, Split]:
    """Weights that collapse the streams, expand them, and mix them, where they are mixed."""
    rows, streams = _pair(module, "fn"), _size(module, "hc_mult")
    rest = rows[0] - 2 * streams
    return {"fn": row_blocks(rows, _there(streams, streams, rest))}


def _axes_of_heads(*inputs: str, outputs: tuple[str, ...] = ()) -> Describe:
    """Weights of three dims (width, heads, size) that are one matrix each: from the width, or onto it."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        found = {}
        for name in (*inputs, *outputs):
            width, heads, size = _triple(_shape(module, name))
            found[name] = Split(grid=(width, heads * size), roles="cr" if name in inputs else "rc")
        return found

    return describe


def _whole(*names: str) -> Describe:
    """Weights that are called as if they were several, and are one."""
    return lambda module: {name: whole(shape) for name in names if (shape := _shape(module, name))}


def _concatenated_experts(module: nn.Module) -> Mapping[str, Split]:
    return _expert_stacks(module, turned=False, halves=True)


def _gates_of_heads(module: nn.Module) -> Mapping[str, Split]:
    """RecurrentGemma: a matrix for each head, stored (in, out)."""
    names = ("input_gate_weight", "recurrent_gate_weight")
    return {name: stack(_triple(_shape(module, name)), transposed=True) for name in names}


def _mamba1(module: nn.Module) -> Mapping[str, Split]:
    """Input and gate; then the time step, B and C that depend on the input."""
    inner, state = _size(module, "intermediate_size"), _size(module, "ssm_state_size")
    return {
        "in_proj.weight": row_blocks(_pair(module, "in_proj.weight"), (inner, inner)),
        "x_proj.weight": row_blocks(_pair(module, "x_proj.weight"), (_size(module, "time_step_rank"), state, state)),
    }


def _mamba2(module: nn.Module) -> Mapping[str, Split]:
    """Gate, input, B, C and time step, all from one projection."""
    inner = _size(module, "intermediate_size")
    state = _size(module, "n_groups") * _size(module, "ssm_state_size")
    sizes = (inner, inner, state, state, _size(module, "num_heads"))
    return {"in_proj.weight": row_blocks(_pair(module, "in_proj.weight"), sizes)}


def _experts(module: nn.Module) -> Mapping[str, Split]:
    """Stacked experts. The module says which way round they are stored, and whether gate and up are halves or take
    turns; one that does not say is not guessed at."""
    turned, halves = getattr(module, "is_transposed", None), getattr(module, "is_concatenated", None)
    if not isinstance(turned, bool) or not isinstance(halves, bool):
        return {}
    return _expert_stacks(module, turned=turned, halves=halves)


def _expert_stacks(module: nn.Module, *, turned: bool, halves: bool) -> Mapping[str, Split]:
    found = {}
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        shape = _shape(module, name)
        if shape:
            found[name] = (
                _gate_and_up(_triple(shape), turned, halves)
                if name == "gate_up_proj"
                else stack(_triple(shape), transposed=turned)
            )
    return found


def _gate_and_up(shape: tuple[int, int, int], turned: bool, halves: bool) -> Split:
    experts, first, second = shape
    if halves:
        return stack(shape, transposed=turned, sizes=((second if turned else first) // 2,) * 2)
    if turned:
        return Split(grid=(experts, first, second // 2, 2), roles="acra")
    return Split(grid=(experts, first // 2, 2, second), roles="arac")


def _transposed_halves(module: nn.Module) -> Mapping[str, Split]:
    return _expert_stacks(module, turned=True, halves=True)


_GATE_UP = _blocks("gate_up_proj.weight", 2)
_INTERLEAVED = _head_by_head("query_key_value.weight")

_QKV_IN_THIRDS = (
    "Blip2Attention",
    "BlipAttention",
    "CohereCompassVisionAttention",
    "DeepseekOcr2SamVisionAttention",
    "Ernie4_5_VLMoeVisionAttention",
    "Florence2VisionChannelAttention",
    "Florence2VisionWindowAttention",
    "Glm4vMoeVisionAttention",
    "Glm4vVisionAttention",
    "Glm5NextVisionAttention",
    "GlmImageVisionAttention",
    "GlmOcrVisionAttention",
    "GotOcr2VisionAttention",
    "HieraMaskUnitAttention",
    "InstructBlipAttention",
    "InstructBlipVideoAttention",
    "MgpstrAttention",
    "PPFormulaNetVisionAttention",
    "PPOCRV5MobileRecAttention",
    "PPOCRV5ServerRecAttention",
    "PPOCRV6SmallRecAttention",
    "Qwen2_5_VLVisionAttention",
    "Qwen3OmniMoeVisionAttention",
    "Qwen3VLMoeVisionAttention",
    "Qwen3VLVisionAttention",
    "Qwen3_5MoeVisionAttention",
    "Qwen3_5VisionAttention",
    "Qwen4ExpVisionAttention",
    "SLANeXtVisionAttention",
    "Sam2MultiScaleAttention",
    "SamHQVisionAttention",
    "SamVisionAttention",
    "SegGptAttention",
    "TimesformerSelfAttention",
    "UnlimitedOcrSamVisionAttention",
    "VitDetAttention",
)

_KNOWN: dict[str, Describe] = {
    "MultiheadAttention": _torch_attention,
    "GPT2Attention": _conv1d_attention,
    "DecisionTransformerGPT2Attention": _conv1d_attention,
    "ImageGPTAttention": _conv1d_attention,
    "GPTBigCodeAttention": _bigcode,
    "GPTNeoXAttention": _INTERLEAVED,
    "GPTNeoXJapaneseAttention": _INTERLEAVED,
    "BloomAttention": _INTERLEAVED,
    "PersimmonAttention": _INTERLEAVED,
    "FalconAttention": _falcon,
    "Phi3Attention": _grouped_query("qkv_proj.weight"),
    "DbrxAttention": _grouped_query("Wqkv.weight"),
    "MptAttention": _blocks("Wqkv.weight", 3),
    "ModernBertAttention": _blocks("Wqkv.weight", 3),
    "ModernBertMLP": _blocks("Wi.weight", 2),
    "Phi3MLP": _GATE_UP,
    "GlmMLP": _GATE_UP,
    "Glm4MLP": _GATE_UP,
    "EsmFold2SwiGLU": _GATE_UP,
    "Zamba2MLP": _GATE_UP,
    "Glm4vTextMLP": _GATE_UP,
    "GlmImageTextMLP": _GATE_UP,
    "GlmOcrTextMLP": _GATE_UP,
    "Phi4MultimodalMLP": _GATE_UP,
    "Phi4MultimodalAudioMLP": _GATE_UP,
    "DiaMLP": _GATE_UP,
    "MambaMixer": _mamba1,
    "FalconMambaMixer": _mamba1,
    "JambaMambaMixer": _mamba1,
    "Mamba2Mixer": _mamba2,
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "Zamba2MambaMixer": _mamba2,
    "NemotronHMamba2Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "Llama4TextExperts": _transposed_halves,
    "LSTM": _recurrent(4),
    "LSTMCell": _recurrent(4),
    "GRU": _recurrent(3),
    "GRUCell": _recurrent(3),
    "RNN": _recurrent(1),
    "RNNCell": _recurrent(1),
    "Lfm2ShortConv": _blocks("in_proj.weight", 3),
    "Lfm2MoeShortConv": _blocks("in_proj.weight", 3),
    "DbrxExpertGLU": _rows_of_experts,
    "JetMoeMoE": _parallel_experts(gated=True),
    "JetMoeMoA": _parallel_experts(gated=False),
    "GraniteMoeSharedMLP": _blocks("input_linear.weight", 2),
    "GraniteMoeHybridMLP": _blocks("input_linear.weight", 2),
    "GraniteMoeSWAMLP": _blocks("input_linear.weight", 2),
    "Qwen3NextAttention": _query_and_gate,
    "Qwen3_5Attention": _query_and_gate,
    "Qwen3_5MoeAttention": _query_and_gate,
    "Qwen3NextGatedDeltaNet": _delta_net,
    "Qwen3_5GatedDeltaNet": _delta_net,
    "Qwen3_5MoeGatedDeltaNet": _delta_net,
    "Qwen4ExpTextGatedDeltaNet": _delta_net,
    "DisentangledSelfAttention": _deberta,
    "RecurrentGemmaRglru": _gates_of_heads,
    "AXK2Attention": _query_with_gate,
    "CodeGenAttention": _codegen,
    "Attention": _first_gpt,
    "DiffLlamaAttention": _blocks("v_proj.weight", 2),
    "DeepseekV4GroupedLinear": _groups_apart,
    "DeepseekV4Attention": _whole("kv_proj.weight"),
    "DeepseekV4HCACompressor": _whole("kv_proj.weight"),
    "DeepseekV4CSACompressor": _whole("kv_proj.weight"),
    "DeepseekV4Indexer": _whole("kv_proj.weight"),
    "DeepseekV4HyperConnection": _hyper_connections,
    "Glm5NextTextHyperConnection": _hyper_connections,
    "HYV4HyperConnection": _hyper_connections,
    "Conv1dSubsampler": _subsampler,
    "DFineRepNCSPELAN4": _blocks("conv1.conv.weight", 2, _wide),
    "Deimv2RepNCSPELAN5": _blocks("conv1.conv.weight", 2, _wide),
    "Deimv2CSPRepLayer": _blocks("conv1.conv.weight", 2, _wide),
    "FocalNetModulation": _focal,
    "LevitAttention": _levit("queries_keys_values.linear.weight", "queries", "keys", "values"),
    "LevitAttentionSubsample": _levit("keys_values.linear.weight", "keys", "values"),
    "MobileViTV2LinearSelfAttention": _separable_attention,
    "XLNetRelativeAttention": _axes_of_heads("q", "k", "v", "r", outputs=("o",)),
    "FunnelRelMultiheadAttention": _axes_of_heads("r_kernel"),
    "JetMoeAttention": _blocks("kv_proj.weight", 2),
    "LongcatFlashMLA": _latent_attention,
    "LongcatFlashExperts": _concatenated_experts,
    "Step3p7Experts": _concatenated_experts,
    "MiniMaxLightningAttention": _head_by_head("qkv_proj.weight"),
    "MiniMaxM3VLDenseMLP": _GATE_UP,
    "ModernBertDecoderMLP": _blocks("Wi.weight", 2),
    "MoonshineDecoderMLP": _blocks("fc1.weight", 2),
    "MoshiGatingMLP": _blocks("fc1.weight", 2),
    "Phi4MultimodalAttention": _grouped_query("qkv_proj.weight"),
    "Exaone4_5_VisionAttention": _grouped_query("qkv.weight"),
    "LayoutLMv2SelfAttention": _three_if_fused,
    "VisionAttention": _first_vision,
    "EvollaSequenceCompressorAttention": _blocks("to_kv.weight", 2),
    "GraniteSpeechConformerAttention": _blocks("to_kv.weight", 2),
    "GraniteSpeechPlusConformerAttention": _blocks("to_kv.weight", 2),
    "EmbeddingGemma2TextPLE": _rows_of_layers,
    "UnivNetKernelPredictor": _kernels_of_layers,
    "XCLIPModel": _bare_projection,
    **dict.fromkeys(_QKV_IN_THIRDS, _blocks("qkv.weight", 3)),
}
_KNOWN_BY_ENDING: dict[str, Describe] = {
    "Experts": _experts,
    "Attention": _latent_attention,
    "ConvolutionModule": _gated_convolution("pointwise_conv1.weight"),
    "AdapterLayer": _gated_convolution("conv.weight"),
}
"""Whole families that share a layout; their entries answer only if the module has what that layout needs."""


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is GPT-2's `Conv1D`: a linear layer that stores its weight (in, out)."""
    return type_before_parametrizations(module).__name__ == "Conv1D" and _shape(module, "weight") == (
        getattr(module, "nx", None),
        getattr(module, "nf", None),
    )


def _own_params(module: nn.Module) -> Iterator[nn.Parameter]:
    """The params of a module and all within it, without what an adapter has put around them."""
    holder = unwrapped(getattr(module, "base_layer", module))
    yield from holder.parameters(recurse=False)
    for _, child in named_children(holder):
        yield from _own_params(child)


def _trains(module: nn.Module) -> bool:
    """Whether one of the projections is trainable: frozen ones may be quantised, in shapes that mean nothing here."""
    return any(param.requires_grad for param in _own_params(module))


def known_splits(module: nn.Module) -> Mapping[str, Split]:
    """The splits of a module's own fused weights, by local param name; empty for a class that is not known. An error says
    what a module of a known class lacks."""
    names = [base.__name__ for base in type_before_parametrizations(module).__mro__]
    describe = next((_KNOWN[name] for name in names if name in _KNOWN), None)
    if describe is None:
        describe = next((found for end, found in _KNOWN_BY_ENDING.items() if names[0].endswith(end)), None)
    if describe is None or not _trains(module):
        return {}
    try:
        return describe(module)
    except ValueError as error:
        raise ValueError(
            f"{names[0]} is the name of a class whose fused weights are known, but this module does not fit: {error} Give it "
            "a method matrix_splits() that says how they split."
        ) from None

"""The classes that are known, by name.

Each entry follows the lines of the class's own forward that take the projection's output apart; tests/hf compares the
two. Sizes are read from the module or from its `config`, never guessed from the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from layerwise.models.known import attention, experts, mixers
from layerwise.models.known.sizes import Describe, blocks, one_each, shape_of, wide_of
from layerwise.models.names import named_children, unwrapped
from layerwise.routing.split import Split

_GATE_UP = blocks("gate_up_proj.weight", 2)
_INTERLEAVED = attention.head_by_head("query_key_value.weight")
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
    "MultiheadAttention": attention.torch_attention,
    "GPT2Attention": attention.conv1d_attention,
    "DecisionTransformerGPT2Attention": attention.conv1d_attention,
    "ImageGPTAttention": attention.conv1d_attention,
    "GPTBigCodeAttention": attention.bigcode,
    "FusedQKVLinear": attention.query_groups,
    "GPTNeoXAttention": _INTERLEAVED,
    "GPTNeoXJapaneseAttention": _INTERLEAVED,
    "BloomAttention": _INTERLEAVED,
    "PersimmonAttention": _INTERLEAVED,
    "FalconAttention": attention.falcon,
    "Phi3Attention": attention.grouped_query("qkv_proj.weight"),
    "DbrxAttention": attention.grouped_query("Wqkv.weight"),
    "MptAttention": blocks("Wqkv.weight", 3),
    "ModernBertAttention": blocks("Wqkv.weight", 3),
    "ModernBertMLP": blocks("Wi.weight", 2),
    "Phi3MLP": _GATE_UP,
    "GlmMLP": _GATE_UP,
    "Glm4MLP": _GATE_UP,
    "EsmFold2SwiGLU": _GATE_UP,
    "Zamba2MLP": mixers.adapted_gate_up,
    "Glm4vTextMLP": _GATE_UP,
    "GlmImageTextMLP": _GATE_UP,
    "GlmOcrTextMLP": _GATE_UP,
    "Phi4MultimodalMLP": _GATE_UP,
    "Phi4MultimodalAudioMLP": _GATE_UP,
    "DiaMLP": _GATE_UP,
    "MambaMixer": mixers.mamba1,
    "FalconMambaMixer": mixers.mamba1,
    "JambaMambaMixer": mixers.mamba1,
    "Mamba2Mixer": mixers.mamba2,
    "BambaMixer": mixers.mamba2,
    "FalconH1Mixer": mixers.mamba2,
    "Zamba2MambaMixer": mixers.mamba2,
    "NemotronHMamba2Mixer": mixers.mamba2,
    "GraniteMoeHybridMambaLayer": mixers.mamba2,
    "Llama4TextExperts": experts.transposed_halves,
    "LSTM": mixers.recurrent(4),
    "LSTMCell": mixers.recurrent(4),
    "GRU": mixers.recurrent(3),
    "GRUCell": mixers.recurrent(3),
    "RNN": mixers.recurrent(1),
    "RNNCell": mixers.recurrent(1),
    "Lfm2ShortConv": blocks("in_proj.weight", 3),
    "Lfm2MoeShortConv": blocks("in_proj.weight", 3),
    "DbrxExpertGLU": experts.rows_of_experts,
    "JetMoeMoE": experts.parallel_experts(gated=True),
    "JetMoeMoA": experts.parallel_experts(gated=False),
    "GraniteMoeSharedMLP": blocks("input_linear.weight", 2),
    "GraniteMoeHybridMLP": blocks("input_linear.weight", 2),
    "GraniteMoeSWAMLP": blocks("input_linear.weight", 2),
    "Qwen3NextAttention": attention.query_and_gate,
    "Qwen3_5Attention": attention.query_and_gate,
    "Qwen3_5MoeAttention": attention.query_and_gate,
    "Qwen3NextGatedDeltaNet": mixers.delta_net,
    "Qwen3_5GatedDeltaNet": mixers.delta_net,
    "Qwen3_5MoeGatedDeltaNet": mixers.delta_net,
    "Qwen4ExpTextGatedDeltaNet": mixers.delta_net,
    "DisentangledSelfAttention": attention.deberta,
    "RecurrentGemmaRglru": mixers.gates_of_heads,
    "AXK2Attention": attention.query_with_gate,
    "CodeGenAttention": attention.codegen,
    "Attention": attention.first_gpt,
    "DiffLlamaAttention": blocks("v_proj.weight", 2),
    "DeepseekV4GroupedLinear": attention.groups_apart,
    "DeepseekV4Attention": one_each("kv_proj.weight"),
    "DeepseekV4HCACompressor": one_each("kv_proj.weight"),
    "DeepseekV4CSACompressor": one_each("kv_proj.weight"),
    "DeepseekV4Indexer": one_each("kv_proj.weight"),
    "DeepseekV4HyperConnection": mixers.hyper_connections,
    "Glm5NextTextHyperConnection": mixers.hyper_connections,
    "HYV4HyperConnection": mixers.hyper_connections,
    "Conv1dSubsampler": mixers.subsampler,
    "DFineRepNCSPELAN4": blocks("conv1.conv.weight", 2, wide_of),
    "Deimv2RepNCSPELAN5": blocks("conv1.conv.weight", 2, wide_of),
    "Deimv2CSPRepLayer": blocks("conv1.conv.weight", 2, wide_of),
    "FocalNetModulation": mixers.focal,
    "LevitAttention": attention.levit("queries_keys_values.linear.weight", "queries", "keys", "values"),
    "LevitAttentionSubsample": attention.levit("keys_values.linear.weight", "keys", "values"),
    "MobileViTV2LinearSelfAttention": attention.separable_attention,
    "XLNetRelativeAttention": attention.axes_of_heads("q", "k", "v", "r", outputs=("o",)),
    "FunnelRelMultiheadAttention": attention.axes_of_heads("r_kernel"),
    "JetMoeAttention": blocks("kv_proj.weight", 2),
    "LongcatFlashMLA": attention.latent_attention,
    "LongcatFlashExperts": experts.concatenated_experts,
    "Step3p7Experts": experts.concatenated_experts,
    "MiniMaxLightningAttention": attention.head_by_head("qkv_proj.weight"),
    "MiniMaxM3VLDenseMLP": _GATE_UP,
    "ModernBertDecoderMLP": blocks("Wi.weight", 2),
    "MoonshineDecoderMLP": blocks("fc1.weight", 2),
    "MoshiGatingMLP": blocks("fc1.weight", 2),
    "Phi4MultimodalAttention": attention.grouped_query("qkv_proj.weight"),
    "Exaone4_5_VisionAttention": attention.grouped_query("qkv.weight"),
    "LayoutLMv2SelfAttention": attention.three_if_fused,
    "VisionAttention": attention.first_vision,
    "EvollaSequenceCompressorAttention": blocks("to_kv.weight", 2),
    "GraniteSpeechConformerAttention": blocks("to_kv.weight", 2),
    "GraniteSpeechPlusConformerAttention": blocks("to_kv.weight", 2),
    "EmbeddingGemma2TextPLE": mixers.rows_of_layers,
    "UnivNetKernelPredictor": mixers.kernels_of_layers,
    "XCLIPModel": attention.bare_projection,
    **dict.fromkeys(_QKV_IN_THIRDS, blocks("qkv.weight", 3)),
}
_KNOWN_BY_ENDING: dict[str, Describe] = {
    "Experts": experts.stacked_experts,
    "Attention": attention.latent_attention,
    "ConvolutionModule": mixers.gated_convolution("pointwise_conv1.weight"),
    "AdapterLayer": mixers.gated_convolution("conv.weight"),
}
"""Whole families that share a layout; their entries answer only if the module has what that layout needs."""


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether it is GPT-2's `Conv1D`: a linear layer that stores its weight (in, out)."""
    return type_before_parametrizations(module).__name__ == "Conv1D" and shape_of(module, "weight") == (
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

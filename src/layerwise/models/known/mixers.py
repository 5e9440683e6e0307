"""How other layers fuse: recurrent gates, state spaces, gated convolutions, rows that belong to layers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from layerwise.models.known.sizes import Describe, blocks, pair_of, shape_of, size_of, those_there, triple_of, wide_of
from layerwise.routing.split import Split, interleaved_rows, row_blocks, stack, whole


def recurrent(gates: int) -> Describe:
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


def gated_convolution(name: str) -> Describe:
    """A convolution onto twice the channels that come out, values and then gates, where the module has one."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        shape = shape_of(module, name)
        is_gated = len(shape) == 3 and shape[0] == 2 * shape[1]
        return {name: row_blocks(shape, (shape[0] // 2,) * 2)} if is_gated else {}

    return describe


def focal(module: nn.Module) -> Mapping[str, Split]:
    """Queries, context, and a gate for each level and for all of them together."""
    shape = pair_of(module, "projection_in.weight")
    return {"projection_in.weight": row_blocks(shape, (shape[1], shape[1], *(1,) * (shape[0] - 2 * shape[1])))}


def subsampler(module: nn.Module) -> Mapping[str, Split]:
    """Convolutions one after the other, each with values and gates for the next one."""
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters() if name.endswith(".weight")}
    return {name: row_blocks(shape, (shape[0] // 2,) * 2) for name, shape in shapes.items() if len(shape) == 3}


def delta_net(module: nn.Module) -> Mapping[str, Split]:
    """Gated delta nets: by key head, its query, key, values and gates; likewise the two rates of its value heads. Or query,
    key and value one after the other."""
    heads, groups = size_of(module, "num_v_heads"), size_of(module, "num_k_heads")
    key, value = size_of(module, "head_k_dim"), heads // groups * size_of(module, "head_v_dim")
    found = {}
    if shape := shape_of(module, "in_proj_qkvz.weight"):
        found["in_proj_qkvz.weight"] = interleaved_rows((shape[0], shape[1]), groups, (key, key, value, value))
    if shape := shape_of(module, "in_proj_ba.weight"):
        found["in_proj_ba.weight"] = interleaved_rows((shape[0], shape[1]), groups, (heads // groups,) * 2)
    if shape := shape_of(module, "in_proj_qkv.weight"):
        found["in_proj_qkv.weight"] = row_blocks(shape, (groups * key, groups * key, groups * value))
    return found


def gates_of_heads(module: nn.Module) -> Mapping[str, Split]:
    """RecurrentGemma: a matrix for each head, stored (in, out)."""
    names = ("input_gate_weight", "recurrent_gate_weight")
    return {name: stack(triple_of(shape_of(module, name)), transposed=True) for name in names}


def mamba1(module: nn.Module) -> Mapping[str, Split]:
    """Input and gate; then the time step, B and C that depend on the input."""
    inner, state = size_of(module, "intermediate_size"), size_of(module, "ssm_state_size")
    return {
        "in_proj.weight": row_blocks(pair_of(module, "in_proj.weight"), (inner, inner)),
        "x_proj.weight": row_blocks(
            pair_of(module, "x_proj.weight"), (size_of(module, "time_step_rank"), state, state)
        ),
    }


def mamba2(module: nn.Module) -> Mapping[str, Split]:
    """Gate, input, B, C and time step, all from one projection."""
    inner = size_of(module, "intermediate_size")
    state = size_of(module, "n_groups") * size_of(module, "ssm_state_size")
    sizes = (inner, inner, state, state, size_of(module, "num_heads"))
    return {"in_proj.weight": row_blocks(pair_of(module, "in_proj.weight"), sizes)}


def hyper_connections(module: nn.Module) -> Mapping[str, Split]:
    """Weights that collapse the streams, expand them, and mix them, where they are mixed."""
    rows, streams = pair_of(module, "fn"), size_of(module, "hc_mult")
    rest = rows[0] - 2 * streams
    return {"fn": row_blocks(rows, those_there(streams, streams, rest))}


def adapted_gate_up(module: nn.Module) -> Mapping[str, Split]:
    """Zamba 2: gate and up, to which each layer that shares them adds a low-rank pair of its own."""
    added = getattr(module, "gate_up_proj_adapter_list", ())
    pairs = (f"gate_up_proj_adapter_list.{number}.1.weight" for number in range(len(added)))
    names = ["gate_up_proj.weight", *(name for name in pairs if shape_of(module, name))]
    return {name: blocks(name, 2)(module)[name] for name in names}


def rows_of_layers(module: nn.Module) -> Mapping[str, Split]:
    """A projection whose rows belong to the layers of the model, one after the other."""
    name = "per_layer_model_projection.weight"
    shape, each = pair_of(module, name), size_of(module, "hidden_size_per_layer_input")
    return {name: row_blocks(shape, (each,) * (shape[0] // each))}


def kernels_of_layers(module: nn.Module) -> Mapping[str, Split]:
    """UnivNet: channels that are the kernels, or biases, of the layers of a block, one layer after the other."""
    layers = size_of(module, "conv_layers")
    return {name: blocks(name, layers, wide_of)(module)[name] for name in ("kernel_conv.weight", "bias_conv.weight")}

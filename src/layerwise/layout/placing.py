"""Where fully_shard() and parallelize_module() put the params of a model, the usual way: the trainer cuts by it, the planner
prices it. Plain numbers only.

Dense params lie on a mesh (replicate, fsdp, tp), experts on one of their own over the same ranks, (replicate, fsdp * tp / ep,
ep). fully_shard() cuts the first dim of everything, tensor parallelism the outputs of some linear layers and the inputs of
others, by their names, and expert parallelism stacks of experts, by their number.
"""

from __future__ import annotations

from typing import NamedTuple

from layerwise.layout.meshes import Cut, Placed, over
from layerwise.routing.spec import EXPERT, ModuleKind, ParamSpec, ParamTable

_COLUMNS = frozenset(
    [
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "qkv",
        "query",
        "key",
        "value",
        "query_key_value",
        "c_attn",
        "wq",
        "wk",
        "wv",
        "wqkv",
        "q_b_proj",
        "kv_b_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "gate_up",
        "gate",
        "up",
        "fc1",
        "c_fc",
        "w1",
        "w3",
        "dense_h_to_4h",
    ]
)
"""Linear layers of which every rank has some outputs."""

_ROWS = frozenset(
    ["o_proj", "out_proj", "out", "wo", "c_proj", "down_proj", "down", "fc2", "w2", "dense", "dense_4h_to_h"]
)
"""Linear layers of which every rank has some inputs."""


class MeshSizes(NamedTuple):
    """How ranks are arranged."""

    replicate: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.replicate * self.fsdp * self.tp

    @property
    def experts_fsdp(self) -> int:
        """Ranks over which the experts of one expert rank are cut."""
        return self.fsdp * self.tp // self.ep


def is_stack(param: ParamSpec) -> bool:
    """Whether a param is a stack of experts."""
    return len(param.shape) == 3 and (param.domain == EXPERT or ".experts." in param.fqn)


def tensor_dim(param: ParamSpec) -> int | None:
    """The dim that tensor parallelism cuts, by the name of the layer; None for what every rank has whole."""
    if param.module_kind is ModuleKind.EMBEDDING or param.maps_to_vocabulary:
        return 0
    path, _, leaf = param.fqn.rpartition(".")
    layer = path.rpartition(".")[2]
    if param.module_kind is not ModuleKind.LINEAR or param.routes_to or (layer not in _COLUMNS and layer not in _ROWS):
        return None
    if leaf == "bias":
        return 0 if layer in _COLUMNS else None
    by_columns = 1 if param.split is not None and param.split.transposed else 0
    return by_columns if layer in _COLUMNS else 1 - by_columns


def expert_dim(shape: tuple[int, ...], sizes: MeshSizes) -> int:
    """The dim of a stack that fully_shard() cuts: the number of experts, or where ranks do not divide it the rows. It cuts no
    other dim than the first unevenly."""
    if shape[0] // sizes.ep % sizes.experts_fsdp == 0 or shape[1] % sizes.experts_fsdp != 0:
        return 0
    return 1


def placements_for(table: ParamTable, sizes: MeshSizes) -> dict[str, Placed]:
    """Every trainable param's place."""
    return {param.fqn: _placed(param, sizes) for param in table if param.trainable}


def _placed(param: ParamSpec, sizes: MeshSizes) -> Placed:
    if is_stack(param):
        dim = expert_dim(param.shape, sizes)
        after = sizes.ep if dim == 0 else 1
        return over((sizes.replicate, None), (sizes.experts_fsdp, Cut(dim, after)), (sizes.ep, Cut(0)), data_dims=2)
    dim_of_tensor = tensor_dim(param)
    cut = None if dim_of_tensor is None else Cut(dim_of_tensor)
    after = sizes.tp if dim_of_tensor == 0 else 1
    return over((sizes.replicate, None), (sizes.fsdp, Cut(0, after)), (sizes.tp, cut), data_dims=2)

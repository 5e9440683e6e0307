"""The GPT on a mesh: which of its parts torch's fully_shard() and parallelize_module() cut, and how.

Imported only where that is asked for: what it needs of torch takes long to import.
"""

from __future__ import annotations

import torch

from layerwise.comm.cutting import Meshes, Style, arrange_meshes, cut
from layerwise.comm.joining import Grid, Ranks
from layerwise.config.schema import ParallelConfig
from layerwise.layout.placing import MeshSizes
from layerwise.train.experts import Experts
from layerwise.train.model import GPT

_STYLES: dict[str, Style] = {
    "embed": "vocabulary",
    "head": "columns, gathered",
    "blocks.*.attn.qkv": "columns, to gather",
    "blocks.*.attn.out": "rows",
    "blocks.*.mlp.gate_up": "columns, to gather",
    "blocks.*.mlp.gate": "columns",
    "blocks.*.mlp.up": "columns",
    "blocks.*.mlp.down": "rows",
}
"""Norms and routers are whole on every rank of tensor parallelism, which all read the same samples."""


def arrange(ranks: Ranks, parallel: ParallelConfig) -> tuple[Grid, Meshes]:
    """All ranks as a config asks for."""
    return arrange_meshes(ranks, MeshSizes(parallel.replicate, parallel.fsdp, parallel.tp, parallel.ep))


def cut_gpt(model: GPT, meshes: Meshes, parallel: ParallelConfig, reduce_dtype: torch.dtype) -> None:
    """Cut a GPT, in place. Blocks are gathered one by one."""
    cut(
        model,
        meshes,
        units=model.blocks,
        experts=[module for module in model.modules() if isinstance(module, Experts)],
        styles=_STYLES,
        reshard_after_forward=parallel.reshard_after_forward,
        reduce_dtype=reduce_dtype,
    )

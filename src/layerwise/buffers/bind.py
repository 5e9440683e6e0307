"""From a module to a table of params: the facts that routing needs, read off module types and sharing, as plain
values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from layerwise.buffers.known import known_splits
from layerwise.dtypes import DType
from layerwise.routing.spec import ModuleKind, ParamSpec, ParamTable
from layerwise.routing.split import Split, row_blocks

_TORCH_BY_DTYPE = {
    DType.FP64: torch.float64,
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}
_DTYPE_BY_TORCH = {value: key for key, value in _TORCH_BY_DTYPE.items()}
_PARAM_DTYPES = (DType.FP32, DType.BF16, DType.FP16)

_KINDS: tuple[tuple[tuple[type[nn.Module], ...], ModuleKind], ...] = (
    ((nn.Linear, nn.Bilinear), ModuleKind.LINEAR),
    ((nn.Embedding, nn.EmbeddingBag), ModuleKind.EMBEDDING),
    ((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase), ModuleKind.NORM),
    ((_ConvNd,), ModuleKind.CONV),
)


_FUSED_NAMES = frozenset(
    {
        "qkv",
        "qkv_proj",
        "wqkv",
        "Wqkv",
        "query_key_value",
        "c_attn",
        "kv",
        "kv_proj",
        "gate_up",
        "gate_up_proj",
        "w13",
        "gate_and_up",
    }
)
"""Names that modules give to weights which are several in one."""


def torch_dtype(dtype: DType) -> torch.dtype:
    return _TORCH_BY_DTYPE[dtype]


def plain_dtype(dtype: torch.dtype, owner: str) -> DType:
    """The plan's name for a torch dtype; `owner` is named in the error."""
    found = _DTYPE_BY_TORCH.get(dtype)
    if found is None:
        raise TypeError(f"{owner} has dtype {dtype}: expected one of fp32, bf16, fp16. Convert or freeze it first.")
    return found


def _kind_of(module: nn.Module) -> ModuleKind:
    return next((kind for types, kind in _KINDS if isinstance(module, types)), ModuleKind.OTHER)


def named_trainables(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable params by fqn, one entry per tensor."""
    return {fqn: param for fqn, param in module.named_parameters() if param.requires_grad}


def _declared_splits(module: nn.Module) -> dict[str, Split]:
    """Splits of fused weights by fqn: what a module's own `matrix_splits()` says, else what is known of its class."""
    found: dict[str, Split] = {}
    for prefix, child in module.named_modules():
        declared = _declaration(child)
        if not declared:
            continue
        params = dict(child.named_parameters())
        for local, split in declared.items():
            if local not in params:
                raise ValueError(
                    f"{type(child).__name__}.matrix_splits() names {local!r}, which is no param of it. Its params: "
                    f"{', '.join(sorted(params))}."
                )
            fqn = f"{prefix}.{local}" if prefix else local
            if isinstance(split, Split):
                found[fqn] = split
            else:
                try:
                    found[fqn] = row_blocks(tuple(params[local].shape), tuple(int(size) for size in split))
                except ValueError as error:
                    raise ValueError(f"{type(child).__name__}.matrix_splits() for param {fqn!r}: {error}") from None
    return found


def _declaration(module: nn.Module) -> Mapping[str, Split | Sequence[int]]:
    splits = getattr(module, "matrix_splits", None)
    if not callable(splits):
        return known_splits(module)
    declared = splits()
    if not isinstance(declared, Mapping):
        raise TypeError(
            f"{type(module).__name__}.matrix_splits() returned {type(declared).__name__}: expected a dict from param name "
            "to a Split or row block sizes."
        )
    return declared


def _vocabulary_head(module: nn.Module) -> int | None:
    """`id` of the weight of the last linear layer, if it maps the width of an embedding back to that embedding's rows.

    Only the last one: a hidden layer may have as many rows as the vocabulary by chance.
    """
    embeddings = {tuple(child.weight.shape) for child in module.modules() if isinstance(child, nn.Embedding)}
    linears = [child for child in module.modules() if isinstance(child, nn.Linear)]
    if linears and tuple(linears[-1].weight.shape) in embeddings:
        return id(linears[-1].weight)
    return None


def _fused_name(fqn: str) -> str:
    """The part of a weight's name that says it is fused, or nothing."""
    return next((part for part in reversed(fqn.split(".")[-2:]) if part in _FUSED_NAMES), "")


def param_table(module: nn.Module) -> ParamTable:
    """All params of a module (also on the meta device), in registration order, shared tensors once with all their
    names."""
    names_by_id: dict[int, list[str]] = {}
    for fqn, param in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(param), []).append(fqn)
    modules = dict(module.named_modules(remove_duplicate=False))
    splits = _declared_splits(module)
    head = _vocabulary_head(module)
    specs = []
    for fqn, param in module.named_parameters():
        aliases = tuple(name for name in names_by_id[id(param)] if name != fqn)
        holder = modules[fqn.rpartition(".")[0]]
        dtype = (
            plain_dtype(param.dtype, f"param {fqn!r}")
            if param.requires_grad
            else _DTYPE_BY_TORCH.get(param.dtype, DType.FP32)
        )
        if param.requires_grad and dtype not in _PARAM_DTYPES:
            raise TypeError(
                f"param {fqn!r} has dtype {param.dtype}: expected one of fp32, bf16, fp16. Convert it with .float()."
            )
        specs.append(
            ParamSpec(
                fqn=fqn,
                shape=tuple(param.shape),
                dtype=dtype,
                trainable=param.requires_grad,
                module_kind=_kind_of(holder),
                module_type=type(holder).__name__,
                aliases=aliases,
                alias_kinds=tuple(_kind_of(modules[alias.rpartition(".")[0]]) for alias in aliases),
                maps_to_vocabulary=id(param) == head,
                conv_groups=holder.groups if isinstance(holder, _ConvNd) else 1,
                looks_fused=_fused_name(fqn),
                split=next((splits[name] for name in (fqn, *aliases) if name in splits), None),
            )
        )
    return ParamTable(tuple(specs))

"""Module classes whose fused weights we know how to split, by class name, so that their library need not be
imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from layerwise.routing.split import Split, row_blocks

Describe = Callable[[nn.Module], Mapping[str, Split]]


def _torch_attention(module: nn.Module) -> Mapping[str, Split]:
    """torch's own attention keeps query, key and value one after the other, unless their widths differ."""
    weight = getattr(module, "in_proj_weight", None)
    if weight is None:
        return {}
    rows, cols = weight.shape
    return {"in_proj_weight": row_blocks((rows, cols), (rows // 3,) * 3)}


_KNOWN: dict[str, Describe] = {"MultiheadAttention": _torch_attention}


def known_splits(module: nn.Module) -> Mapping[str, Split]:
    """The splits of a module's own fused weights, by local param name; empty for a class that is not known."""
    for base in type(module).__mro__:
        if base.__name__ in _KNOWN:
            return _KNOWN[base.__name__](module)
    return {}

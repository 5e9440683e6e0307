"""The largest attention logit of every head, from queries and keys, a block of logits at a time.

B: batch, H: query heads, K: key heads, G: query heads of a key head, T: queries, S: keys, E: head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BLOCK_NUMEL = 2**24
"""Most logits at once: 64 MiB in fp32, enough to keep a GPU busy and nothing against what attention itself holds."""
_MOST_ROWS = 256
"""Queries of one block: with causal attention a block computes up to half of its rows squared in vain."""


@torch.no_grad()
def max_logits(
    query: Tensor, key: Tensor, mask: Tensor | None = None, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """What softmax sees at most, per query head, (H,) in fp32; arguments as `scaled_dot_product_attention` takes them.

    Masked positions do not count; a head that has no others gets -inf. NaN is kept.
    """
    if torch.compiler.is_compiling():  # one node of the graph, not all blocks unrolled
        found: Tensor = torch.ops.layerwise.max_logits(query, key, mask, is_causal, scale)
        return found
    return _in_blocks(query, key, mask, is_causal, scale)


def _in_blocks(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    heads, num_queries, width = query.shape[-3:]
    kv_heads, num_keys = key.shape[-3], key.shape[-2]
    factor = 1.0 / math.sqrt(width) if scale is None else float(scale)
    found_H = torch.full((heads,), -math.inf, dtype=torch.float32, device=query.device)
    if query.numel() == 0 or key.numel() == 0:
        return found_H
    batch: torch.Size = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])  # type: ignore[no-untyped-call]
    query_BHTE = query.detach().expand(*batch, *query.shape[-3:]).reshape(-1, *query.shape[-3:])
    key_BKSE = key.detach().expand(*batch, *key.shape[-3:]).reshape(-1, *key.shape[-3:])
    mask_BHTS = None
    if mask is not None:
        mask_BHTS = mask.detach().expand(*batch, heads, num_queries, num_keys)
        mask_BHTS = mask_BHTS.reshape(-1, heads, num_queries, num_keys)
    rows = max(1, min(num_queries, _MOST_ROWS, _BLOCK_NUMEL // (heads * num_keys)))
    samples = max(1, _BLOCK_NUMEL // (heads * num_keys * rows))
    with torch.autocast(query.device.type, enabled=False):
        for first in range(0, query_BHTE.shape[0], samples):
            some = slice(first, first + samples)
            for start in range(0, num_queries, rows):
                stop = min(start + rows, num_queries)
                keys = min(stop, num_keys) if is_causal else num_keys
                logits = _products(query_BHTE[some, :, start:stop], key_BKSE[some, :, :keys], kv_heads)
                if is_causal:
                    # Query i sees keys up to i, whatever their numbers: torch aligns them at the top left.
                    late = (
                        torch.arange(keys, device=query.device)
                        > torch.arange(start, stop, device=query.device)[:, None]
                    )
                    logits.masked_fill_(late, -math.inf)
                logits.mul_(factor)
                if mask_BHTS is not None:
                    part = mask_BHTS[some, :, start:stop, :keys]
                    if part.dtype == torch.bool:
                        logits.masked_fill_(~part, -math.inf)
                    else:
                        logits.add_(part)
                found_H = torch.maximum(found_H, logits.amax(dim=(0, 2, 3)).float())
    return found_H


def _products(query_BHtE: Tensor, key_BKsE: Tensor, kv_heads: int) -> Tensor:
    """Queries times keys, (B, H, t, s), in fp32 at least; query heads of one key head as rows of one product."""
    batch, heads, rows, width = query_BHtE.shape
    keys = key_BKsE.shape[2]
    query = query_BHtE.reshape(batch * kv_heads, heads // kv_heads * rows, width)
    key = key_BKsE.reshape(batch * kv_heads, keys, width)
    if query.dtype.itemsize >= 4:
        product = torch.bmm(query, key.mT)
    elif query.device.type == "cuda":
        product = torch.bmm(query, key.mT, out_dtype=torch.float32)
    else:
        product = torch.bmm(query.float(), key.float().mT)
    return product.view(batch, heads, rows, keys)


@torch.library.custom_op(
    "layerwise::max_logits",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor? mask, bool is_causal, float? scale) -> Tensor",
)
def _opaque(query, key, mask, is_causal, scale):  # type: ignore[no-untyped-def]
    return _in_blocks(query, key, mask, is_causal, scale)


@_opaque.register_fake
def _(query, key, mask, is_causal, scale):  # type: ignore[no-untyped-def]
    return query.new_empty(query.shape[-3], dtype=torch.float32)

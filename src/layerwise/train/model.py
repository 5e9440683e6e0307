"""The GPT that `layerwise train` trains: pre-norm blocks, grouped-query attention with rotary positions, SwiGLU.

Shapes: B batch, T positions, D residual width, H query heads, K key heads, E head width, V vocabulary.

Modules with fused weights say how they split: a method `matrix_splits()` maps the local name of a param to the sizes of
its row blocks. The routing layer looks for that method on every module it meets, yours included, and hands each block
to Newton-Schulz as a matrix of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.config.schema import ModelShape


def rotary_angles(seq_len: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, (T, E/2) in fp32."""
    pairs_E2 = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions_T = torch.arange(seq_len, device=device, dtype=torch.float32)
    angles_TE2 = torch.outer(positions_T, base**-pairs_E2)
    return angles_TE2.cos(), angles_TE2.sin()


def rotate(x_BHTE: Tensor, cos_TE2: Tensor, sin_TE2: Tensor) -> Tensor:
    """Turn the pairs (first half, second half) of every head by their position's angle."""
    first, second = x_BHTE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_TE2 - second * sin_TE2, first * sin_TE2 + second * cos_TE2), dim=-1)
    return turned.to(x_BHTE.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with one fused weight for queries, keys and values."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        rows = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.d_model, rows, bias=False)
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        """Row blocks of the fused weight: queries, keys, values."""
        kv_rows = self.n_kv_heads * self.head_dim
        return {"qkv.weight": (self.n_heads * self.head_dim, kv_rows, kv_rows)}

    def forward(self, x_BTD: Tensor, cos_TE2: Tensor, sin_TE2: Tensor) -> Tensor:
        batch, seq_len, _ = x_BTD.shape
        heads = self.qkv(x_BTD).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)  # B, H + 2K, T, E
        q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), dim=1)
        q, k = rotate(q, cos_TE2, sin_TE2), rotate(k, cos_TE2, sin_TE2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_kv_heads != self.n_heads)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class MLP(nn.Module):
    """SwiGLU, with gate and up in one weight or in two."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.hidden, self.is_fused = shape.hidden, shape.fuse_gate_up
        if self.is_fused:
            self.gate_up = nn.Linear(shape.d_model, 2 * shape.hidden, bias=False)
        else:
            self.gate = nn.Linear(shape.d_model, shape.hidden, bias=False)
            self.up = nn.Linear(shape.d_model, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.d_model, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        """Row blocks of the fused weight: gate, up."""
        return {"gate_up.weight": (self.hidden, self.hidden)} if self.is_fused else {}

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1) if self.is_fused else (self.gate(x_BTD), self.up(x_BTD))
        narrowed: Tensor = self.down(F.silu(gate) * up)
        return narrowed


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.attn = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x_BTD: Tensor, cos_TE2: Tensor, sin_TE2: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos_TE2, sin_TE2)
        added: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return added


class GPT(nn.Module):
    """From byte tokens (B, T) to logits (B, T, V).

    >>> from layerwise.config.schema import ModelConfig, resolve_model
    >>> shape = resolve_model(ModelConfig(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, seq_len=8))
    >>> tuple(build_gpt(shape, seed=0)(torch.zeros(1, 8, dtype=torch.int64)).shape)
    (1, 8, 256)
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        # Computed here in fp32 rather than kept as a buffer: a buffer would be rounded when the model is cast to bf16.
        cos, sin = rotary_angles(tokens_BT.shape[1], self.shape.head_dim, self.shape.rope_base, tokens_BT.device)
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    @torch.no_grad()
    def init_weights_(self, seed: int) -> None:
        """Fill every param from `seed` alone, drawn on the CPU in fp32, so rank, device and dtype change nothing."""
        generator = torch.Generator().manual_seed(seed)
        output_std = self.shape.init_std / math.sqrt(2 * self.shape.n_layers)
        for fqn, param in self.named_parameters():
            if param.dim() == 1:
                param.fill_(1.0)  # gains of the norms
                continue
            std = output_std if fqn.endswith(("attn.out.weight", "mlp.down.weight")) else self.shape.init_std
            param.copy_(torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))


def build_gpt(
    shape: ModelShape, *, seed: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> GPT:
    """A GPT with its initial weights, the same on every rank for the same seed."""
    with torch.device("meta"):  # torch's own initialisation would cost time and move the global generator
        model = GPT(shape)
    model = model.to(dtype).to_empty(device=device or torch.device("cpu"))
    if shape.tie_embeddings:
        model.head.weight = model.embed.weight  # to_empty gives every name its own memory
    model.init_weights_(seed)
    return model


def next_byte_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of every sequence in nats per byte, (B,) in fp32."""
    logits_BVT = logits_BTV.float().transpose(1, 2)
    return F.cross_entropy(logits_BVT, targets_BT, reduction="none").mean(dim=1)

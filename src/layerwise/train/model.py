"""The GPT that `layerwise train` trains: pre-norm blocks, grouped-query attention with rotary positions, SwiGLU, or
experts in its place; whole, or one stage of a pipeline.

Shapes: B batch, T positions, D residual width, H query heads, K key heads, E head width, V vocabulary.

Modules with fused weights say how they split: a method `matrix_splits()` maps the local name of a param to the sizes of
its row blocks. The routing layer looks for that method on every module it meets, yours included, and hands each block
to Newton-Schulz as a matrix of its own. In the same way `attention_heads()` says which rows make the logits of which
head, for QK-clip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.dispatch import ALL_EXPERTS_HERE, ExpertRanks
from layerwise.comm.tensor_parallel import ALL_HEADS_HERE, TensorRanks
from layerwise.config.resolve import ModelShape
from layerwise.routing.heads import AttentionHeads
from layerwise.train.experts import MoE

_OUTPUT_PROJECTIONS = ("attn.out.weight", "mlp.down.weight", "mlp.experts.down")
"""What is added to the residual stream: these weights start smaller the more blocks there are."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the parts that a pipeline cuts the GPT into: number `number`, from 0, of `count`."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the output head."""
        return self.number == self.count - 1

    def blocks(self, n_layers: int) -> range:
        """Its blocks: the numbers of blocks of any two stages differ by one at most."""
        return range(n_layers * self.number // self.count, n_layers * (self.number + 1) // self.count)


WHOLE = Stage()
"""The only stage of a model that is not cut."""


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
    """Causal grouped-query attention with one fused weight for queries, keys and values; on each of several tensor-parallel
    ranks for a part of the heads."""

    def __init__(self, shape: ModelShape, tensor: TensorRanks = ALL_HEADS_HERE) -> None:
        super().__init__()
        self.tensor = tensor
        self.n_heads, self.n_kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        rows = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.d_model, rows, bias=False)
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        """Row blocks of the fused weight: queries, keys, values."""
        kv_rows = self.n_kv_heads * self.head_dim
        return {"qkv.weight": (self.n_heads * self.head_dim, kv_rows, kv_rows)}

    def attention_heads(self) -> AttentionHeads:
        """Rows of the fused weight that belong to each group of heads."""
        return AttentionHeads.fused("qkv", n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, head_dim=self.head_dim)

    def forward(self, x_BTD: Tensor, cos_TE2: Tensor, sin_TE2: Tensor) -> Tensor:
        batch, seq_len, _ = x_BTD.shape
        rows = self.tensor.whole(self.qkv(x_BTD))
        heads = rows.view(batch, seq_len, -1, self.head_dim).transpose(1, 2)  # B, H + 2K, T, E
        q, k, v = torch.split(heads, [self.n_heads, self.n_kv_heads, self.n_kv_heads], dim=1)
        if self.tensor.world > 1:
            own = self.tensor.part(self.n_heads)
            served = self.n_heads // self.n_kv_heads
            keys = slice(own.start // served, (own.stop - 1) // served + 1)
            q, k, v = q[:, own], k[:, keys], v[:, keys]
        q, k = rotate(q, cos_TE2, sin_TE2), rotate(k, cos_TE2, sin_TE2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


class MLP(nn.Module):
    """SwiGLU, with gate and up in one weight or in two; on each of several tensor-parallel ranks for a part of the width."""

    def __init__(self, shape: ModelShape, tensor: TensorRanks = ALL_HEADS_HERE) -> None:
        super().__init__()
        self.tensor = tensor
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
        if self.is_fused:
            gate, up = self.tensor.whole(self.gate_up(x_BTD)).chunk(2, dim=-1)
            own = self.tensor.part(self.hidden)
            gate, up = gate[..., own], up[..., own]
        else:
            gate, up = self.gate(x_BTD), self.up(x_BTD)
        narrowed: Tensor = self.down(F.silu(gate) * up)
        return narrowed


class Block(nn.Module):
    """Attention and an MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(self, shape: ModelShape, mlp: MLP | MoE, tensor: TensorRanks = ALL_HEADS_HERE) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.attn = Attention(shape, tensor)
        self.mlp_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
        self.mlp = mlp

    def forward(self, x_BTD: Tensor, cos_TE2: Tensor, sin_TE2: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos_TE2, sin_TE2)
        added: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return added


class GPT(nn.Module):
    """From byte tokens (B, T) to logits (B, T, V); a stage of a pipeline takes and gives the residual stream (B, T, D)
    where it is not the first or the last.

    Params have the same names in a stage as in the whole model, and experts on several ranks the same as on one.

    >>> from layerwise.config.schema import ModelConfig
    >>> from layerwise.config.resolve import resolve_model
    >>> shape = resolve_model(ModelConfig(d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, seq_len=8))
    >>> tuple(build_gpt(shape, seed=0)(torch.zeros(1, 8, dtype=torch.int64)).shape)
    (1, 8, 256)
    """

    def __init__(
        self,
        shape: ModelShape,
        stage: Stage = WHOLE,
        experts: ExpertRanks = ALL_EXPERTS_HERE,
        tensor: TensorRanks = ALL_HEADS_HERE,
        *,
        penalty_share: float = 1.0,
    ) -> None:
        super().__init__()
        self.shape, self.stage, self.expert_ranks = shape, stage, experts
        if stage.is_first:
            self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList()
        for number in stage.blocks(shape.n_layers):
            has_experts = shape.has_experts(number)
            mlp = MoE(shape, experts, tensor, penalty_share=penalty_share) if has_experts else MLP(shape, tensor)
            self.blocks.add_module(str(number), Block(shape, mlp, tensor))  # by its number in the whole model
        if stage.is_last:
            self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
            self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        self.tie_()

    def tie_(self) -> None:
        """Make the head the embedding, if they are tied and both are here."""
        if self.shape.tie_embeddings and self.stage.is_first and self.stage.is_last:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        # Computed here in fp32 rather than kept as a buffer: a buffer would be rounded when the model is cast to bf16.
        cos, sin = rotary_angles(x.shape[1], self.shape.head_dim, self.shape.rope_base, x.device)
        if self.stage.is_first:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        if self.stage.is_last:
            x = self.head(self.norm(x))
        return x

    def ties(self) -> dict[str, str]:
        """Names of weights that another stage holds a copy of, each with the param that is this stage's copy."""
        if not self.shape.tie_embeddings or self.stage.count == 1:
            return {}
        if self.stage.is_first:
            return {"embedding": "embed.weight"}
        return {"embedding": "head.weight"} if self.stage.is_last else {}

    @torch.no_grad()
    def init_weights_(self, seed: int) -> None:
        """Fill every param from `seed` alone, drawn on the CPU in fp32, so rank, device and dtype change nothing.

        The whole model is drawn and what is not here is thrown away, so stages and expert ranks change nothing either.
        """
        generator = torch.Generator().manual_seed(seed)
        output_std = self.shape.init_std / math.sqrt(2 * self.shape.n_layers)
        mine: dict[str, Tensor] = dict(self.named_parameters())
        if self.shape.tie_embeddings and self.stage.is_last:
            mine.setdefault("embed.weight", self.head.weight)  # the copy of a tied weight starts as the weight
        with torch.device("meta"):
            whole = GPT(self.shape)
        for fqn, param in whole.named_parameters():
            if param.dim() == 1:
                if fqn in mine:
                    mine[fqn].fill_(1.0)  # gains of the norms
                continue
            std = output_std if fqn.endswith(_OUTPUT_PROJECTIONS) else self.shape.init_std
            drawn = torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
            if fqn in mine:
                mine[fqn].copy_(self._local_part(fqn, drawn))

    def _local_part(self, fqn: str, whole: Tensor) -> Tensor:
        return whole.chunk(self.expert_ranks.world)[self.expert_ranks.rank] if ".experts." in fqn else whole


def build_gpt(
    shape: ModelShape,
    stage: Stage = WHOLE,
    experts: ExpertRanks = ALL_EXPERTS_HERE,
    tensor: TensorRanks = ALL_HEADS_HERE,
    *,
    seed: int,
    penalty_share: float = 1.0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> GPT:
    """A GPT, or a stage of it, with its initial weights, the same on every rank for the same seed."""
    with torch.device("meta"):  # torch's own initialisation would cost time and move the global generator
        model = GPT(shape, stage, experts, tensor, penalty_share=penalty_share)
    model = model.to(dtype).to_empty(device=device or torch.device("cpu"))
    model.tie_()  # to_empty gives every name its own memory
    model.init_weights_(seed)
    return model


def count_params(shape: ModelShape) -> int:
    """Elements of all params of the whole model, tied ones once."""
    with torch.device("meta"):
        return sum(param.numel() for param in GPT(shape).parameters())


def next_byte_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of every sequence in nats per byte, (B,) in fp32."""
    # One row for each position: with the vocabulary in the middle, as (B, V, T), a GPU takes many times as long.
    losses = F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), reduction="none")
    return losses.view_as(targets_BT).mean(dim=1)

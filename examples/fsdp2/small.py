"""A small GPT and text for it. Nothing in here knows how it will be trained."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, CONTEXT = 256, 32


class Attention(nn.Module):
    """Causal self-attention. Heads are counted by what comes out of the projections: under tensor parallelism a rank has some."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.wq, self.wk, self.wv)
        )
        return self.wo(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(width), Attention(width, head_dim)
        self.norm_2, self.mlp = nn.RMSNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, *, width: int = 64, n_blocks: int = 2, head_dim: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, head_dim) for _ in range(n_blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> Tensor:
    """The source of one of Python's own modules, a token per byte."""
    with open(argparse.__file__, "rb") as file:
        return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)


def batch(of: Tensor, number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Some places of a text, and what comes one byte later; the same for the same number."""
    starts = torch.randint(len(of) - CONTEXT - 1, (size,), generator=torch.Generator().manual_seed(number))
    windows = torch.stack([of[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]

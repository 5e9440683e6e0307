"""What the trainers here have in common: a small model, numbers to learn, rules and arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import layerwise

VOCABULARY, WIDTH, LENGTH = 64, 32, 16


class Sequences(Dataset[dict[str, Tensor]]):
    """Arithmetic sequences modulo the vocabulary; the first of them never come twice."""

    def __init__(self, count: int = 512) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first, by = index % VOCABULARY, 1 + index // VOCABULARY
        ids = (first + by * torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": ids, "labels": ids}


class Block(nn.Module):
    """An MLP that sees the token before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        before = nn.functional.pad(seen, (0, 0, 1, 0))[:, :-1]
        return x + self.down(nn.functional.gelu(self.up(torch.cat((seen, before), dim=-1))))


class Model(nn.Module):
    """Next tokens from the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def build(seed: int = 1) -> Model:
    torch.manual_seed(seed)
    return Model()


def rules(lr: float = 0.01) -> dict[str, Any]:
    """Arguments of `layerwise.Optimizer`."""
    return {"matrix": layerwise.Muon(lr=lr, weight_decay=0.1), "other": layerwise.AdamW(lr=lr)}


def arguments(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and microbatch")
    parser.add_argument("--accumulation", type=int, default=2, help="microbatches per step")
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--out", default="out", help="folder to save to, and to go on from with --resume")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fsdp", action="store_true", help="have the framework cut the model with fully_shard()")
    return parser.parse_args(argv)

"""Small facts between ranks, as JSON: no pickle on the wire, and no numpy, which torch's object collectives need."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from layerwise.comm.leaving import blocking


def gather_facts(
    facts: object, group: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> list[Any]:
    """Every rank's facts, in rank order, by way of tensors on a device (the CPU). Tuples come back as lists."""
    device = torch.device("cpu") if device is None else device
    world = dist.get_world_size(group)
    mine = torch.tensor(list(json.dumps(facts, default=repr).encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    blocking(dist.all_gather, sizes, torch.tensor([mine.numel()], device=device), group=group)
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    texts = [torch.empty_like(padded) for _ in range(world)]
    blocking(dist.all_gather, texts, padded, group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]

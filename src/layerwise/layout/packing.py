"""Placeholder packing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PackItem:
    fqn: str
    numel: int
    cost: int
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    fqn: str
    shard: int
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class PackedBucket:
    shard_numel: int
    places: tuple[Place, ...]


Packing = Literal["best", "reference", "reference-numel"]


def pack(
    items: Sequence[PackItem], *, num_shards: int, bucket_numel: int, packing: Packing
) -> tuple[PackedBucket, ...]:
    divisor = math.lcm(64, math.lcm(num_shards, 128) // num_shards)
    buckets, chunk = [], []

    def emit() -> None:
        nonlocal chunk
        if not chunk:
            return
        cursors = [0] * num_shards
        places = []
        for item in sorted(chunk, key=lambda item: (-item.numel, item.fqn)):
            shard = min(range(num_shards), key=lambda s: (cursors[s], s))
            offset = -(-cursors[shard] // 64) * 64
            places.append(Place(item.fqn, shard, offset, item.numel))
            cursors[shard] = offset + item.numel
        size = -(-max(cursors) // divisor) * divisor
        buckets.append(PackedBucket(size, tuple(sorted(places, key=lambda p: (p.shard, p.offset)))))
        chunk = []

    for item in items:
        if item.alone:
            emit()
        chunk.append(item)
        if item.alone or sum(i.numel for i in chunk) >= bucket_numel:
            emit()
    emit()
    return tuple(buckets)

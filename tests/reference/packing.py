"""The packing of the `padded` layout, slow and obvious: every shard is looked at for every param."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Param:
    name: str
    numel: int
    cost: int
    alone: bool = False


@dataclass
class Bucket:
    shard_numel: int
    at: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Shard and offset of every param."""


def up(value: int, multiple: int) -> int:
    while value % multiple:
        value += 1
    return value


def lowest(values: Sequence[int], among: Sequence[int]) -> int:
    """The first index with the least value."""
    best = among[0]
    for index in among:
        if values[index] < values[best]:
            best = index
    return best


def cut(params: Sequence[Param], shards: int, bucket_numel: int) -> list[list[Param]]:
    """Portions of params, given in backward order."""
    divisor = math.lcm(64, math.lcm(shards, 128) // shards)
    portions: list[list[Param]] = []
    portion: list[Param] = []
    for param in params:
        if param.alone:
            portions += [portion, [param]]
            portion = []
            continue
        if portion:
            enough = max(bucket_numel, math.floor(Fraction(9, 10) * shards * max(p.numel for p in portion)))
            loads = [0] * shards
            for earlier in portion:
                shard = lowest(loads, range(shards))
                loads[shard] = up(loads[shard], 64) + earlier.numel
            fits = up(min(loads), 64) + param.numel <= up(max(loads), divisor)
            if sum(p.numel for p in portion) >= enough and not fits:
                portions.append(portion)
                portion = []
        portion.append(param)
    portions.append(portion)
    return [portion for portion in portions if portion]


def pack(params: Sequence[Param], shards: int, bucket_numel: int) -> tuple[list[Bucket], list[int]]:
    """Buckets, and the load of every rank."""
    divisor = math.lcm(64, math.lcm(shards, 128) // shards)
    work = [0] * shards
    buckets = []
    for portion in cut(params, shards, bucket_numel):
        bucket = Bucket(0)
        ends = [0] * shards
        cap = Fraction(sum(p.numel for p in portion), shards) * Fraction(13, 10)
        for param in sorted(portion, key=lambda p: (-p.cost, p.name)):
            room = [s for s in range(shards) if up(ends[s], 64) + param.numel <= cap]
            if param.alone:
                shard = 0
            elif room:
                shard = lowest(work, room)
            else:
                shard = lowest(ends, range(shards))
            bucket.at[param.name] = shard, up(ends[shard], 64)
            ends[shard] = up(ends[shard], 64) + param.numel
            work[shard] += param.cost
        bucket.shard_numel = up(max(1, *ends), divisor)
        buckets.append(bucket)
    return buckets, work

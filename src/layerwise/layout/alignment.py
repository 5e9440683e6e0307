"""Where params and buckets may start, in elements."""

from __future__ import annotations

import math

PARAM_ALIGNMENT = 64
"""Elements. 64 bf16 elements are 128 bytes: one GPU cache line, and what vectorised and quantising kernels ask of a
start."""

BUCKET_ALIGNMENT = 128
"""A bucket's length is a multiple of lcm(shards, 128), so that shards are equal and start on whole cache lines for the
usual counts."""


def shard_divisor(num_shards: int) -> int:
    """What a shard's length is a multiple of, so that shards start on 64 elements and buckets end on lcm(shards, 128).

    >>> [shard_divisor(num_shards) for num_shards in (1, 2, 3, 8, 96)]
    [128, 64, 128, 64, 64]
    """
    return math.lcm(PARAM_ALIGNMENT, math.lcm(num_shards, BUCKET_ALIGNMENT) // num_shards)

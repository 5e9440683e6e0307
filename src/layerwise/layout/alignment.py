"""Where params and buckets may start, in elements."""

from __future__ import annotations

PARAM_ALIGNMENT = 64
"""Elements. 64 bf16 elements are 128 bytes: one GPU cache line, and what vectorised and quantising kernels ask of a
start."""

BUCKET_ALIGNMENT = 128
"""A bucket's length is a multiple of lcm(shards, 128), so that shards are equal and start on whole cache lines for the
usual counts."""

"""Reduce groups: which buckets are reduced together, once the gradients of all of them are in.

The first module of a rank launches bucket by bucket, so that reduction starts early. Later chunks of an interleaved
pipeline launch once: their backward is over in one go, and many small launches would only get in each other's way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from layerwise.layout.buckets import BucketPlan, BufferPlan, ReduceKind


@dataclass(frozen=True, slots=True)
class ReduceGroup:
    """Buckets that are reduced together: of one domain, by one kind of collective."""

    domain: str
    reducer: ReduceKind
    buckets: tuple[int, ...]


def reduce_groups(buffers: Iterable[BufferPlan]) -> tuple[ReduceGroup, ...]:
    """All buckets in groups, in the order in which every rank launches them.

    The split is by each bucket's own plan: no group mixes collectives, and a chunk whose buckets agree is one group.
    """
    chunk_of: Mapping[int, int] = {bucket.index: buffer.key.chunk for buffer in buffers for bucket in buffer.buckets}
    buckets = sorted((bucket for buffer in buffers for bucket in buffer.buckets), key=lambda bucket: bucket.index)
    members: dict[tuple[int, str, ReduceKind, int], list[BucketPlan]] = {}
    for bucket in buckets:
        chunk = chunk_of[bucket.index]
        alone = bucket.index if chunk == 0 else -1
        members.setdefault((chunk, bucket.domain, bucket.reducer, alone), []).append(bucket)
    groups = [
        ReduceGroup(domain, reducer, tuple(bucket.index for bucket in found))
        for (_, domain, reducer, _), found in members.items()
    ]
    # A group is ready with its last bucket.
    return tuple(sorted(groups, key=lambda group: group.buckets[-1]))

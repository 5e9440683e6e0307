"""What cannot be combined. It is refused here, on what a plan came to, whoever asked for it and however."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from layerwise.dtypes import DType
from layerwise.layout.buckets import BufferPlan
from layerwise.layout.options import Options


def refuse_combinations(
    options: Options, buffers: Iterable[BufferPlan], world_by_domain: Mapping[str, int], ties: Collection[str]
) -> None:
    """Raise unless a plan's options can be combined with each other and with the buffers that it came to."""
    for buffer in buffers:
        key, world = buffer.key, world_by_domain[buffer.key.domain]
        if world == 1:
            continue
        if not buffer.has_grads:
            continue
        if options.reducer != "collective" and not buffer.buckets[0].shards.is_split:
            raise ValueError(
                f"reducer={options.reducer!r} with layout 'replicated' (buffer {key.label}): an ordered sum arrives at the one "
                "rank that owns a shard, and here every rank needs it. Use layout='flat', or reducer='collective'."
            )
        if options.shard_grads and buffer.buckets[0].reducer == "all_reduce":
            raise ValueError(
                f"shard_grads=True with layout {key.layout!r} (buffer {key.label}): its gradients are all-reduced, so every "
                "rank keeps all of them. Use layout='flat' or 'padded', or reducer='ordered' with 'compact'."
            )
    if options.gradients == "params":
        for name, value, expected in (
            ("grad_dtype", options.grad_dtype, DType.FP32),
            ("reducer", options.reducer, "collective"),
            ("shard_grads", options.shard_grads, False),
            ("ties", tuple(ties), ()),
        ):
            if value != expected:
                raise ValueError(
                    f"{name}={value} with gradients='params': gradients are not ours to keep or to reduce then, expected {expected}."
                )

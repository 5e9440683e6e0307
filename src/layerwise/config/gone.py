"""Settings that earlier versions had, and what to write instead. Arguments of the library, config files and flags read this one table."""

from __future__ import annotations

from collections.abc import Mapping

_POLICY = "write gradient_policy=layerwise.GradientPolicy({}=...)"

GONE: Mapping[str, str] = {
    "example_inputs": "write rules=layerwise.trace.follow(module, example_inputs)",
    "routing": "write rules= with the path of the recorded routing, or rules=layerwise.trace.follow(module, example_inputs) for 'trace'",
    "method": "leave it out; the form of Newton-Schulz that takes less work is chosen for every matrix by its shape",
    **{
        name: _POLICY.format(name)
        for name in ("clip", "max_skipped", "nonfinite", "norm_groups", "skip_above", "strict_grads")
    },
    "prefetch": "leave it out; all gathers are launched in step(), or those of a chunk with overlap_param_gather='by chunk'",
    "align_param_gather": "write overlap_param_gather='by chunk'",
    "check_collectives": "set LAYERWISE_DEBUG=collectives in the environment of every rank",
    "param_sync": "leave it out; new weights always travel in one gather per bucket",
    "staging": "leave it out; the exchange of matrices always has memory of its own, which optimizer.free_buffers() lets go of",
}
"""Name of a setting -> what to do instead, as the end of a sentence."""

WAS_DEFAULT = (("layout", "auto"), ("method", "auto"), ("prefetch", None), ("staging", "slots"))
"""Defaults that settings of the trainer had. The config.json of an earlier run has them, and is read without them."""

GONE_VALUES: Mapping[tuple[str, str], str] = {
    ("reducer", "ordered_bf16"): (
        "write reducer='ordered'; with a grad_dtype of bf16 beside it the wire carries bf16 and the sum stays in fp32"
    ),
    ("clip", "none"): "leave clip_grad_norm= of the Optimizer out, and nothing is clipped",
    ("layout", "auto"): "leave it out, since 'flat' is the default; layerwise plan says which layout is best",
    ("layout", "padded:reference"): "write layout='padded', which packs so now",
    ("layout", "padded:reference-numel"): "write layout='padded', which packs as Megatron-LM's main does",
    ("layout", "replicated:shared"): "write layout='flat', which shares the work and the state, or 'replicated'",
}
"""Name of a setting that is still there and a value that it no longer takes -> what to do instead."""


def gone_value(name: str, value: object) -> str:
    """The advice for a value that a setting took in earlier versions, as a sentence of its own; empty for any other value."""
    advice = GONE_VALUES.get((name, value)) if isinstance(value, str) else None
    return "" if advice is None else f" Earlier versions had {name}={value!r}: {advice}."

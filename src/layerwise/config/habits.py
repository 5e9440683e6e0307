"""Arguments as other libraries have them, and what to write here: one table for every class, and one place that reads it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from layerwise.config.gone import GONE
from layerwise.errors import did_you_mean

Habits = Mapping[str, str]
"""Name of an argument -> what to do instead. An argument that the class has is here for when it is missing."""

_LEFT_OUT = "leave it out"

_OF_TORCH_OPTIMIZERS: Habits = {
    "params": f"{_LEFT_OUT}; layerwise.Optimizer(model, matrix=..., other=...) takes params from the model",
    "maximize": f"{_LEFT_OUT}, and negate the loss",
    **dict.fromkeys(("foreach", "fused"), f"{_LEFT_OUT}; the fastest kernels are chosen by themselves"),
    **dict.fromkeys(("capturable", "differentiable", "amsgrad"), f"{_LEFT_OUT}; there is no such thing here"),
}
OF_MUON: Habits = {
    **_OF_TORCH_OPTIMIZERS,
    "ns_steps": "write steps=",
    "backend_steps": "write steps=",
    "ns_coefficients": "write coefficients=, a name such as 'simple' or a list of (a, b, c)",
    "adjust_lr_fn": "write scale='rms' for 'match_rms_adamw', which is the default, or scale='shape' for 'original'",
    "adjust_lr": "write scale='rms', which is the default, or scale='unit_rms' for 'spectral_norm'",
    "betas": "write momentum= for the first of them; Muon has no second",
    "mu": "write momentum=",
    "wd": "write weight_decay=",
    **dict.fromkeys(("eps", "epsilon"), f"{_LEFT_OUT}; a matrix of zeros needs none here"),
}
OF_NORMUON: Habits = {**OF_MUON, "betas": "write momentum= for the first of them and beta2= for the second"}
OF_ADAMW: Habits = {
    **_OF_TORCH_OPTIMIZERS,
    "beta1": "write betas=(beta1, beta2)",
    "beta2": "write betas=(beta1, beta2)",
    "momentum": "write betas=(momentum, beta2)",
}
OF_LION = OF_ADAMW
OF_ROUTE_RULE: Habits = {
    "to": "write to='matrix' or to='other'",
    **dict.fromkeys(("name", "param", "regex"), "write pattern=, a glob such as '*.router.weight'"),
    **dict.fromkeys(("lr", "weight_decay", "momentum", "betas"), "write options={'lr': ...}"),
}
OF_GRADIENT_POLICY: Habits = {
    **dict.fromkeys(
        ("clip_grad_norm", "count_zeros", "loss_scale"),
        "give it to the optimizer, as in layerwise.Optimizer(..., clip_grad_norm=1.0)",
    ),
    **dict.fromkeys(("max_norm", "grad_clip", "max_grad_norm", "clip_grad"), "write clip_grad_norm= of the Optimizer"),
}
OF_LOSS_SCALE: Habits = {
    "init_scale": "write initial=",
    "growth_factor": "write factor=",
    "backoff_factor": "write factor=; the scale is divided by it",
    "enabled": f"{_LEFT_OUT}; without loss scaling, pass loss_scale=None to the Optimizer",
}
OF_DATA_PARALLEL: Habits = {
    "device_ids": f"{_LEFT_OUT}; layerwise.init() takes this rank's device, and the module is moved there before it is wrapped",
    "output_device": f"{_LEFT_OUT}; outputs stay where the module's params are",
    "dim": f"{_LEFT_OUT}; each rank passes its own part of the batch",
    "broadcast_buffers": f"{_LEFT_OUT}; buffers are sent once, from the first rank, and then are each rank's own",
    "init_sync": f"{_LEFT_OUT}; the first rank's weights are sent to all",
    "find_unused_parameters": f"{_LEFT_OUT}; params without a gradient count as zero, and stats.missing names them",
    "gradient_as_bucket_view": f"{_LEFT_OUT}; gradients are in buckets alone",
    "static_graph": f"{_LEFT_OUT}; each step may use other params",
    "bucket_cap_mb": "write bucket_mib=",
    "mixed_precision": f"{_LEFT_OUT}; give a module in bf16, or use torch.autocast, and see grad_dtype=",
    "device_mesh": "write mesh=",
    "check_reduction": _LEFT_OUT,
    "check_replicas": "give it to layerwise.Optimizer(model, check_replicas=True, ...)",
}
OF_OPTIMIZER: Habits = {
    "params": "give the model itself as the first argument",
    "matrix": "write matrix=layerwise.Muon(lr=...)",
    "other": "write other=layerwise.AdamW(lr=...)",
    **dict.fromkeys(
        ("lr", "weight_decay", "betas", "momentum", "eps"),
        "give it to the rules, as in matrix=layerwise.Muon(lr=...) and other=layerwise.AdamW(lr=...)",
    ),
    **dict.fromkeys(("max_norm", "grad_clip", "max_grad_norm", "clip_grad"), "write clip_grad_norm="),
    "grad_scaler": "write loss_scale=layerwise.LossScale()",
}

_Class = TypeVar("_Class", bound=type)


def understands(habits: Habits | None = None, *, in_order: Sequence[str] = ()) -> Callable[[_Class], _Class]:
    """Decorates a class: a call as another library has it ends in one TypeError that says what to write instead.

    `in_order` names the options that people give without names, where their order is not that of the class.
    """
    known = {**GONE, **(habits or {})}

    def decorate(cls: _Class) -> _Class:
        made: Callable[..., None] = cls.__init__  # type: ignore[misc]
        _, *params = inspect.signature(made).parameters.values()
        names = {param.name for param in params}
        needed = {param.name for param in params if param.default is param.empty}
        placed = [param.name for param in params if param.kind is not param.KEYWORD_ONLY]
        options = in_order or [param.name for param in params if param.name not in placed]

        def problems(args: Sequence[object], given: Mapping[str, object]) -> Iterator[str]:
            unnamed = dict(zip(options, args[len(placed) :], strict=False))
            ours = [f"{name}={_short(value)}" for name, value in unnamed.items() if name in names]
            if ours:
                words = [*placed, *ours, *(["..."] if given or len(args) > len(placed) + len(ours) else [])]
                yield f"takes its options by name: write {cls.__name__}({', '.join(words)})."
            for name in (*unnamed, *given):
                if name not in names:
                    yield f"has no argument {name!r}" + (
                        f": {known[name]}." if name in known else f".{did_you_mean(name, names)}"
                    )
            for name in sorted(needed - {*placed[: len(args)], *unnamed, *given}):
                yield f"lacks {name!r}: {known.get(name, f'write {name}=')}."

        @wraps(made)
        def __init__(self: object, *args: Any, **given: Any) -> None:
            if len(args) > len(placed) or not given.keys() <= names or not needed <= {*placed[: len(args)], *given}:
                raise TypeError(" ".join(f"{cls.__name__}() {problem}" for problem in problems(args, given)))
            made(self, *args, **given)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def _short(value: object) -> str:
    text = repr(value) if isinstance(value, int | float | str) else ""
    return text if 0 < len(text) <= 24 else "..."

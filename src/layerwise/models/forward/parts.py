"""A model with a config, whole and then in the parts that its own inputs did not reach: towers for images or sound."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from layerwise.models import names
from layerwise.models.forward.inputs import configs_of, example_inputs
from layerwise.models.forward.trace import Trace, trace
from layerwise.models.names import joined
from layerwise.routing.readings import Reading, Role

_FOR_SOMETHING = re.compile(r"For[A-Z]|LMHead|DoubleHeads")
"""BertForMaskedLM, GPT2LMHeadModel; not MaskFormerModel."""
_PARTS_TAKE = frozenset({"pixel_values", "input_features", "input_values", "grid_thw"})


def trace_model(model: nn.Module) -> Trace:
    """Follow a model on inputs made up from its config. A part that they do not reach is followed on its own; what leaves
    it is then unseen."""
    with _plainly(model):
        return _trace_parts(model)


_PLAIN = {"use_cache": False, "_experts_implementation_internal": "eager", "_attn_implementation_internal": "eager"}
"""Settings of configs under which a forward uses nothing but plain operations, and keeps nothing."""


@contextmanager
def _plainly(model: nn.Module) -> Iterator[None]:
    before = [
        (config, name, vars(config)[name]) for config in configs_of(model) for name in _PLAIN if name in vars(config)
    ]
    try:
        for config, name, _ in before:
            vars(config)[name] = _PLAIN[name]
        yield
    finally:
        for config, name, value in before:
            vars(config)[name] = value


def _trace_parts(model: nn.Module) -> Trace:
    inputs = example_inputs(model)
    if not inputs:
        return Trace(trace(model).readings, f"no inputs are known for {type(model).__name__}")
    found = trace(model, (), inputs)
    readings = dict(found.readings)
    if not _FOR_SOMETHING.search(type(model).__name__):
        readings = {fqn: _of_features(reading) for fqn, reading in readings.items()}
    for prefix, part in names.named_modules(model):
        if not prefix or not _is_part(part) or not _is_unreached(prefix, readings):
            continue
        inner = trace(part, (), example_inputs(part))
        for fqn, reading in inner.readings.items():
            name = joined(prefix, fqn)
            if name in readings and readings[name].role is Role.UNSEEN:
                readings[name] = _leaves(reading)
    return replace(found, readings=readings)


def _of_features(reading: Reading) -> Reading:
    """A model that is for nothing in particular returns features: its last layer is no head."""
    if reading.role is not Role.HEAD or reading.split is None:
        return reading
    return Reading(Role.MAP, "its outputs are features that the model returns", reading.split)


def _is_part(module: nn.Module) -> bool:
    """Whether it is a model of its own, for something else than tokens."""
    return hasattr(module, "config") and bool(example_inputs(module).keys() & _PARTS_TAKE)


def _is_unreached(prefix: str, readings: dict[str, Reading]) -> bool:
    within = [reading for fqn, reading in readings.items() if fqn.startswith(f"{prefix}.")]
    return bool(within) and all(reading.role is Role.UNSEEN for reading in within)


def _leaves(reading: Reading) -> Reading:
    """What a part returns is no output of the model."""
    if reading.role is not Role.HEAD:
        return reading
    return Reading(Role.UNSEEN, "its outputs leave the part of the model that was followed")

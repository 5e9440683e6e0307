"""What `example_inputs` and `routing` of a wrapper or an optimizer ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from layerwise.errors import listed, warn
from layerwise.models.forward.trace import Trace, trace
from layerwise.models.names import named_parameters
from layerwise.routing.evidence import Evidence
from layerwise.routing.readings import Role
from layerwise.routing.record import read_routing


def evidence_for(chunks: Sequence[nn.Module], example_inputs: object, routing: object) -> Evidence | None:
    """Follow a module's forward, or read the routes that were recorded of it; None where neither is asked for.

    Args:
        chunks: the modules to be routed; a forward can be followed through one.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments. Shapes count, values do not.
        routing: "table" (what types and names say, which must agree with the forward), "trace" (the forward decides) or the
            path of a recorded routing.
    """
    if not isinstance(routing, str | os.PathLike):
        raise TypeError(f"routing must be 'table', 'trace' or the path of a recorded routing, got {routing!r}.")
    if routing not in ("table", "trace"):
        if example_inputs is not None:
            raise ValueError(
                f"example_inputs and the recorded routing {os.fspath(routing)!r} were both given: a recorded routing decides "
                "everything. Leave one of them out."
            )
        return Evidence(recorded=read_routing(os.fspath(routing)))
    if example_inputs is None:
        if routing == "trace":
            raise ValueError(
                "routing='trace' needs example_inputs: a tensor, a tuple or a dict for the module's forward."
            )
        return None
    if len(chunks) != 1:
        raise ValueError(
            f"example_inputs with {len(chunks)} pipeline chunks: a forward is followed through one module. Record the routing of the "
            "whole model, and pass its path as routing."
        )
    found = _followed(chunks[0], example_inputs)
    if routing == "trace":
        _warn_of_unseen(chunks[0], found)
    return Evidence(readings=found.readings, decides=routing == "trace")


def _followed(module: nn.Module, example_inputs: object) -> Trace:
    if any(type(param) is not nn.Parameter and hasattr(param, "placements") for param in module.parameters()):
        raise ValueError(
            "example_inputs with a module that is cut into DTensors: its forward cannot be followed. Follow it before it is cut, and "
            "pass the path of the recorded routing."
        )
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    match example_inputs:
        case Tensor():
            args = (example_inputs,)
        case Mapping():
            kwargs = example_inputs
        case tuple() | list():
            args = example_inputs
        case _:
            raise TypeError(
                f"example_inputs must be a tensor, a tuple of arguments or a dict of keyword arguments, got {example_inputs!r}."
            )
    found = trace(module, args, kwargs)
    if found.problem and all(reading.role is Role.UNSEEN for reading in found.readings.values()):
        raise ValueError(
            f"the forward of {type(module).__name__} cannot be followed on example_inputs: {found.problem}. Leave them out, or pass "
            "inputs that it runs on."
        )
    return found


def _warn_of_unseen(module: nn.Module, found: Trace) -> None:
    trainable = {fqn for fqn, param in named_parameters(module) if param.requires_grad}
    unseen = [fqn for fqn, reading in found.readings.items() if reading.role is Role.UNSEEN and fqn in trainable]
    if unseen:
        warn(
            f"routing='trace' did not see what becomes of {len(unseen)} params, which go by their types and names: {listed(unseen)}. "
            f"The first: {found.readings[unseen[0]].why}."
        )

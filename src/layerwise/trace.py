"""Routing rules from a forward: `follow()` runs a module on meta tensors, and returns a rule for each param that the default routing
refuses or reads differently.

    rules = layerwise.trace.follow(module, torch.zeros(1, 4, 8))
    model = layerwise.DataParallel(module, rules=rules)

`layerwise inspect MODEL --trace` prints the same rules as TOML. The library imports nothing of this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from layerwise.errors import listed, warn
from layerwise.models.forward.trace import Trace, trace
from layerwise.models.table import param_table
from layerwise.routing.compare import NOT_ROUTED, Disagreement, compare, routes_and_refused, rules_for
from layerwise.routing.readings import Role
from layerwise.routing.rules import RouteRule

__all__ = ["follow"]


def follow(module: nn.Module, example_inputs: object, *, rules: Sequence[RouteRule] = ()) -> list[RouteRule]:
    """Follow the forward of a module, and return `rules` with those after them that route params as the forward uses them.

    The forward runs on meta tensors: no values are computed and the module is not changed. Call it before the module is wrapped or
    cut into DTensors, on any one rank or on all of them; it is not collective. A param whose use cannot be seen is named in a warning
    and stays under the default routing.

    Args:
        module: the whole model; params and buffers may be on any device, also on meta.
        example_inputs: a tensor, a tuple of arguments, or a dict of keyword arguments. Shapes and dtypes count, values do not.
        rules: rules of your own, which come first.
    """
    table = param_table(module)
    readings = _followed(module, example_inputs).readings
    trainable = {param.fqn for param in table if param.trainable}
    unseen = [fqn for fqn, reading in readings.items() if reading.role is Role.UNSEEN and fqn in trainable]
    if unseen:
        warn(
            f"the forward does not show what becomes of {len(unseen)} params, which go by their types and names: {listed(unseen)}. "
            f"The first: {readings[unseen[0]].why}."
        )
    routes, refused = routes_and_refused(table, rules)
    shown = refused & readings.keys() - set(unseen)
    wrong = [Disagreement(param, NOT_ROUTED, readings[param.fqn]) for param in table if param.fqn in shown]
    wrong += compare([param for param in table if param.fqn not in refused], routes, readings)
    return [*rules, *rules_for(wrong, table.by_name)]


def _followed(module: nn.Module, example_inputs: object) -> Trace:
    if any(type(param) is not nn.Parameter and hasattr(param, "placements") for param in module.parameters()):
        raise ValueError(
            "module is cut into DTensors: its forward cannot be followed. Follow it before it is cut, and pass the rules to the Optimizer."
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
            f"the forward of {type(module).__name__} cannot be followed on example_inputs: {found.problem}. Pass inputs that it runs on."
        )
    return found

"""What modules hold beside params and buffers: as it was, once somebody has followed their forward.

Forwards remember things: tables for positions that are made when they are first needed, averages, counters. What they make of
tensors without values is of no use to a forward that has some.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerwise.models.forward.weights import storage_of

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
_ATOMS = (str, int, float, bool, type(None), bytes, torch.dtype, torch.device, torch.Size)
_NO_STATE = (type, nn.Module, Tensor, ModuleType, FunctionType, MethodType)
"""What has attributes, and nothing that a forward would keep there: modules are asked themselves."""


class Keeping:
    """Attributes of modules and of what lies in them, what is in containers, and values of the tensors and of inputs."""

    def __init__(self, root: nn.Module, inputs: Iterable[Tensor]) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in root.modules()]
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: dict[int, Tensor] = {}
        self._written: dict[int, torch.UntypedStorage] = {}
        left = [*inputs, *(value for _, attributes in self._attributes for value in attributes.values())]
        seen: set[int] = set()
        while left:
            value = left.pop()
            if type(value) in _ATOMS or id(value) in seen:
                continue
            seen.add(id(value))
            left.extend(self._keep(value))

    def _keep(self, value: Any) -> Iterable[Any]:
        """Keep what this is; what lies in it comes next."""
        if type(value) in _CONTAINERS:
            self._contents.append((value, copy(value)))
            return list(value.values() if isinstance(value, dict) else value)
        if isinstance(value, tuple):
            return value
        if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
            self._tensors[storage_of(value)] = value
        elif not isinstance(value, _NO_STATE) and type(getattr(value, "__dict__", None)) is dict:
            self._attributes.append((vars(value), dict(vars(value))))
            return list(vars(value).values())
        return ()

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operation is about to run: keep the values of what it writes into."""
        if not func._schema.is_mutable:
            return
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)):
                memory = storage_of(tensor)
                if memory in self._tensors and memory not in self._written:
                    self._written[memory] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]

    def put_back(self) -> None:
        """Have all of it be as it was."""
        for now, before in self._attributes:
            for name in [name for name in now if name not in before]:
                del now[name]
            now.update(before)
        for container, content in self._contents:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)
        for memory, values in self._written.items():
            self._tensors[memory].untyped_storage().copy_(values)


@contextmanager
def keeping(root: nn.Module, inputs: Iterable[Tensor]) -> Iterator[Keeping]:
    """Within, a forward may leave in its modules what it wants."""
    found = Keeping(root, inputs)
    try:
        yield found
    finally:
        found.put_back()

"""What modules hold beside params and buffers: as it was, once somebody has followed their forward.

Forwards remember things: tables for positions that are made when they are first needed, averages, counters. What they make of
tensors without values is of no use to a forward that has some.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from layerwise.models.forward.weights import storage_of

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)


class Keeping:
    """Attributes of modules, what is in the containers among them, and values of the tensors and of inputs."""

    def __init__(self, root: nn.Module, inputs: Iterable[Tensor]) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in root.modules()]
        values = [value for _, attributes in self._attributes for value in attributes.values()]
        self._contents = [(value, copy(value)) for value in values if type(value) in _CONTAINERS]
        inside = (item for _, content in self._contents for item in _items(content))
        self._tensors = {
            storage_of(tensor): tensor
            for tensor in (*values, *inside, *inputs)
            if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
        }
        self._written: dict[int, torch.UntypedStorage] = {}

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


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


@contextmanager
def keeping(root: nn.Module, inputs: Iterable[Tensor]) -> Iterator[Keeping]:
    """Within, a forward may leave in its modules what it wants."""
    found = Keeping(root, inputs)
    try:
        yield found
    finally:
        found.put_back()

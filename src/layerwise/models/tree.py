"""A module tree as it was, and whether it still is: asked in every step, so the answer costs no Python code per param."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn
from torch._C import DisableTorchFunctionSubclass

_TRAINABLE: Callable[[nn.Parameter], bool] = attrgetter("requires_grad")
_TABLES: Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any]]] = attrgetter("_parameters", "_modules")


class ModuleTree:
    """Which modules and params stand where, and which params are trainable.

    All of it is compared by identity, with iterators that run in C: one step of Python costs as much as the whole
    comparison of a param. What is compared is kept, so that no other object can come to be where it was.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = tuple(roots)
        self.renew()

    def renew(self) -> None:
        """Take the tree as it is now."""
        found = dict.fromkeys(module for root in self._roots for module in root.modules())
        # A scripted module has tables of another kind, and nobody can change them.
        self._modules = [module for module in found if isinstance(module._parameters, dict)]
        self._tables = list(chain.from_iterable(map(_TABLES, self._modules)))
        self._names = list(chain.from_iterable(self._tables))
        self._members = list(_values(self._tables))
        self._places = list(map(id, chain(self._tables, self._members)))
        self._params = [param for module in self._modules for param in module._parameters.values() if param is not None]
        self._trainable = list(map(_TRAINABLE, self._params))

    def is_unchanged(self) -> bool:
        """Whether every module has the params and the modules that it had, under the same names, and the same of them are
        trainable."""
        tables = chain.from_iterable(map(_TABLES, self._modules))
        if list(map(id, chain(tables, _values(self._tables)))) != self._places:
            return False
        with DisableTorchFunctionSubclass():  # or each read would look for an override in the param's class
            trainable = list(map(_TRAINABLE, self._params))
        return trainable == self._trainable and list(chain.from_iterable(self._tables)) == self._names


def _values(tables: Iterable[dict[str, Any]]) -> Iterable[object]:
    return chain.from_iterable(map(dict.values, tables))

"""One block of each kind is enough: a block like one that was followed already returns what that one returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.models import names
from layerwise.models.forward.labels import LabelsBySource

_PLACES = ("idx", "index", "id", "number", "name", "seed")
"""Attributes that say where a block is, and nothing about what it does."""


class _Followed(NamedTuple):
    """A block that was followed, what it was given, with which labels, and what it returned."""

    name: str
    out: Any
    given: tuple[Any, ...]
    labels: tuple[LabelsBySource, ...]


class Blocks:
    """The members of a model's lists by kind, and which of each kind was followed."""

    def __init__(
        self,
        root: nn.Module,
        labels_of: Callable[[object], LabelsBySource],
        on_output: Callable[[Tensor], None],
    ) -> None:
        self._kind_of: dict[str, object] = {}
        self._module_of: dict[str, nn.Module] = {}
        for prefix, child in names.named_modules(root):
            if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(child) > 1:
                for name, member in names.named_children(child):
                    self._kind_of[names.joined(prefix, name)] = kind_of(member)
                    self._module_of[names.joined(prefix, name)] = member
        self._followed: dict[tuple[object, object], list[_Followed]] = {}
        self.like: dict[str, str] = {}
        """For blocks that were not followed, the one of their kind that was."""
        self._labels_of, self._on_output = labels_of, on_output

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within, a block is followed if it is the first of its kind, or is called otherwise than that one was."""
        counts: dict[object, int] = {}
        for kind in self._kind_of.values():
            counts[kind] = counts.get(kind, 0) + 1
        replaced = []
        try:
            for name, module in self._module_of.items():
                if counts[self._kind_of[name]] > 1 and "forward" not in vars(module):
                    vars(module)["forward"] = self._stand_in(name, module.forward)
                    replaced.append(module)
            yield
        finally:
            for module in replaced:
                del vars(module)["forward"]

    def _stand_in(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        kind = self._kind_of[name]

        def called(*args: Any, **kwargs: Any) -> Any:
            given = tuple(tree_leaves((args, kwargs)))
            labels = tuple(self._labels_of(leaf) for leaf in given)
            followed = self._followed.setdefault((kind, _shapes(given)), [])
            lead = next((lead for lead in followed if lead.name != name and _adds_nothing(labels, lead.labels)), None)
            if lead is not None:
                self.like[name] = lead.name
                return self._like(lead.out, lead.given, given)
            out = forward(*args, **kwargs)
            if not any(lead.name == name for lead in followed):
                followed.append(_Followed(name, out, given, labels))
            return out

        return called

    def _like(self, out: Any, given: tuple[Any, ...], now: tuple[Any, ...]) -> Any:
        """The same shapes with nothing known of them; what only passed through passes through."""

        def fresh(found: object) -> object:
            if not isinstance(found, Tensor):
                return found
            for before, mine in zip(given, now, strict=False):
                if before is found:
                    return mine
            made = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device=found.device)
            self._on_output(made)
            return made

        return tree_map(fresh, out)

    def finished(self) -> list[str]:
        """Blocks that were followed to their end."""
        return [lead.name for leads in self._followed.values() for lead in leads]

    def leads(self, *, is_any_enough: bool) -> Mapping[str, str]:
        """For every block that was not followed, one of its kind that was. Blocks that were not even called count where
        data decide which are."""
        found = dict(self.like)
        if is_any_enough:
            by_kind = {kind: lead.name for (kind, _), leads in self._followed.items() for lead in leads}
            called = {*self.finished(), *self.like}
            found.update(
                {name: by_kind[kind] for name, kind in self._kind_of.items() if name not in called and kind in by_kind}
            )
        return found


def kind_of(module: nn.Module) -> object:
    """What a block is: its classes, the shapes of its params, and its settings, but for those that say where it is."""
    return tuple(
        (
            name,
            type(child),
            tuple((key, tuple(param.shape)) for key, param in child._parameters.items() if param is not None),
            tuple(sorted((key, repr(value)) for key, value in vars(child).items() if _is_setting(key, value))),
        )
        for name, child in names.named_modules(module)
    )


def _is_setting(key: str, value: object) -> bool:
    is_plain = value is None or isinstance(value, bool | int | float | str | tuple)
    return is_plain and not key.startswith("_") and not any(part in _PLACES for part in key.split("_"))


def _shapes(given: tuple[Any, ...]) -> tuple[object, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in given)


def _adds_nothing(labels: Sequence[LabelsBySource], before: Sequence[LabelsBySource]) -> bool:
    """Whether a block is given no outputs of products that a like one was not given: rows that each layer has of its own
    would end nowhere otherwise."""
    return all(
        found.keys() <= known.keys() and all(torch.equal(found[key], known[key]) for key in found)
        for found, known in zip(labels, before, strict=True)
    )

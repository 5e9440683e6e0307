"""What users put beside tensors (schedulers, cursors, notes), as JSON and back. No pickle: what has no plain form is refused,
by its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerwise.config.rules import plain_option

_TAG = "$"
"""Marks what JSON has no word for."""
_MOST_DEPTH = 64
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def check_extra(extra: object) -> None:
    """Raise unless it is what users may give so."""
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict of what belongs to the checkpoint, by name, got {extra!r}.")


def to_plain(value: object, where: str, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """A value as JSON; its tensors go into `tensors`, by their place."""
    if depth > _MOST_DEPTH:
        raise TypeError(f"{where[:80]}... is nested more than {_MOST_DEPTH} deep: a checkpoint holds plain values.")
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError(
                f"{where} is a tensor of layout {value.layout}: a checkpoint holds dense ones. Pass to_dense() of it."
            )
        key = where
        while key in tensors:  # a.b is the place of two things: names may have dots, and numbers read like them
            key += "'"
        tensors[key] = value.detach()
        return {_TAG: "tensor", "key": key}
    if not isinstance(value, list | tuple | dict | Mapping):
        value = plain_option(value)  # scalars of numpy
    if value is None or isinstance(value, bool | int | str):
        return value

    def inner(part: object, name: object) -> Any:
        return to_plain(part, f"{where}.{name}", tensors, depth + 1)

    match value:
        case float():
            return value if math.isfinite(value) else {_TAG: "float", "value": repr(value)}
        case bytes() | bytearray():
            return {_TAG: "bytes", "hex": bytes(value).hex()}
        case torch.dtype():
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        case list():
            return [inner(part, number) for number, part in enumerate(value)]
        case tuple():
            return {_TAG: "tuple", "items": [inner(part, number) for number, part in enumerate(value)]}
        case Mapping() if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: inner(part, key) for key, part in value.items()}
        case Mapping():
            return {_TAG: "dict", "items": [[inner(key, "key"), inner(part, key)] for key, part in value.items()]}
        case _:
            raise TypeError(
                f"{where} is a {type(value).__name__}: a checkpoint holds numbers, strings, lists, dicts and tensors. Pass what makes "
                "it up, or an object with state_dict() and load_state_dict()."
            )


def from_plain(value: Any, tensor_of: Callable[[str], Tensor], depth: int = 0) -> Any:
    """The value that was made into JSON."""
    if depth > _MOST_DEPTH:
        raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")

    def inner(part: Any) -> Any:
        return from_plain(part, tensor_of, depth + 1)

    if isinstance(value, list):
        return [inner(part) for part in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: inner(part) for key, part in value.items()}
        case "tensor":
            return tensor_of(str(value["key"]))
        case "float":
            return float(value["value"])
        case "bytes":
            return bytes.fromhex(value["hex"])
        case "dtype":
            if value["name"] not in _DTYPES:
                raise ValueError(f"{str(value['name'])[:40]!r} is no dtype of torch")
            return _DTYPES[value["name"]]
        case "tuple":
            return tuple(inner(part) for part in value["items"])
        case "dict":
            return {inner(key): inner(part) for key, part in value["items"]}
        case other:
            raise ValueError(f"{str(other)[:40]!r} is no kind of value")


def number(value: object) -> float:
    """A number that was read, unless it is none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise TypeError(f"expected a number, found {value if isinstance(value, float) else type(value).__name__}")
    return value

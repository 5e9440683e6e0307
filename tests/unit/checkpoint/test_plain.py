"""What users put beside tensors comes back as it was, and never by running anything."""

from __future__ import annotations

import collections
import json
import math
import threading
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.checkpoint.plain import from_plain, to_plain
from tests.strategies import MANY

TENSORS = [
    torch.tensor(1.5),
    torch.arange(6).reshape(2, 3),
    torch.tensor([math.nan, -0.0], dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.arange(8.0).reshape(2, 4).T,
]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
keys = st.one_of(
    st.text(max_size=3), st.sampled_from(["$", "a", "a.b", "1"]), st.integers(-3, 3), st.booleans(), st.none(),
    st.tuples(st.integers(0, 2), st.text(max_size=2)), st.floats(allow_nan=False), st.binary(max_size=2),
)  # fmt: skip
nested = st.recursive(
    st.one_of(scalars, st.sampled_from(TENSORS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
    ),
    max_leaves=12,
)


def same(one: Any, two: Any) -> bool:
    """Equal, of the same types, NaN like NaN and -0.0 unlike 0.0."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one.nan_to_num(7), two.nan_to_num(7))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one), list(two)) and same(list(one.values()), list(two.values()))
    return repr(one) == repr(two)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(to_plain(value, "extra", tensors), allow_nan=False)
    return from_plain(json.loads(text), tensors.__getitem__)


@MANY
@given(nested)
def test_nested_values_come_back_as_they_were(value: Any) -> None:
    assert same(there_and_back(value), value)


def test_tensors_whose_places_read_alike_are_kept_apart() -> None:
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    assert same(there_and_back(value), value)


class Point(collections.namedtuple("Point", "x y")):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (numpy.float64(0.5), 0.5),
        (numpy.int32(3), 3),
        (Point(1, 2), (1, 2)),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (torch.Size([2, 3]), (2, 3)),
        (bytearray(b"ab"), b"ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_nearly_plain_comes_back_plain(value: Any, expected: Any) -> None:
    assert same(there_and_back(value), expected)


@pytest.mark.parametrize(
    "value",
    [threading.Lock(), object(), len, Point, {1, 2}, 1j, numpy.zeros(3)],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_plain_form_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"extra\.here\.1 is a "):
        to_plain({"here": [0, value]}, "extra", {})


def test_what_never_ends_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match="nested more than 64 deep"):
        to_plain(value, "extra", {})


@pytest.mark.parametrize(
    "text",
    [
        '{"$": "python/object", "value": "os.system"}',
        '{"$": "dtype", "name": "load"}',
        '{"$": "dtype", "name": "ops"}',
        '{"$": "bytes", "hex": "zz"}',
        '{"$": "float", "value": "one"}',
        '{"$": "tensor"}',
        '{"$": "tuple"}',
        '{"$": "tuple", "items": 3}',
        '{"$": "dict", "items": [[1]]}',
        '{"$": "dict", "items": [[[], 1]]}',
        '{"$": ["tuple"]}',
        '{"$": {}}',
    ],
)
def test_what_is_no_value_of_ours_is_refused(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_plain(json.loads(text), {}.__getitem__)

"""Splits: what they refuse, and that their parts are the param, once each."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.routing.geometry import flat_index
from layerwise.routing.split import (
    Split,
    interleaved_rows,
    per_column_head,
    per_row_head,
    row_blocks,
    stack,
    transposed,
    whole,
)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grid": (4, 6), "roles": "r"}, "roles 'r' must name one of r, c, a for each of the 2 axes."),
        ({"grid": (4, 6), "roles": "rx"}, "roles 'rx' must name one of r, c, a for each of the 2 axes."),
        ({"grid": (4, 6), "roles": "rr"}, "roles 'rr' must have all rows on one side and all columns on the other."),
        (
            {"grid": (4, 2, 3), "roles": "rcr"},
            "roles 'rcr' must have all rows on one side and all columns on the other.",
        ),
        ({"grid": (4, 0), "roles": "rc"}, "every axis must be positive."),
        (
            {"grid": (4.0, 6), "roles": "rc"},
            "axes and blocks must be whole numbers, got (4.0, 6), blocks () of axis 0.",
        ),
        ({"grid": (4, 6), "roles": "rc", "blocks": (2, 2.0)}, "must be whole numbers, got (4, 6), blocks (2, 2.0)"),
        (
            {"grid": (8, 6), "roles": "rc", "blocks": (3, 3)},
            "blocks (3, 3) must be positive and sum to 8, got 6.",
        ),
        ({"grid": (8, 6), "roles": "rc", "blocks": (9, -1)}, "blocks (9, -1) must be positive and sum to 8, got 8."),
        ({"grid": (8, 6), "roles": "rc", "block_axis": 2, "blocks": (8,)}, "block axis 2 is not one of the 2 axes."),
    ],
)
def test_a_split_that_makes_no_sense_is_refused(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        Split(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (whole((4, 6)), ""),
        (row_blocks((8, 6), (4, 2, 2)), "row blocks of 4, 2, 2"),
        (interleaved_rows((12, 6), 3, (2, 1, 1)), "interleaved row blocks of 2, 1, 1"),
        (per_row_head((12, 6), 3), "3 matrices apart"),
        (per_column_head((6, 12), 3), "3 matrices apart"),
        (stack((5, 4, 6), sizes=(2, 2)), "5 matrices apart, row blocks of 2, 2"),
        (transposed((4, 6), (2, 2, 2)), "row blocks of 2, 2, 2, stored transposed"),
    ],
)
def test_a_split_says_in_words_what_it_does(split: Split, words: str) -> None:
    assert split.describe() == words


SPLITS = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 5)).map(whole),
    st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 5)).map(
        lambda found: row_blocks((sum(found[0]), found[1]), tuple(found[0]))
    ),
    st.tuples(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 5)).map(
        lambda found: interleaved_rows((found[0] * sum(found[1]), found[2]), found[0], tuple(found[1]))
    ),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)).map(
        lambda found: per_column_head((found[0], found[1] * found[2]), found[1])
    ),
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3)).map(
        lambda found: stack((found[0], found[1], sum(found[2])), transposed=True, sizes=tuple(found[2]))
    ),
)


@settings(max_examples=150)
@given(SPLITS)
def test_parts_cover_every_element_of_the_param_once(split: Split) -> None:
    seen: list[int] = []
    for part in split.parts():
        assert part.rows * part.cols == part.box.numel
        indices: list[tuple[int, ...]] = [()]
        for start, stop in zip(part.box.starts, part.box.stops, strict=True):
            indices = [(*index, position) for index in indices for position in range(start, stop)]
        seen += [flat_index(index, split.grid) for index in indices]
    assert sorted(seen) == list(range(math.prod(split.grid)))


def test_a_split_is_plain_data() -> None:
    split = interleaved_rows((12, 6), 3, (2, 1, 1))
    assert split.to_json() == {"grid": [3, 4, 6], "roles": "rrc", "block_axis": 1, "blocks": [2, 1, 1]}

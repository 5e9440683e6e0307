"""Boxes of params on meshes, against cutting lists of indices one after the other."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.meshes import Cut, Placed, copied_on, over

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


def chunked(indices: list[int], chunks: int) -> list[list[int]]:
    """As torch.chunk does it, and nothing for those who come too late."""
    length = max(1, math.ceil(len(indices) / chunks))
    found = [indices[start : start + length] for start in range(0, len(indices), length)]
    return [*found, *([[]] * chunks)][:chunks]


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int | None]], list[int]]:
    """A shape, dims of a mesh with the dim that each cuts, and the order in which they cut."""
    shape = draw(SHAPES)
    dims = draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.one_of(st.none(), st.integers(0, len(shape) - 1))), min_size=1, max_size=3
        )
    )
    return shape, dims, draw(st.permutations(range(len(dims))))


def cuts_of(dims: list[tuple[int, int | None]], order: list[int]) -> list[tuple[int, Cut | None]]:
    """What each dim of a mesh knows of the others: how many chunks those further in, which cut before it, have made."""
    found: list[tuple[int, Cut | None]] = []
    for along, (size, dim) in enumerate(dims):
        if dim is None:
            found.append((size, None))
            continue
        before = [other for other in order[: order.index(along)] if other > along and dims[other][1] == dim]
        found.append((size, Cut(dim, math.prod(dims[other][0] for other in before))))
    return found


@given(meshes())
def test_boxes_are_chunks_of_chunks(case: tuple[tuple[int, ...], list[tuple[int, int | None]], list[int]]) -> None:
    shape, dims, order = case
    # Dims of a mesh that cut one dim in another order than they stand in are what `after` says: only what comes out is
    # compared that can be said so.
    for along, other in itertools.combinations(range(len(dims)), 2):
        if dims[along][1] == dims[other][1] and dims[along][0] == 1:
            return  # a chunk of one is no chunk: the order cannot be told, and does not matter
        if dims[along][1] == dims[other][1] and dims[other][0] == 1:
            return
    placed = over(*cuts_of(dims, order))
    boxes = placed.boxes(shape, math.prod(size for size, _ in dims))
    assert boxes == tuple(placed.box(shape, rank) for rank in placed.ranks)
    for rank, place in enumerate(itertools.product(*(range(size) for size, _ in dims))):
        held = [list(range(size)) for size in shape]
        for along in order:
            size, dim = dims[along]
            if dim is not None:
                held[dim] = chunked(held[dim], size)[place[along]]
        box = boxes[rank]
        assert [list(range(start, stop)) for start, stop in zip(*box, strict=True)] == held


@given(SHAPES, st.integers(1, 5))
def test_a_param_that_nothing_cuts_is_whole_everywhere(shape: tuple[int, ...], world: int) -> None:
    assert {box.shape for box in copied_on(world).boxes(shape, world)} == {shape}


def test_tensor_parallelism_cuts_first_although_it_is_further_in() -> None:
    """13 rows over 3 x 2 ranks: 7 and 6, and each of those in three. Rank 4 holds one row, the seventh."""
    boxes = over((3, Cut(0, after=2)), (2, Cut(0))).boxes((13, 4), 6)
    assert [(box.starts[0], box.stops[0]) for box in boxes] == [(0, 3), (7, 9), (3, 6), (9, 11), (6, 7), (11, 13)]


def test_who_is_not_on_the_mesh_has_nothing() -> None:
    boxes = Placed((3, 1), (2,), (Cut(1),)).boxes((2, 4), 4)
    assert boxes == tuple(Placed((3, 1), (2,), (Cut(1),)).box((2, 4), rank) for rank in range(4))
    assert [box.numel for box in boxes] == [0, 4, 0, 4]
    assert boxes[3].starts == (0, 0)


def test_copies_on_several_meshes_are_one_more_dim() -> None:
    placed = Placed((0, 2), (2,), (Cut(0),)).on_all([(0, 2), (1, 3)])
    boxes = placed.boxes((4,), 4)
    assert boxes[0] == boxes[1] != boxes[2] == boxes[3]


def test_a_cut_after_chunks_that_nobody_made_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="cut after it was cut into 3 chunks, and the mesh"):
        over((2, Cut(0, after=3)), (2, Cut(0))).boxes((8,), 4)

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from layerwise.routing.geometry import Box, ceil_to, collapse, flat_index, interval_boxes, row_major_strides
from tests.strategies import MANY, cut_params

grids = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, grid: tuple[int, ...]) -> Box:
    """A non-empty box of a grid; often a whole dim, which is where collapsing happens."""
    starts, stops = [], []
    for size in grid:
        whole = draw(st.booleans())
        start = 0 if whole else draw(st.integers(0, size - 1))
        starts.append(start)
        stops.append(size if whole else draw(st.integers(start + 1, size)))
    return Box(tuple(starts), tuple(stops))


@st.composite
def grids_with_boxes(draw: st.DrawFn, count: int = 1) -> tuple[tuple[int, ...], tuple[Box, ...]]:
    grid = draw(grids)
    return grid, tuple(draw(boxes_in(grid)) for _ in range(count))


def elements(grid: tuple[int, ...], box: Box) -> list[int]:
    """Flat positions of a box's elements in the box's own row-major order, the slow way."""
    everywhere = {index: position for position, index in enumerate(itertools.product(*(range(size) for size in grid)))}
    return [
        everywhere[i] for i in itertools.product(*(range(a, b) for a, b in zip(box.starts, box.stops, strict=True)))
    ]


@MANY
@given(st.integers(0, 10_000), st.integers(1, 300))
def test_ceil_to_is_the_next_multiple(value: int, multiple: int) -> None:
    found = ceil_to(value, multiple)
    assert found % multiple == 0
    assert value <= found < value + multiple


@MANY
@given(grids)
def test_flat_index_counts_elements_in_row_major_order(grid: tuple[int, ...]) -> None:
    indices = itertools.product(*(range(size) for size in grid))
    assert [flat_index(index, grid) for index in indices] == list(range(math.prod(grid)))


def test_strides_of_a_row_major_grid() -> None:
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)
    assert row_major_strides(()) == ()


@MANY
@given(grids_with_boxes(count=2))
def test_intersection_is_what_both_boxes_hold(case: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    grid, (left, right) = case
    common = sorted(set(elements(grid, left)) & set(elements(grid, right)))
    both = left.intersect(right)
    assert (elements(grid, both) if both is not None else []) == common
    assert both == right.intersect(left)


@MANY
@given(grids_with_boxes())
def test_a_shifted_box_keeps_its_shape_and_starts_at_zero(case: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    grid, (box,) = case
    shifted = box.shifted_from(box.starts)
    assert shifted.shape == box.shape
    assert set(shifted.starts) == {0}
    assert box.numel == len(elements(grid, box))


@MANY
@given(grids_with_boxes())
def test_collapsing_keeps_the_same_elements_in_the_same_order(case: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    grid, (box,) = case
    small_grid, small_box = collapse(grid, box)
    assert math.prod(small_grid) == math.prod(grid)
    assert len(small_grid) <= len(grid)
    assert elements(small_grid, small_box) == elements(grid, box)


@MANY
@given(grids_with_boxes())
def test_a_contiguous_box_collapses_to_one_dim(case: tuple[tuple[int, ...], tuple[Box, ...]]) -> None:
    grid, (box,) = case
    found = elements(grid, box)
    contiguous = found == list(range(found[0], found[-1] + 1))
    assert (len(collapse(grid, box)[0]) == 1) == contiguous


def test_a_row_block_an_expert_and_a_column_block_collapse_as_documented() -> None:
    assert collapse((8, 4), Box((2, 0), (5, 4))) == ((32,), Box((8,), (20,)))
    assert collapse((3, 8, 4), Box((1, 0, 0), (2, 8, 4))) == ((96,), Box((32,), (64,)))
    assert collapse((8, 4), Box((0, 1), (8, 3))) == ((8, 4), Box((0, 1), (8, 3)))


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    grid = draw(grids)
    start = draw(st.integers(0, math.prod(grid)))
    return grid, start, draw(st.integers(start, math.prod(grid)))


@MANY
@given(intervals())
def test_interval_boxes_partition_the_interval_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    grid, start, stop = case
    pieces = list(interval_boxes(grid, start, stop))
    assert [position for piece in pieces for position in elements(grid, piece)] == list(range(start, stop))
    assert len(pieces) <= 2 * len(grid) - 1


@MANY
@given(cut_params(), st.data())
def test_regions_partition_a_matrix_over_any_cut_of_its_param(case, data: st.DataObject) -> None:
    spec, matrices = case
    cuts = sorted(data.draw(st.lists(st.integers(0, spec.numel), max_size=5)))
    borders = [0, *cuts, spec.numel]
    for matrix in matrices:
        whole = elements(matrix.grid, matrix.box)
        found = []
        for start, stop in itertools.pairwise(borders):
            piece = [position for region in matrix.regions(start, stop) for position in elements(matrix.grid, region)]
            assert piece == [position for position in whole if start <= position < stop]
            found += piece
        assert found == whole
        assert (matrix.flat_start, matrix.flat_stop) == (whole[0], whole[-1] + 1)


@MANY
@given(cut_params())
def test_matrices_of_a_param_cover_it_once(case) -> None:
    spec, matrices = case
    found = sorted(position for matrix in matrices for position in elements(matrix.grid, matrix.box))
    assert found == list(range(spec.numel))
    assert all(matrix.numel == matrix.box.numel for matrix in matrices)

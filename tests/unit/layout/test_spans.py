"""Regions of matrices in spans, against element by element."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import NamedTuple

import pytest

from layerwise.layout.spans import Address, Block, Span, numel_in, regions_of
from layerwise.routing.geometry import Box
from tests.marks import sampled


class Cut(NamedTuple):
    """A matrix as far as a span has to know it."""

    grid: tuple[int, ...]
    box: Box


def indices(starts: tuple[int, ...], stops: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, starts, stops)))


def flat(index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    position = 0
    for step, size in zip(index, sizes, strict=True):
        position = position * size + step
    return position


def expected(matrix: Cut, span: Span, numel: int) -> set[tuple[int, int]]:
    """(address in the shard, address in the matrix) of every element that both have."""
    in_matrix = {
        flat(index, matrix.grid): place for place, index in enumerate(indices(matrix.box.starts, matrix.box.stops))
    }
    whole = list(range(numel))
    if span.block is not None:
        shape, (starts, stops) = span.block
        whole = [flat(index, shape) for index in indices(starts, stops)]
    mine = enumerate(whole[span.start : span.stop], start=span.shard_offset)
    return {(place, in_matrix[position]) for place, position in mine if position in in_matrix}


def places(shape: tuple[int, ...], address: Address) -> list[int]:
    found = [address.offset]
    for size, stride in zip(shape, address.strides, strict=True):
        found = [place + step * stride for place in found for step in range(size)]
    return found


def check(matrix: Cut, span: Span, numel: int) -> int:
    regions = regions_of(matrix, span)
    pairs = [
        pair
        for region in regions
        for pair in zip(places(region.shape, region.in_shard), places(region.shape, region.in_matrix), strict=True)
    ]
    wanted = expected(matrix, span, numel)
    assert len(pairs) == len(wanted), (matrix, span)  # nothing twice
    assert set(pairs) == wanted, (matrix, span)
    assert all(region.numel == math.prod(region.shape) > 0 for region in regions)
    assert numel_in(matrix, span) == len(wanted)
    return len(regions)


def random_box(rng: Random, sizes: tuple[int, ...], *, empty: bool) -> Box:
    """A part of a grid: whole, partial or (where it may be) empty, along every dim."""
    ranges = []
    for size in sizes:
        start, stop = (0, size) if rng.random() < 0.4 else sorted((rng.randint(0, size), rng.randint(0, size)))
        if start == stop and not empty:
            start, stop = (start - 1, stop) if start else (0, 1)
        ranges.append((start, stop))
    return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))


def random_grid(rng: Random, factors: list[list[int]]) -> tuple[int, ...]:
    """A grid over a param of these factored dims: the shape, finer, flattened, or some dims finer and no border lost."""
    shape = tuple(math.prod(parts) for parts in factors)
    match rng.choice(["same", "finer", "finer", "flatter", "flat"]):
        case "finer":
            return tuple(itertools.chain.from_iterable(p if rng.random() < 0.7 else [math.prod(p)] for p in factors))
        case "flatter":
            keep = rng.randint(1, len(shape))
            return (*shape[: keep - 1], math.prod(shape[keep - 1 :]))
        case "flat":
            return (math.prod(shape),)
    return shape


def random_case(rng: Random) -> tuple[Cut, Span, int]:
    factors = [[rng.randint(1, 4) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(1, 3))]
    shape = tuple(math.prod(parts) for parts in factors)
    grid = random_grid(rng, factors)
    numel = math.prod(shape)
    block = None
    if rng.random() < 0.8:
        block = Block(shape, random_box(rng, shape, empty=rng.random() < 0.2))
    held = numel if block is None else block.box.numel
    start, stop = (0, held) if rng.random() < 0.4 else sorted((rng.randint(0, held), rng.randint(0, held)))
    return Cut(grid, random_box(rng, grid, empty=False)), Span("w", block, start, stop, rng.randint(0, 99)), numel


CASES = 25_000
PARTS = 5


@pytest.mark.parametrize("part", sampled(range(PARTS), 0))
def test_regions_are_every_element_of_the_matrix_in_the_span_once_with_its_two_addresses(part: int) -> None:
    """1-D to 3-D params, matrices in finer and in flatter grids, cut along any dims; blocks and intervals of every kind."""
    rng = Random(part)
    most = nothing = 0
    for _ in range(CASES // PARTS):
        found = check(*random_case(rng))
        most, nothing = max(most, found), nothing + (found == 0)
    assert most > 5  # so that cases are hard enough
    assert CASES // PARTS * 0.05 < nothing < CASES // PARTS * 0.8


def test_a_brute_force_that_is_off_by_one_is_noticed() -> None:
    matrix, span = Cut((4, 6), Box((0, 2), (4, 5))), Span("w", Block((4, 6), Box((1, 0), (3, 6))), 1, 9, 7)
    check(matrix, span, 24)
    for wrong in (span._replace(shard_offset=8), span._replace(start=2), span._replace(stop=10)):
        regions = regions_of(matrix, wrong)
        pairs = {
            pair
            for region in regions
            for pair in zip(places(region.shape, region.in_shard), places(region.shape, region.in_matrix), strict=True)
        }
        assert pairs != expected(matrix, span, 24)


def test_the_whole_of_a_param_and_its_whole_block_are_the_same() -> None:
    """Columns 1 to 3 of a 3 x 5 weight, whose flat elements 4 to 11 lie at 100."""
    matrix = Cut((3, 5), Box((0, 1), (3, 3)))
    whole = Span("w", None, 4, 11, 100)
    block = whole._replace(block=Block((3, 5), Box((0, 0), (3, 5))))
    for span in (whole, block):
        (region,) = regions_of(matrix, span)  # rows 1 and 2 begin at element 5 and 10; column 1 of row 2 is outside
        assert region.shape == (1, 2)
        assert (region.in_shard.offset, region.in_matrix.offset) == (102, 2)


def test_a_column_block_of_a_row_shard() -> None:
    """Rows 2 and 3 of a 4 x 6 weight are a shard; the matrix is its last three columns."""
    span = Span("w", Block((4, 6), Box((2, 0), (4, 6))), 0, 12, 5)
    (region,) = regions_of(Cut((4, 6), Box((0, 3), (4, 6))), span)
    assert region == ((2, 3), Address(5 + 3, (6, 1)), Address(6, (3, 1)))


def test_rows_of_a_column_shard() -> None:
    """Columns 4 and 5 of a 4 x 6 weight are a shard; the matrix is its first three rows, which is a 1-D grid."""
    span = Span("w", Block((4, 6), Box((0, 4), (4, 6))), 0, 8, 0)
    (region,) = regions_of(Cut((24,), Box((0,), (18,))), span)
    assert region == ((3, 2), Address(0, (2, 1)), Address(4, (6, 1)))


@pytest.mark.parametrize("block", [None, Block((4, 6), Box((1, 0), (1, 6))), Block((4, 6), Box((0, 0), (2, 3)))])
def test_a_span_of_nothing_has_no_region(block: Block | None) -> None:
    assert regions_of(Cut((4, 6), Box((0, 0), (4, 6))), Span("w", block, 0, 0, 3)) == ()

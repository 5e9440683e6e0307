"""What shards that are boxes answer, against element by element."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

import pytest

from layerwise.layout.boxes import Boxes, BoxShards
from layerwise.layout.cost import Hardware
from layerwise.layout.meshes import Cut, copied_on, over
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.shards import Held, held_by, nearest, pieces_of, whole_on
from layerwise.layout.spans import Block, Span
from layerwise.routing.geometry import Box
from layerwise.routing.matrices import Matrix
from layerwise.routing.spec import table_of
from tests.strategies import column_blocks, interleaved_blocks, matrix_of, random_boxes, random_cut


def positions(shape: tuple[int, ...], box: Box) -> list[int]:
    """The elements of a box among the flattened ones of a grid, row by row."""
    found = []
    for index in itertools.product(*map(range, box.starts, box.stops)):
        position = 0
        for step, size in zip(index, shape, strict=True):
            position = position * size + step
        found.append(position)
    return found


def check(shape: tuple[int, ...], boxes: tuple[Box, ...], matrices: tuple[Matrix, ...]) -> None:
    plan = BoxShards(7, "dense", "w", Boxes(shape, boxes))
    ranks = range(len(boxes))
    held = [positions(shape, box) for box in boxes]
    assert (plan.world, plan.fqns, plan.index, plan.param_numel("w")) == (len(boxes), ("w",), 7, math.prod(shape))
    for rank in ranks:
        assert plan.shard_numel(rank) == len(held[rank])
        assert plan.spans(rank) == tuple(plan.spans_of("w", rank))
        assert [position for span in plan.spans(rank) for position in elements(shape, span)] == held[rank]
        assert [span.shard_offset for span in plan.spans(rank)] == ([0] if held[rank] else [])
        for span in plan.spans(rank):
            assert list(plan.copies(span, rank)) == [other for other in ranks if held[other] == held[rank]]
    for matrix in matrices:
        wanted = set(positions(matrix.grid, matrix.box))
        numels = [len(wanted & set(mine)) for mine in held]
        holding = [rank for rank in ranks if numels[rank]]
        assert list(plan.ranks_of(matrix)) == holding
        runs = plan.holders(matrix)
        assert told(runs) == [(rank, numels[rank]) for rank in holding]
        assert [first for first, *_ in runs] == sorted(first for first, *_ in runs)
        assert all(held_by(runs, rank) == numels[rank] for rank in ranks)
        assert list(whole_on(plan, matrix)) == [rank for rank in ranks if numels[rank] == len(wanted)]
        for home in ranks:
            sent = [0 for _ in ranks]
            for span, holders in pieces_of(plan, matrix):
                sent[nearest(holders, home, plan.world)] += len(wanted & set(elements(shape, span)))
            sources = plan.boxes.sources(matrix, home)
            assert told(sources) == [(rank, numel) for rank, numel in enumerate(sent) if numel]
        # Each element once, however many copies there are.
        pieces = list(pieces_of(plan, matrix))
        assert sorted(at for span, _ in pieces for at in elements(shape, span) if at in wanted) == sorted(wanted)
        for span, holders in pieces:
            assert list(holders) == [rank for rank in ranks if held[rank] == elements(shape, span)]


def told(runs: Sequence[Held]) -> list[tuple[int, int]]:
    """Every rank that runs name, as often as they do, and how much it has."""
    return sorted((rank, numel) for first, stop, numel, step in runs for rank in range(first, stop, step))


def elements(shape: tuple[int, ...], span: Span) -> list[int]:
    """Which elements of the param a span has."""
    box = Box((0,) * len(shape), shape) if span.block is None else span.block.box
    assert span.block is None or span.block.shape == shape
    return positions(shape, box)[span.start : span.stop]


def test_boxes_answer_as_elements_do() -> None:
    """Cut along none, one or two dims, evenly, unevenly, with nothing for some, in copies, of 2-D to 4-D params."""
    rng = Random(0)
    dims, copied, empty, both = set(), 0, 0, 0
    for _ in range(300):
        spec, matrices = random_cut(rng)
        boxes = random_boxes(rng, spec.shape, rng.choice([1, 2, 3, 4, 5, 6, 8, 8]))
        check(spec.shape, boxes, matrices)
        dims.add(len(spec.shape))
        full = [box for box in boxes if box.numel]
        copied += len(set(full)) < len(full) and len(set(full)) > 1
        empty += len(full) < len(boxes)
        both += any(sum(a < b for a, b in zip(box.shape, spec.shape, strict=True)) > 1 for box in full)
    assert {2, 3} <= dims
    assert min(copied, empty, both) > 10  # so that there is something to see


def boxes_of(shape: tuple[int, ...], *cuts: tuple[int, tuple[int, ...]]) -> tuple[Box, ...]:
    """The boxes of a mesh, its last dim first to change: each cuts a dim of the param at these borders, in order."""
    found = []
    for parts in itertools.product(*(range(len(borders) - 1) for _, borders in cuts)):
        starts, stops = [0] * len(shape), list(shape)
        for (dim, borders), part in zip(cuts, parts, strict=True):
            starts[dim], stops[dim] = borders[part], borders[part + 1]
        found.append(Box(tuple(starts), tuple(stops)))
    return tuple(found)


ROWS = column_blocks("w", 6, (2, 3))  # 6 x 5, in two blocks of columns
WHOLE = (matrix_of("w", 0, 6, 5, (6, 5), Box((0, 0), (6, 5))),)


@pytest.mark.parametrize(
    "boxes",
    [
        boxes_of((6, 5), (0, (0, 2, 4, 6))),
        boxes_of((6, 5), (0, (0, 2, 4, 6, 6))),
        boxes_of((6, 5), (0, (0, 5, 5, 6))),
        boxes_of((6, 5), (1, (0, 2, 5))),
        boxes_of((6, 5), (0, (0, 3, 6)), (1, (0, 3, 5))),
        boxes_of((6, 5), (1, (0, 3, 5)), (0, (0, 1, 6))),
        boxes_of((6, 5), (0, (0, 4, 6))) * 2,
        tuple(itertools.chain.from_iterable(zip(*[boxes_of((6, 5), (0, (0, 4, 6)))] * 2, strict=True))),
        (Box((0, 0), (6, 5)),) * 3,
    ],
    ids=[
        "rows",
        "empty",
        "uneven",
        "columns",
        "both",
        "both turned",
        "replicate x shard",
        "shard x replicate",
        "whole",
    ],
)
@pytest.mark.parametrize("matrices", [WHOLE, ROWS], ids=["one matrix", "columns"])
def test_the_ways_in_which_others_cut(boxes: tuple[Box, ...], matrices: tuple[Matrix, ...]) -> None:
    check((6, 5), boxes, matrices)


def test_a_stack_of_experts_cut_along_each_dim() -> None:
    experts = tuple(matrix_of("w", e, 3, 2, (4, 3, 2), Box((e, 0, 0), (e + 1, 3, 2))) for e in range(4))
    for dim, borders in ((0, (0, 2, 4)), (1, (0, 1, 3)), (2, (0, 1, 2)), (0, (0, 3, 4, 4))):
        check((4, 3, 2), boxes_of((4, 3, 2), (dim, borders)), experts)
        check((4, 3, 2), boxes_of((4, 3, 2), (dim, borders)) * 2, experts)


def test_experts_on_every_so_many_ranks() -> None:
    """Expert parallelism is the inner dim of the mesh: an expert is on every second rank, or third, evenly or not."""
    experts = tuple(matrix_of("w", e, 5, 2, (6, 5, 2), Box((e, 0, 0), (e + 1, 5, 2))) for e in range(6))
    steps = set()
    for shards, (places, borders) in itertools.product((3, 4, 5), ((2, (0, 3, 6)), (3, (0, 2, 4, 6)), (2, (0, 4, 6)))):
        each = -(-5 // shards)
        rows = tuple(min(part * each, 5) for part in range(shards + 1))
        for copies in (1, 2):
            boxes = boxes_of((6, 5, 2), (1, rows), (0, borders)) * copies
            check((6, 5, 2), boxes, experts)
            plan = BoxShards(0, "dense", "w", Boxes((6, 5, 2), boxes))
            found = {step for expert in experts for *_, step in plan.holders(expert)}
            assert found <= {1, places}
            steps |= found
    assert steps == {1, 2, 3}


def test_holders_of_thousands_of_experts_are_looked_up_once_for_all_that_are_held_alike() -> None:
    """4096 ranks: each expert is cut over every eighth of them. What is counted is work, not time."""
    shape, ranks, ep = (256, 2048, 7168), 4096, 8
    boxes = Boxes(shape, over((ranks // ep, Cut(1)), (ep, Cut(0))).boxes(shape, ranks))
    experts = [matrix_of("w", e, *shape[1:], shape, Box((e, 0, 0), (e + 1, *shape[1:]))) for e in range(shape[0])]
    looked_at = []

    def counted(matrix: Matrix, wanted: Box | None, box: Box) -> int:
        looked_at.append(box)
        return numel_of(matrix, wanted, box)

    numel_of, boxes._numel = boxes._numel, counted  # type: ignore[method-assign]
    plan = BoxShards(0, "dense", "w", boxes)
    for number, expert in enumerate(experts):
        place = number * ep // shape[0]
        numel = shape[1] * shape[2] * ep // ranks
        assert plan.holders(expert) == [(place, ranks - ep + place + 1, numel, ep)]
        assert plan.ranks_of(expert) == range(place, ranks, ep)
    assert len(looked_at) == ranks  # not ranks times experts: a box is looked at for one expert that it is a part of


def test_interleaved_rows_cut_along_columns() -> None:
    check((12, 5), boxes_of((12, 5), (1, (0, 2, 5)), (0, (0, 7, 12))), interleaved_blocks("w", 3, (2, 1, 1), 5))


def test_replicas_of_a_mesh_are_copies_and_ranks_of_one_shard_are_in_order() -> None:
    """Two groups of two ranks, each group with all of it: ranks 0 and 2 hold the same rows."""
    plan = BoxShards(0, "dense", "w", Boxes((4, 2), boxes_of((4, 2), (0, (0, 2, 4))) * 2))
    matrix = matrix_of("w", 0, 4, 2, (4, 2), Box((0, 0), (4, 2)))
    assert [plan.copies(plan.spans(rank)[0], rank) for rank in range(4)] == [(0, 2), (1, 3)] * 2
    assert plan.holders(matrix) == [(0, 4, 4, 1)]
    assert list(plan.ranks_of(matrix)) == [0, 1, 2, 3]
    assert plan.spans(1) == (Span("w", Block((4, 2), Box((2, 0), (4, 2))), 0, 4, 0),)
    assert [holders for _, holders in pieces_of(plan, matrix)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_what_every_rank_has_whole_needs_no_block(shape: tuple[int, ...]) -> None:
    plan = BoxShards(2, "dense", "w", Boxes(shape, copied_on(3).boxes(shape, 3)))
    for rank in range(3):
        (span,) = plan.spans(rank)
        assert span == Span("w", None, 0, math.prod(shape), 0)
        assert list(plan.copies(span, rank)) == [0, 1, 2]


def test_ranks_without_elements_have_no_span() -> None:
    plan = BoxShards(0, "dense", "w", Boxes((1, 2), boxes_of((1, 2), (0, (0, 1, 1, 1)))))
    assert [len(plan.spans(rank)) for rank in range(3)] == [1, 0, 0]
    assert [plan.shard_numel(rank) for rank in range(3)] == [2, 0, 0]


@pytest.mark.parametrize(("width", "world", "homes"), [(4096, 4, 1), (64, 4, 4), (4096, 1, 1)])
def test_what_is_dear_is_shared_and_what_is_dear_to_send_is_repeated(width: int, world: int, homes: int) -> None:
    plan = make_plan(table_of([("w", (width, width)), ("v", (width, width))]), Options(memory="params"), world=world)
    (work,) = plan.works
    assert [len(item.homes) for item in work.items] == [homes] * 2
    assert len({tuple(item.homes) for item in work.items}) == (2 if homes < world else 1)


def test_a_faster_wire_shares_what_a_slower_one_repeats() -> None:
    table = table_of([("w", (512, 512))])
    for link, homes in ((10.0, 4), (1000.0, 1)):
        hardware = Hardware(link_gb_s=link)
        (work,) = make_plan(table, Options(memory="params", hardware=hardware), world=4).works
        assert len(work.items[0].homes) == homes

"""The exchange, carried out on lists of integers: what a rank sends, what a home assembles, what comes back."""

import itertools

from hypothesis import given

from layerwise.layout.exchange import Exchange, Piece, exchange_for, sent_numel
from layerwise.layout.plan import make_plan
from layerwise.layout.work import EVERY_RANK
from layerwise.routing.geometry import Box, flat_index
from layerwise.routing.matrices import Matrix
from layerwise.routing.spec import table_of
from tests.strategies import LIGHT, Worked, worked

Memory = dict[tuple[int, int], list[int]]
"""(bucket, shard) -> elements; -1 is padding."""


def value_of(case: Worked, fqn: str, position: int) -> int:
    """A number that no other element of the model has."""
    names = [param.fqn for param in case.table]
    return names.index(fqn) * 10_000 + position


def filled(case: Worked) -> Memory:
    """Every shard with the values of the params it holds."""
    memory: Memory = {}
    for bucket in case.buckets.values():
        for shard in range(bucket.num_shards):
            values = [-1] * bucket.shard_numel(shard)
            for span in bucket.spans(shard):
                for step in range(span.numel):
                    values[span.shard_offset + step] = value_of(case, span.fqn, span.start + step)
            memory[bucket.index, shard] = values
    return memory


def indices(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))))


def in_shard(case: Worked, piece: Piece) -> tuple[tuple[int, int], list[int]]:
    """Which shard a piece lies in and where, region after region."""
    item = case.work.items[piece.item]
    bucket = case.buckets[item.bucket]
    shard = bucket.shard_of(piece.owner)
    span = next(span for span in bucket.spans(shard) if span.fqn == item.matrix.fqn)
    places = [
        span.shard_offset + flat_index(index, item.matrix.grid) - span.start
        for region in piece.regions
        for index in indices(region)
    ]
    return (bucket.index, shard), places


def in_matrix(matrix: Matrix, piece: Piece) -> list[int]:
    """Where a piece lies among the matrix's own row-major elements."""
    return [
        flat_index(index, matrix.box.shape)
        for region in piece.regions
        for index in indices(region.shifted_from(matrix.box.starts))
    ]


def tables_of(case: Worked, cohort: int) -> list[Exchange]:
    return [exchange_for(case.work, case.buckets, cohort, rank) for rank in range(case.work.world)]


def all_to_all(sent: list[list[int]], tables: list[Exchange]) -> list[list[int]]:
    """What the collective does with uneven splits."""
    chunks = []
    for values, table in zip(sent, tables, strict=True):
        borders = list(itertools.accumulate(table.send_splits, initial=0))
        assert borders[-1] == len(values)
        chunks.append([values[start:stop] for start, stop in itertools.pairwise(borders)])
    received = [[value for sender in chunks for value in sender[rank]] for rank in range(len(tables))]
    for values, table in zip(received, tables, strict=True):
        assert len(values) == sum(table.receive_splits)
    return received


def gather_matrices(case: Worked, memory: Memory, tables: list[Exchange]) -> list[dict[int, list[int]]]:
    """Per rank: the matrices it is home to, assembled from what it owns and what arrives."""
    sent = []
    for table in tables:
        located = (in_shard(case, piece) for piece in table.sends)
        sent.append([memory[shard][place] for shard, places in located for place in places])
    homes = []
    for table, values in zip(tables, all_to_all(sent, tables), strict=True):
        whole = {number: [-2] * case.work.items[number].matrix.numel for number in table.homed}
        stream = iter(values)
        for piece in table.receives:
            for place in in_matrix(case.work.items[piece.item].matrix, piece):
                whole[piece.item][place] = next(stream)
        for piece in table.stays:
            shard, places = in_shard(case, piece)
            for target, place in zip(in_matrix(case.work.items[piece.item].matrix, piece), places, strict=True):
                whole[piece.item][target] = memory[shard][place]
        homes.append(whole)
    return homes


def return_matrices(case: Worked, memory: Memory, homes: list[dict[int, list[int]]], tables: list[Exchange]) -> None:
    """The way back, by nothing but the inverse tables."""
    back = [table.inverse() for table in tables]
    sent = [
        [
            whole[piece.item][place]
            for piece in table.sends
            for place in in_matrix(case.work.items[piece.item].matrix, piece)
        ]
        for whole, table in zip(homes, back, strict=True)
    ]
    for table, whole, values in zip(back, homes, all_to_all(sent, back), strict=True):
        stream = iter(values)
        for piece in table.receives:
            shard, places = in_shard(case, piece)
            for place in places:
                memory[shard][place] = next(stream)
        for piece in table.stays:
            shard, places = in_shard(case, piece)
            for place, source in zip(places, in_matrix(case.work.items[piece.item].matrix, piece), strict=True):
                memory[shard][place] = whole[piece.item][source]


@LIGHT
@given(worked())
def test_a_home_assembles_exactly_its_slice_of_the_param(case: Worked) -> None:
    memory = filled(case)
    for cohort in range(case.work.num_cohorts):
        for whole in gather_matrices(case, memory, tables_of(case, cohort)):
            for number, values in whole.items():
                matrix = case.work.items[number].matrix
                assert values == [
                    value_of(case, matrix.fqn, flat_index(index, matrix.grid)) for index in indices(matrix.box)
                ]


@LIGHT
@given(worked())
def test_exchange_then_inverse_is_the_identity(case: Worked) -> None:
    memory = filled(case)
    for cohort in range(case.work.num_cohorts):
        tables = tables_of(case, cohort)
        return_matrices(case, memory, gather_matrices(case, memory, tables), tables)
    assert memory == filled(case)


@LIGHT
@given(worked())
def test_what_a_home_computes_reaches_every_element_once_and_padding_never(case: Worked) -> None:
    memory = filled(case)
    for cohort in range(case.work.num_cohorts):
        tables = tables_of(case, cohort)
        homes = gather_matrices(case, memory, tables)
        updated = [
            {number: [value + 1_000_000 for value in values] for number, values in whole.items()} for whole in homes
        ]
        return_matrices(case, memory, updated, tables)
    assert memory == {
        key: [value + 1_000_000 if value >= 0 else value for value in values] for key, values in filled(case).items()
    }


@LIGHT
@given(worked())
def test_what_one_rank_sends_another_receives_piece_by_piece(case: Worked) -> None:
    for cohort in range(case.work.num_cohorts):
        tables = tables_of(case, cohort)
        for sender, receiver in itertools.product(tables, tables):
            sends = [piece for piece in sender.sends if piece.home == receiver.rank]
            receives = [piece for piece in receiver.receives if piece.owner == sender.rank]
            assert sends == receives
            assert (
                sender.send_splits[receiver.rank]
                == receiver.receive_splits[sender.rank]
                == sum(piece.numel for piece in sends)
            )


@LIGHT
@given(worked())
def test_nothing_is_sent_to_oneself_and_the_wire_order_is_by_peer(case: Worked) -> None:
    for cohort in range(case.work.num_cohorts):
        for table in tables_of(case, cohort):
            assert table.send_splits[table.rank] == table.receive_splits[table.rank] == 0
            assert [piece.home for piece in table.sends] == sorted(piece.home for piece in table.sends)
            assert [piece.owner for piece in table.receives] == sorted(piece.owner for piece in table.receives)
            assert all(piece.owner == piece.home == table.rank for piece in table.stays)


@LIGHT
@given(worked())
def test_every_matrix_is_homed_in_one_cohort_by_its_home_alone(case: Worked) -> None:
    homed = [
        (number, table.rank)
        for cohort in range(case.work.num_cohorts)
        for table in tables_of(case, cohort)
        for number in table.homed
    ]
    expected = [
        (number, rank)
        for number, item in enumerate(case.work.items)
        for rank in (range(case.work.world) if item.home == EVERY_RANK else [item.home])
    ]
    assert sorted(homed) == sorted(expected)


@LIGHT
@given(worked())
def test_the_inverse_of_the_inverse_is_the_exchange(case: Worked) -> None:
    for table in tables_of(case, 0):
        back = table.inverse()
        assert (back.send_splits, back.receive_splits) == (table.receive_splits, table.send_splits)
        assert back.inverse() == table


@LIGHT
@given(worked())
def test_sent_numel_is_the_sum_over_all_tables(case: Worked) -> None:
    totals = sent_numel(case.work, case.buckets)
    assert len(totals) == case.work.num_cohorts
    for cohort, (there, back) in enumerate(totals):
        tables = tables_of(case, cohort)
        assert there == [sum(table.send_splits) for table in tables]
        assert back == [sum(table.receive_splits) for table in tables]


def test_a_world_of_one_moves_nothing() -> None:
    plan = make_plan(table_of([("a", (8, 8)), ("b", (16, 8))]), world=1)
    (work,) = plan.works
    table = exchange_for(work, {bucket.index: bucket for bucket in plan.buckets}, 0, 0)
    assert (table.sends, table.receives, table.send_splits) == ((), (), (0,))
    assert len(table.stays) == len(table.homed) == 2
    assert sent_numel(work, {bucket.index: bucket for bucket in plan.buckets}) == [([0], [0])]

"""The exchange, carried out on lists of integers: what a rank sends, what a home assembles, what comes back."""

import itertools
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.exchange import Exchange, Leg, Parcel, exchange_for, moved_numel, received_numel
from layerwise.layout.options import Options
from layerwise.layout.plan import make_plan
from layerwise.layout.shards import ShardPlan
from layerwise.layout.spans import Address, Span
from layerwise.layout.work import WorkPlan
from layerwise.routing.matrices import Matrix
from layerwise.routing.spec import table_of
from tests.strategies import LIGHT, Scattered, Worked, anywhere, boxed, dealt, scattered, worked

Memory = dict[tuple[int, int], list[int]]
"""(shard plan, rank) -> elements; -1 is padding."""
NEW = 1_000_000
"""What homes add to every element."""

cases = st.one_of(worked(), boxed(), dealt(), scattered())
"""Every kind of storage that there is, and some that nobody has."""
anyhow = st.builds(anywhere, cases, st.integers(0, 2**16).map(Random)) | cases
"""With homes that a policy chose, or with any."""


def flat(index: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    position = 0
    for step, size in zip(index, sizes, strict=True):
        position = position * size + step
    return position


def indices(starts: tuple[int, ...], stops: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, starts, stops)))


def value_of(case: Worked, fqn: str, position: int) -> int:
    """A number that no other element of the model has."""
    names = [param.fqn for param in case.table]
    return names.index(fqn) * 10_000 + position


def positions(span: Span) -> list[int]:
    """Which elements of its param a span has."""
    if span.block is None:
        return list(range(span.start, span.stop))
    shape, (starts, stops) = span.block
    return [flat(index, shape) for index in indices(starts, stops)][span.start : span.stop]


def filled(case: Worked) -> Memory:
    """Every shard with the values of the params it holds."""
    memory: Memory = {}
    for plan in case.shards:
        for rank in range(plan.world):
            values = [-1] * plan.shard_numel(rank)
            for span in plan.spans(rank):
                for place, position in enumerate(positions(span), start=span.shard_offset):
                    assert values[place] == -1
                    values[place] = value_of(case, span.fqn, position)
            memory[plan.index, rank] = values
    return memory


def places(shape: tuple[int, ...], address: Address) -> list[int]:
    """Where the elements of a dense box lie."""
    return [
        address.offset + sum(step * stride for step, stride in zip(index, address.strides, strict=True))
        for index in indices((0,) * len(shape), shape)
    ]


def in_shard(parcel: Parcel) -> list[int]:
    """Where a parcel lies in its holder's shard, region after region."""
    return [place for region in parcel.regions for place in places(region.shape, region.in_shard)]


def in_matrix(parcel: Parcel) -> list[int]:
    """Where it lies among the matrix's own row-major elements."""
    return [place for region in parcel.regions for place in places(region.shape, region.in_matrix)]


def tables_of(case: Worked, cohort: int) -> list[Exchange]:
    return [exchange_for(case.work, case.by_index, cohort, rank) for rank in range(case.work.world)]


def all_to_all(sent: list[list[int]], legs: list[Leg]) -> list[list[int]]:
    """What the collective does with uneven splits."""
    chunks = []
    for values, leg in zip(sent, legs, strict=True):
        borders = list(itertools.accumulate(leg.send_splits, initial=0))
        assert borders[-1] == len(values)
        chunks.append([values[start:stop] for start, stop in itertools.pairwise(borders)])
    received = [[value for sender in chunks for value in sender[rank]] for rank in range(len(legs))]
    for rank, (values, leg) in enumerate(zip(received, legs, strict=True)):
        assert tuple(len(sender[rank]) for sender in chunks) == leg.receive_splits
        assert len(values) == sum(leg.receive_splits)
    return received


def gather_matrices(case: Worked, memory: Memory, tables: list[Exchange]) -> list[dict[int, list[int]]]:
    """Per rank: the matrices it is home to, assembled from what it holds and what arrives. No element comes twice."""

    def held(parcel: Parcel) -> list[int]:
        shard = memory[case.work.items[parcel.item].shard, parcel.holder]
        return [shard[place] for place in in_shard(parcel)]

    sent = [[value for parcel in table.there.sends for value in held(parcel)] for table in tables]
    homes = []
    for table, values in zip(tables, all_to_all(sent, [table.there for table in tables]), strict=True):
        whole = {number: [-2] * case.work.items[number].matrix.numel for number in table.homed}
        stream = iter(values)
        arrived = [(parcel, list(itertools.islice(stream, parcel.numel))) for parcel in table.there.receives]
        assert next(stream, None) is None
        for parcel, found in [*arrived, *((parcel, held(parcel)) for parcel in table.stays)]:
            for place, value in zip(in_matrix(parcel), found, strict=True):
                assert whole[parcel.item][place] == -2
                whole[parcel.item][place] = value
        homes.append(whole)
    return homes


def return_matrices(case: Worked, memory: Memory, homes: list[dict[int, list[int]]], tables: list[Exchange]) -> None:
    """The way back. No element comes twice."""
    sent = [
        [whole[parcel.item][place] for parcel in table.back.sends for place in in_matrix(parcel)]
        for whole, table in zip(homes, tables, strict=True)
    ]
    for table, whole, values in zip(tables, homes, all_to_all(sent, [table.back for table in tables]), strict=True):
        stream = iter(values)
        arrived = [(parcel, list(itertools.islice(stream, parcel.numel))) for parcel in table.back.receives]
        assert next(stream, None) is None
        stayed = [(parcel, [whole[parcel.item][place] for place in in_matrix(parcel)]) for parcel in table.stays]
        for parcel, found in [*arrived, *stayed]:
            assert parcel.holder == table.rank
            shard = memory[case.work.items[parcel.item].shard, table.rank]
            for place, value in zip(in_shard(parcel), found, strict=True):
                assert 0 <= shard[place] < NEW
                shard[place] = value


def slice_of(case: Worked, matrix: Matrix) -> list[int]:
    """The values of a matrix, element by element."""
    return [
        value_of(case, matrix.fqn, flat(index, matrix.grid)) for index in indices(matrix.box.starts, matrix.box.stops)
    ]


@LIGHT
@given(anyhow)
def test_a_home_assembles_exactly_its_slice_of_the_param(case: Worked) -> None:
    memory = filled(case)
    for cohort in range(case.work.num_cohorts):
        for whole in gather_matrices(case, memory, tables_of(case, cohort)):
            for number, values in whole.items():
                assert values == slice_of(case, case.work.items[number].matrix)


@LIGHT
@given(anyhow)
def test_every_holder_gets_every_element_of_its_spans_back(case: Worked) -> None:
    memory = filled(case)
    for cohort in range(case.work.num_cohorts):
        tables = tables_of(case, cohort)
        homes = gather_matrices(case, memory, tables)
        updated = [{number: [value + NEW for value in values] for number, values in whole.items()} for whole in homes]
        return_matrices(case, memory, updated, tables)
    assert memory == {
        key: [value + NEW if value >= 0 else value for value in values] for key, values in filled(case).items()
    }


def by_content(parcels: list[Parcel]) -> list[tuple[int, int, int, list[int]]]:
    """Parcels as both ends must know them. Where the elements lie in a shard is for the holder alone to know."""
    return [(parcel.item, parcel.holder, parcel.home, in_matrix(parcel)) for parcel in parcels]


@LIGHT
@given(anyhow)
def test_what_one_rank_sends_another_receives_parcel_by_parcel(case: Worked) -> None:
    is_scattered = any(isinstance(plan, Scattered) for plan in case.shards)
    for cohort in range(case.work.num_cohorts):
        tables = tables_of(case, cohort)
        for sender, receiver in itertools.product(tables, tables):
            there = [parcel for parcel in sender.there.sends if parcel.home == receiver.rank]
            back = [parcel for parcel in sender.back.sends if parcel.holder == receiver.rank]
            for leg, sends, receives in (
                ("there", there, [parcel for parcel in receiver.there.receives if parcel.holder == sender.rank]),
                ("back", back, [parcel for parcel in receiver.back.receives if parcel.home == sender.rank]),
            ):
                assert by_content(sends) == by_content(receives)
                assert is_scattered or sends == receives
                out, into = getattr(sender, leg), getattr(receiver, leg)
                assert (
                    out.send_splits[receiver.rank]
                    == into.receive_splits[sender.rank]
                    == sum(parcel.numel for parcel in sends)
                )


@LIGHT
@given(anyhow)
def test_nothing_is_sent_to_oneself_and_the_wire_order_is_by_peer(case: Worked) -> None:
    for cohort in range(case.work.num_cohorts):
        for table in tables_of(case, cohort):
            for leg in (table.there, table.back):
                assert leg.send_splits[table.rank] == leg.receive_splits[table.rank] == 0
                assert len(leg.send_splits) == len(leg.receive_splits) == case.work.world
            there, back = table.there, table.back
            assert [parcel.home for parcel in there.sends] == sorted(parcel.home for parcel in there.sends)
            assert [parcel.holder for parcel in there.receives] == sorted(parcel.holder for parcel in there.receives)
            assert [parcel.holder for parcel in back.sends] == sorted(parcel.holder for parcel in back.sends)
            assert [parcel.home for parcel in back.receives] == sorted(parcel.home for parcel in back.receives)
            assert all(parcel.holder == parcel.home == table.rank for parcel in table.stays)
            assert all(parcel.holder == table.rank for parcel in (*there.sends, *back.receives))
            assert all(parcel.home == table.rank for parcel in (*there.receives, *back.sends))


@LIGHT
@given(anyhow)
def test_every_matrix_is_homed_in_one_cohort_by_its_homes_alone(case: Worked) -> None:
    homed = [
        (number, table.rank)
        for cohort in range(case.work.num_cohorts)
        for table in tables_of(case, cohort)
        for number in table.homed
    ]
    expected = [(number, rank) for number, item in enumerate(case.work.items) for rank in item.homes]
    assert sorted(homed) == sorted(expected)


@LIGHT
@given(worked("flat", "padded", "compact"))
def test_without_copies_the_way_back_is_the_way_there_turned_round(case: Worked) -> None:
    for cohort in range(case.work.num_cohorts):
        for table in tables_of(case, cohort):
            there, back = table.there, table.back
            assert (back.send_splits, back.receive_splits) == (there.receive_splits, there.send_splits)
            assert (back.sends, back.receives) == (there.receives, there.sends)


@LIGHT
@given(anyhow)
def test_every_copy_and_every_home_has_its_nearest_peer(case: Worked) -> None:
    """Of those who could send, the one that comes as far along among them as the receiver does among all ranks; and nothing
    is sent that is there already."""
    for cohort in range(case.work.num_cohorts):
        for table in tables_of(case, cohort):
            for parcel in table.there.sends:
                matrix, plan = case.work.items[parcel.item].matrix, case.by_index[case.work.items[parcel.item].shard]
                wanted = {slice_of(case, matrix)[place] for place in in_matrix(parcel)}
                holding = [
                    rank
                    for rank in range(plan.world)
                    if wanted <= {value_of(case, span.fqn, at) for span in plan.spans(rank) for at in positions(span)}
                ]
                assert parcel.home not in holding
                assert table.rank == holding[parcel.home * len(holding) // plan.world]
            for parcel in table.back.sends:
                homes = case.work.items[parcel.item].homes
                assert parcel.holder not in homes
                assert table.rank == homes[parcel.holder * len(homes) // case.work.world]


@LIGHT
@given(anyhow)
def test_received_numel_is_the_sum_over_all_tables(case: Worked) -> None:
    totals = received_numel(case.work, case.by_index)
    for cohort in range(case.work.num_cohorts):
        there, back = totals.get(cohort, ([0] * case.work.world, [0] * case.work.world))
        tables = tables_of(case, cohort)
        assert list(there) == [sum(table.there.receive_splits) for table in tables]
        assert list(back) == [sum(table.back.receive_splits) for table in tables]


def sent_numel(work: WorkPlan, plans: Mapping[int, ShardPlan]) -> list[tuple[list[int], list[int]]]:
    """`moved_numel` of every cohort."""
    found, nothing = moved_numel(work, plans), [0] * work.world
    return [found.get(cohort, (nothing, nothing)) for cohort in range(work.num_cohorts)]


@LIGHT
@given(anyhow)
def test_sent_numel_is_the_sum_over_all_tables(case: Worked) -> None:
    totals = sent_numel(case.work, case.by_index)
    assert len(totals) == case.work.num_cohorts
    for cohort, (there, back) in enumerate(totals):
        tables = tables_of(case, cohort)
        assert there == [sum(table.there.send_splits) for table in tables]
        assert back == [sum(table.back.send_splits) for table in tables]
        assert sum(there) == sum(sum(table.there.receive_splits) for table in tables)
        assert sum(back) == sum(sum(table.back.receive_splits) for table in tables)


@pytest.mark.parametrize("layout", ["padded", "compact", "replicated"])
def test_where_everybody_works_on_what_he_holds_nothing_moves(layout: str) -> None:
    plan = make_plan(table_of([(f"w{number}", (8, 8)) for number in range(5)]), Options(layout=layout), world=3)
    (work,) = plan.works
    shards = {shard.index: shard for shard in plan.shards}
    assert sent_numel(work, shards) == [([0] * 3, [0] * 3)] * work.num_cohorts
    for cohort, rank in itertools.product(range(work.num_cohorts), range(3)):
        table = exchange_for(work, shards, cohort, rank)
        assert table.there == table.back == Leg((), (), (0,) * 3, (0,) * 3)


def test_a_world_of_one_moves_nothing() -> None:
    plan = make_plan(table_of([("a", (8, 8)), ("b", (16, 8))]), world=1)
    (work,) = plan.works
    shards = {shard.index: shard for shard in plan.shards}
    table = exchange_for(work, shards, 0, 0)
    for leg in (table.there, table.back):
        assert (leg.sends, leg.receives, leg.send_splits, leg.receive_splits) == ((), (), (0,), (0,))
    assert len(table.stays) == len(table.homed) == 2
    assert sent_numel(work, shards) == [([0], [0])]

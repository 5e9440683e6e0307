"""Blocks of matrices that tensor parallelism has cut, against element by element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.blocks import count_blocks
from layerwise.layout.meshes import Cut, Placed, over
from layerwise.layout.options import Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import ParamTable, table_of
from layerwise.routing.split import interleaved_rows
from tests.distributed.test_splits import FUSIONS

TP = 2
"""Ranks of tensor parallelism, where no test says another number."""


def planned(
    table: ParamTable,
    placed: Placed,
    *,
    world: int = TP,
    rules: list[RouteRule] | None = None,
    tp_mode: str = "blockwise",
) -> Plan:
    options = Options(memory="params", gradients="params", rules=rules, tp_mode=tp_mode)  # type: ignore[arg-type]
    return make_plan(table, options, world=world, placed=dict.fromkeys((param.fqn for param in table), placed))


def elements(grid: tuple[int, ...], starts: tuple[int, ...], stops: tuple[int, ...]) -> torch.Tensor:
    """Where the elements of a box of a grid lie among all of its elements."""
    every = torch.arange(int(torch.tensor(grid).prod())).view(grid)
    return every[tuple(map(slice, starts, stops))].reshape(-1)


@given(st.sampled_from(sorted(FUSIONS)), st.integers(0, 1), st.integers(1, 5), st.integers(1, 3))
def test_every_element_of_a_matrix_is_in_one_block_with_those_that_are_on_its_rank(
    name: str, dim: int, ranks: int, shards: int
) -> None:
    fusion = FUSIONS[name]
    places = torch.arange(torch.Size(fusion.shape).numel()).view(fusion.shape)
    placed = over((shards, Cut(0, ranks if dim == 0 else 1)), (ranks, Cut(dim)), data_dims=1)
    rule = RouteRule(pattern="w", to="matrix", split=fusion.split)
    plan = planned(table_of([("w", fusion.shape)]), placed, world=shards * ranks, rules=[rule])
    found = iter(plan.routes["w"].matrices)
    # A split that takes some elements apart into matrices of their own leaves rows and columns, whatever chunks are cut off.
    for matrix in fusion.take_apart(places):
        for chunk in places.chunk(ranks, dim):
            inside = torch.isin(matrix.contiguous(), chunk.contiguous())
            if not inside.any():
                continue
            block, expected = next(found), matrix[inside.any(1)][:, inside.any(0)]
            assert block.logical_shape == tuple(expected.shape)
            assert block.scaled_as == tuple(matrix.shape)
            stored = expected.T if block.transposed else expected
            assert torch.equal(elements(block.grid, *block.box), stored.reshape(-1))
            assert (block.whole is None) == (expected.shape == matrix.shape)
    assert next(found, None) is None


def test_whole_matrices_stay_as_they_are_and_so_does_their_plan() -> None:
    table = table_of([("stack", (4, 6, 5)), ("heads", (12, 4))])
    heads = RouteRule(pattern="heads", to="matrix", row_blocks=(6, 6))
    # Experts apart, and two blocks of rows that end where the second rank begins: nothing is cut.
    placed = over((TP, Cut(0)))
    with_blocks, without = (planned(table, placed, rules=[heads], tp_mode=mode) for mode in ("blockwise", "auto"))
    assert with_blocks.digest == without.digest
    assert count_blocks(with_blocks.routes.values()) == 0
    assert "tp_mode" not in with_blocks.describe()


def test_what_fully_shard_cuts_is_no_block() -> None:
    table = table_of([("w", (8, 6))])
    assert count_blocks(planned(table, over((2, Cut(0)), data_dims=1)).routes.values()) == 0
    # Chunks of chunks: the blocks are those of tensor parallelism, 4 rows each.
    both = planned(table, over((2, Cut(0, 2)), (2, Cut(0)), data_dims=1), world=4)
    assert [matrix.logical_shape for matrix in both.routes["w"].matrices] == [(4, 6), (4, 6)]
    # On several meshes, each with a copy.
    copies = planned(table, Placed((0, 2), (2,), (Cut(1),)).on_all([(0, 2), (1, 3)]), world=4)
    assert [matrix.logical_shape for matrix in copies.routes["w"].matrices] == [(8, 3), (8, 3)]


def test_the_plan_says_that_the_update_is_another_one() -> None:
    plan = planned(table_of([("w", (7, 6))]), over((TP, Cut(0))))
    assert plan.route("w").reason.endswith(
        "; tensor parallelism cuts it into 2 blocks, each orthogonalised by itself (tp_mode='blockwise'): another update than that "
        "of whole matrices"
    )
    assert (
        "  2 of these matrices are blocks of larger ones that tensor parallelism has cut (tp_mode='blockwise'): their update is "
        "another one than that of whole matrices"
    ) in plan.describe().splitlines()


def test_a_route_rule_has_the_last_word() -> None:
    table = table_of([("up", (8, 6)), ("down", (6, 8))])
    for mode, other in itertools.permutations(("auto", "blockwise")):
        rule = RouteRule(pattern="up", to="matrix", options={"tp_mode": mode})
        plan = planned(table, over((TP, Cut(0))), rules=[rule], tp_mode=other)
        cut = {fqn for fqn, route in plan.routes.items() if count_blocks([route])}
        assert cut == {"up" if mode == "blockwise" else "down"}


def test_a_block_without_copies_stays_with_its_rank_and_one_with_copies_is_shared() -> None:
    table = table_of([("w", (13, 6))])
    (alone,) = planned(table, over((3, Cut(0))), world=3).works
    assert [tuple(item.homes) for item in alone.items] == [(0,), (1,), (2,)]
    copied = planned(table, over((2, None), (2, Cut(0))), world=4)
    assert {rank for item in copied.works[0].items for rank in item.homes} <= {0, 1, 2, 3}
    assert copied.own[0].work in ("balance", "repeat")


def test_parts_of_heads_that_are_no_matrix_are_refused_by_name() -> None:
    # Four heads of 4 + 2 rows on three ranks: the first has one head and a third of the next.
    rule = RouteRule(pattern="w", to="matrix", split=interleaved_rows((24, 5), 4, (4, 2)))
    table = table_of([("w", (24, 5))])
    with pytest.raises(
        ValueError, match=r"param 'w' of shape \(24, 5\) is cut by tensor parallelism to 0 to 8, 0 to 5"
    ) as caught:
        planned(table, over((3, Cut(0))), world=3, rules=[rule])
    assert "RouteRule(pattern='w', to='matrix', options={'tp_mode': 'auto'})" in str(caught.value)
    whole = RouteRule(pattern="w", to="matrix", split=rule.split, options={"tp_mode": "auto"})
    assert count_blocks(planned(table, over((3, Cut(0))), world=3, rules=[whole]).routes.values()) == 0
    # Cuts between heads are fine.
    assert [m.logical_shape for m in planned(table, over((2, Cut(0))), rules=[rule]).routes["w"].matrices] == [
        (8, 5),
        (8, 5),
        (4, 5),
        (4, 5),
    ]


def test_a_mode_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_mode must be one of auto, blockwise, got 'blocks'"):
        Options(tp_mode="blocks")  # type: ignore[arg-type]

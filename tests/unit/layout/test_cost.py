import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout import cost
from layerwise.layout.cost import GramRoom, NewtonSchulz, newton_schulz_flops, resolve_method
from tests.strategies import MANY

sides = st.integers(1, 30_000)


@MANY
@given(sides, sides, st.integers(1, 9))
def test_a_matrix_costs_the_flops_of_the_form_that_will_run(rows: int, cols: int, steps: int) -> None:
    gram = resolve_method("auto", rows, cols) == "gram"
    expected = newton_schulz_flops(rows, cols, steps, gram=gram)
    assert NewtonSchulz(steps=steps).flops(rows, cols) == expected


def test_cost_by_hand() -> None:
    assert NewtonSchulz(steps=3).flops(10, 10) == 3 * 3 * 2 * 10**3
    assert NewtonSchulz().flops(30, 10) == 2 * (2 * 2 * 10 * 10 * 30) + 14 * 2 * 10**3


@MANY
@given(sides, sides, st.integers(1, 9), st.booleans())
def test_a_matrix_and_its_transpose_cost_the_same(rows: int, cols: int, steps: int, gram: bool) -> None:
    assert newton_schulz_flops(rows, cols, steps, gram=gram) == newton_schulz_flops(cols, rows, steps, gram=gram)


@MANY
@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 7))
def test_standard_flops_are_those_of_its_three_products(rows: int, cols: int, steps: int) -> None:
    short, long = sorted((rows, cols))
    gram_product = 2 * short * long * short
    square_product = 2 * short * short * short
    back_product = 2 * short * short * long
    assert newton_schulz_flops(rows, cols, steps, gram=False) == steps * (gram_product + square_product + back_product)


def test_gram_saves_work_on_oblong_matrices_only() -> None:
    assert newton_schulz_flops(4096, 14336, 5, gram=True) < newton_schulz_flops(4096, 14336, 5, gram=False)
    assert newton_schulz_flops(4096, 4096, 5, gram=True) > newton_schulz_flops(4096, 4096, 5, gram=False)


def test_half_of_a_batch_goes_to_the_workspace_where_that_takes_less_of_much() -> None:
    long = GramRoom.of(24, 4096 * 1024, 1024 * 1024, segments=2)
    assert long == (12, 2, 3 * 24 * 1024 * 1024)  # as much as the small matrices take anyway
    assert GramRoom.of(24, 4096 * 1024, 1024 * 1024, segments=1) == (24, 3, 4 * 24 * 1024 * 1024)
    assert GramRoom.of(24, 3072 * 1024, 1024 * 1024, segments=2).part == 24
    assert GramRoom.of(7, 8192 * 1024, 1024 * 1024, segments=2).part == 4
    assert GramRoom.of(6, 8192 * 1024, 1024 * 1024, segments=2) == (6, 3, 6 * 8192 * 1024)  # no more than HALVED_FROM


@pytest.mark.parametrize("halved_from", [0, cost.HALVED_FROM])
@pytest.mark.parametrize("segments", [1, 2, 3, 4])
@pytest.mark.parametrize(("large", "small"), [(5, 4), (8, 4), (11, 4), (16, 4), (100, 4), (9, 9)])
def test_in_a_workspace_there_is_room_for_all_that_lies_there_at_once(
    large: int, small: int, segments: int, halved_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "HALVED_FROM", halved_from)
    for batch in range(1, 20):
        part, fitting, numel = GramRoom.of(batch, large, small, segments)
        others = 3 * batch * small
        assert numel >= others  # while all matrices are at home
        assert numel >= part * large + others - fitting * batch * small  # while some are away
        free = batch * large if part == batch else (batch - part) * large
        assert fitting * batch * small <= free
        assert batch - part <= part  # who follows finds room in the place of who left
        assert part == batch or segments % 2 == 0

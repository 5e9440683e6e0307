from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.cost import newton_schulz_cost, newton_schulz_flops
from tests.strategies import MANY

sides = st.integers(1, 30_000)


def test_cost_is_the_long_side_times_the_short_side_squared() -> None:
    assert newton_schulz_cost(4096, 1024) == 4096 * 1024 * 1024
    assert newton_schulz_cost(3, 3) == 27


@MANY
@given(sides, sides, st.integers(1, 9), st.booleans())
def test_a_matrix_and_its_transpose_cost_the_same(rows: int, cols: int, steps: int, gram: bool) -> None:
    assert newton_schulz_cost(rows, cols) == newton_schulz_cost(cols, rows)
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

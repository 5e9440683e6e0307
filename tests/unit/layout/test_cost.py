from hypothesis import given
from hypothesis import strategies as st

from layerwise.layout.cost import NewtonSchulz, newton_schulz_flops, resolve_method
from tests.strategies import MANY

sides = st.integers(1, 30_000)


@MANY
@given(sides, sides, st.integers(1, 9), st.sampled_from(["auto", "standard", "gram"]))
def test_a_matrix_costs_the_flops_of_the_form_that_will_run(rows: int, cols: int, steps: int, method: str) -> None:
    gram = resolve_method(method, rows, cols) == "gram"
    expected = newton_schulz_flops(rows, cols, steps, gram=gram)
    assert NewtonSchulz(steps=steps, method=method).flops(rows, cols) == expected


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

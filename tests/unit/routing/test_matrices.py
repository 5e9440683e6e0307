import re

import pytest

from layerwise.routing.geometry import Box
from layerwise.routing.matrices import matrices_of
from layerwise.routing.spec import ModuleKind, ParamSpec


def linear(shape: tuple[int, ...]) -> ParamSpec:
    return ParamSpec(fqn="blocks.0.w", shape=shape, module_kind=ModuleKind.LINEAR, module_type="Linear")


def test_a_plain_weight_is_one_matrix() -> None:
    (matrix,) = matrices_of(linear((6, 4)))
    assert (matrix.rows, matrix.cols, matrix.label) == (6, 4, "blocks.0.w[0]")
    assert (matrix.grid, matrix.box) == ((24,), Box((0,), (24,)))


def test_row_blocks_of_unequal_size_are_matrices_one_after_another() -> None:
    blocks = matrices_of(linear((8, 3)), row_blocks=(4, 1, 3))
    assert [(block.rows, block.cols) for block in blocks] == [(4, 3), (1, 3), (3, 3)]
    assert [(block.flat_start, block.flat_stop) for block in blocks] == [(0, 12), (12, 15), (15, 24)]


def test_a_stack_is_one_matrix_per_entry() -> None:
    experts = matrices_of(ParamSpec(fqn="experts", shape=(3, 4, 5)))
    assert [(expert.index, expert.rows, expert.cols, expert.flat_start) for expert in experts] == [
        (0, 4, 5, 0),
        (1, 4, 5, 20),
        (2, 4, 5, 40),
    ]


def test_a_convolution_is_flattened_to_one_matrix() -> None:
    (matrix,) = matrices_of(ParamSpec(fqn="conv", shape=(8, 4, 3, 3), module_kind=ModuleKind.CONV))
    assert (matrix.rows, matrix.cols) == (8, 36)


def test_a_one_dimensional_convolution_is_no_stack() -> None:
    (matrix,) = matrices_of(ParamSpec(fqn="conv", shape=(8, 4, 3), module_kind=ModuleKind.CONV))
    assert (matrix.rows, matrix.cols) == (8, 12)


@pytest.mark.parametrize("blocks", [(4, 3), (4, 5), (8, 0), (9, -1)])
def test_row_blocks_that_do_not_add_up_are_refused(blocks: tuple[int, ...]) -> None:
    expected = (
        f"param 'blocks.0.w' has shape (8, 3): row blocks {blocks} must be positive and sum to 8, got {sum(blocks)}. "
        "Fix matrix_splits() of its module or row_blocks of the rule that matched it."
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        matrices_of(linear((8, 3)), row_blocks=blocks)


def test_row_blocks_on_a_stack_are_refused() -> None:
    expected = (
        "param 'experts' is a stack of shape (3, 4, 5): row_blocks=(2, 2) applies to 2-D params only. "
        "Leave it out: every entry of the stack is one matrix."
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        matrices_of(ParamSpec(fqn="experts", shape=(3, 4, 5)), row_blocks=(2, 2))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((7,), "param 'blocks.0.w' has shape (7,): a matrix rule needs at least two dims. Route it to 'other'."),
        ((), "param 'blocks.0.w' has shape (): a matrix rule needs at least two dims. Route it to 'other'."),
        ((0, 4), "param 'blocks.0.w' has shape (0, 4): a matrix rule needs elements. Route it to 'other'."),
        (
            (2, 3, 4, 5),
            "param 'blocks.0.w' has shape (2, 3, 4, 5): expected a matrix, a stack (E, M, N) or a convolution, "
            "got 4 dims. Route it to 'other'.",
        ),
    ],
)
def test_what_is_no_matrix_is_refused_by_name(shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        matrices_of(linear(shape))

import re

import pytest

from layerwise.routing.geometry import Box
from layerwise.routing.matrices import matrices_of
from layerwise.routing.spec import ModuleKind, ParamSpec
from layerwise.routing.split import row_blocks, transposed, whole


def linear(shape: tuple[int, ...]) -> ParamSpec:
    return ParamSpec(fqn="blocks.0.w", shape=shape, module_kind=ModuleKind.LINEAR, module_type="Linear")


def test_a_plain_weight_is_one_matrix() -> None:
    (matrix,) = matrices_of(linear((6, 4)))
    assert (matrix.rows, matrix.cols, matrix.label) == (6, 4, "blocks.0.w[0]")
    assert (matrix.grid, matrix.box) == ((24,), Box((0,), (24,)))


def test_row_blocks_of_unequal_size_are_matrices_one_after_another() -> None:
    blocks = matrices_of(linear((8, 3)), row_blocks((8, 3), (4, 1, 3)))
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


def test_a_split_made_for_another_shape_is_refused_by_the_name_of_the_param() -> None:
    with pytest.raises(ValueError) as caught:
        matrices_of(linear((8, 3)), whole((8, 4)))
    assert str(caught.value) == (
        "param 'blocks.0.w' has shape (8, 3): its split has 32 elements in grid (8, 4), the param 24. "
        "Fix matrix_splits() of its module or the rule that matched it."
    )


def test_a_grid_that_runs_across_the_axes_of_the_param_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("its split has grid (4, 6), which does not cut the axes")):
        matrices_of(linear((8, 3)), whole((4, 6)))


def test_a_matrix_stored_transposed_knows_its_logical_shape() -> None:
    first, second = matrices_of(linear((8, 6)), transposed((8, 6), (4, 2)))
    assert (first.rows, first.cols, first.logical_shape) == (8, 4, (4, 8))
    assert (second.rows, second.cols, second.logical_shape) == (8, 2, (2, 8))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((7,), "param 'blocks.0.w' has shape (7,): a matrix rule needs at least two dims. Route it to 'other'."),
        ((), "param 'blocks.0.w' has shape (): a matrix rule needs at least two dims. Route it to 'other'."),
        ((0, 4), "param 'blocks.0.w' has shape (0, 4): a matrix rule needs elements. Route it to 'other'."),
        (
            (2, 3, 4, 5),
            "param 'blocks.0.w' has shape (2, 3, 4, 5): expected a matrix, a stack (E, M, N) or a convolution, "
            "got 4 dims. Route it to 'other', or say how it splits.",
        ),
    ],
)
def test_what_is_no_matrix_is_refused_by_name(shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        matrices_of(linear(shape))

"""Names that share a line."""

from __future__ import annotations

import pytest

from layerwise.cli.folding import counted, fold, ranges


def test_names_fold_over_every_number_when_all_combinations_are_there() -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(3) for expert in range(4)]
    assert fold(names, ["kind"] * 12) == [("layers.{0..2}.experts.{0..3}.w", list(range(12)))]


def test_a_folded_name_never_claims_a_param_that_is_not_there() -> None:
    names = ["a.0.b.0.w", "a.0.b.1.w", "a.1.b.1.w", "a.2.b.1.w"]
    assert fold(names, ["kind"] * 4) == [("a.0.b.0.w", [0]), ("a.{0..2}.b.1.w", [1, 2, 3])]


def test_names_of_different_kinds_stay_apart_in_order_of_appearance() -> None:
    names = ["h.0.w", "h.1.w", "h.2.w", "h.3.w"]
    assert fold(names, ["wide", "narrow", "wide", "narrow"]) == [("h.{0,2}.w", [0, 2]), ("h.{1,3}.w", [1, 3])]


def test_a_number_inside_a_word_is_part_of_the_name() -> None:
    assert fold(["conv1.w", "conv2.w"], ["kind"] * 2) == [("conv1.w", [0]), ("conv2.w", [1])]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([3, 4], "3,4"), ([0, 1, 2, 9], "0..2,9"), ([4, 12, 20], "4..20..8"), ([0, 8], "0,8")],
)
def test_numbers_are_written_in_few_words(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_equal_words_are_counted() -> None:
    assert counted(["a", "b", "b"]) == "a, 2 of b"

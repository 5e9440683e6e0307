from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from layerwise.comm.contract import Contract, Fingerprint

SAME = Fingerprint(
    label="reduce all_reduce of bucket 0",
    kind="all_reduce",
    reduce="sum",
    root=None,
    dtype="torch.float32",
    numel=12,
    send_splits=None,
    receive_splits=None,
    parts=None,
    problem=None,
)


def complaint(*fingerprints: Fingerprint, sequences: tuple[int, ...] | None = None) -> str | None:
    """What three ranks with these fingerprints would be told. Splits arrive as lists, as JSON brings them."""
    entries: list[dict[str, Any]] = []
    for rank, fingerprint in enumerate(fingerprints):
        entry = {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(fingerprint).items()
        }
        entries.append({**entry, "sequence": sequences[rank] if sequences else 1})
    return Contract._complaint(entries)


def test_equal_ranks_have_nothing_to_complain_about() -> None:
    assert complaint(SAME, SAME, SAME) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("label", "reduce all_reduce of bucket 1"),
        ("kind", "all_gather"),
        ("reduce", "max"),
        ("root", 2),
        ("dtype", "torch.bfloat16"),
        ("numel", 13),
    ],
)
def test_a_field_that_differs_is_named_with_both_values_and_their_ranks(field: str, value: Any) -> None:
    text = complaint(SAME, replace(SAME, **{field: value}), SAME)
    assert text is not None
    assert text.startswith(f"{field} differs: {getattr(SAME, field)!r} on ranks 0, 2; {value!r} on rank 1.")
    assert "same collectives in the same order" in text


def test_a_rank_that_is_one_collective_behind_is_named() -> None:
    text = complaint(SAME, SAME, SAME, sequences=(4, 4, 3))
    assert text is not None
    assert text.startswith("sequence differs: 4 on ranks 0, 1; 3 on rank 2")


def test_what_a_rank_sees_for_itself_comes_first() -> None:
    text = complaint(SAME, replace(SAME, numel=13), replace(SAME, problem="a tensor is not contiguous."))
    assert text == "rank 2: a tensor is not contiguous."


def test_splits_that_do_not_meet_are_named_with_sender_and_receiver() -> None:
    even = replace(SAME, kind="all_to_all", numel=None, send_splits=(4, 4, 4), receive_splits=(4, 4, 4))
    assert complaint(even, even, even) is None
    text = complaint(even, replace(even, receive_splits=(4, 6, 2)), even)
    assert text == "splits differ: rank 1 sends 4 elements to rank 1, which expects 6."

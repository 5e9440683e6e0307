"""The engine computes what it computed when `tests/golden/steps` was written: the same bits, the same bytes on the wire, the same paddings and buckets.

Bits are compared where this platform's were recorded; bytes, paddings and buckets everywhere. `tests.distributed.goldens` says how.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed.golden_cases import BATCHES, CASES
from tests.distributed.goldens import Record, bits_file, differences, read_bits, read_bytes, record

QUICK = (
    "layouts, world 4: compact fewer params than ranks",
    "reducers, world 3: flat ordered",
    "memory, world 2: flat shard_grads",
    "memory, world 4: compact shard_grads ordered",
    "clipping, world 2: padded loss scale",
    "overlap, world 2: compact overlap",
    "heads, world 2: flat heads bf16",
    "experts, world 4: flat experts normuon",
    "experts, world 4: mixed experts experts on 2",
    "stages, world 4: flat 2 stages of 2, a matrix tied",
)
"""One of everything; the rest is slow."""

REST = {label: [name for name in batch if name not in QUICK] for label, batch in BATCHES.items()}


@cache
def recorded_bits() -> tuple[Record, str]:
    return read_bits()


@cache
def recorded_bytes() -> Record:
    return read_bytes()


def compare(names: list[str]) -> None:
    """Run cases of one world and compare them with their records, bytes first: those are known everywhere."""
    bits, nbytes = record({name: CASES[name] for name in names})
    recorded, reason = recorded_bits()
    texts = [text for name in names for text in differences(recorded_bytes()[name], nbytes[name], f"{name}: bytes")]
    if not reason:
        texts += [text for name in names for text in differences(recorded[name], bits[name], name)]
    assert not texts, f"{len(texts)} differences:\n" + "\n".join(texts)
    if reason:
        pytest.skip(f"bytes are as recorded; {reason}.")


@pytest.mark.parametrize("name", QUICK)
def test_a_case_computes_what_was_recorded(name: str) -> None:
    compare([name])


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label, names in REST.items() if names])
def test_all_other_cases_compute_what_was_recorded(label: str) -> None:
    compare(REST[label])


def test_every_case_is_recorded_and_every_record_has_its_case() -> None:
    assert sorted(recorded_bytes()) == sorted(CASES)
    recorded, reason = recorded_bits()
    if reason:
        pytest.skip(f"{reason}.")
    assert sorted(recorded) == sorted(CASES), f"{bits_file().name} is of other cases"


def test_records_are_whole_and_ranks_agree() -> None:
    """No hash was taken of a param that lacks a part, or that ranks have copies of which differ."""
    recorded, reason = recorded_bits()
    if reason:
        pytest.skip(f"{reason}.")
    hashes = {
        (name, fqn, quantity): text
        for name, each in recorded.items()
        for fqn, quantities in each["params"].items()
        for quantity, text in quantities.items()
    }
    assert [where for where, text in hashes.items() if len(text) != 16] == []


def test_a_difference_is_named() -> None:
    before = {"params": {"qkv.weight": {"weight": "aa", "momentum": "bb"}}, "steps": [{"grad_norm": "0x1p+0"}]}
    after = {"params": {"qkv.weight": {"weight": "aa", "momentum": "cc"}}, "steps": [{"grad_norm": "0x1p+1"}]}
    assert differences(before, after, "a case") == [
        "a case, params, qkv.weight, momentum: recorded 'bb', found 'cc'",
        "a case, steps[0], grad_norm: recorded '0x1p+0', found '0x1p+1'",
    ]

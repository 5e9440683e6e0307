"""A manifest says what a checkpoint holds, and nothing is believed of it that is not so."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.checkpoint.manifest import Chunk, Entry, FileFacts, Manifest
from layerwise.errors import CheckpointError
from layerwise.routing.geometry import Box
from tests.strategies import MANY
from tests.unit.checkpoint.tilings import DTYPES, Shape, covers_once, entry_of, randoms, shapes, spoiled, tiling

dtypes = st.sampled_from(DTYPES)


def manifest_of(entries: dict[str, Entry], facts: FileFacts) -> Manifest:
    return Manifest(entries, {"a.distcp": facts}, {"step": 3, "note": "\u00e9"})


@MANY
@given(shapes, dtypes, randoms, st.text(min_size=1, max_size=20))
def test_what_was_written_is_read(shape: Shape, dtype: str, rng: Random, key: str) -> None:
    entry, facts = entry_of(shape, dtype, tiling(shape, rng))
    manifest = manifest_of({key: entry}, facts)
    found = Manifest.from_bytes(manifest.to_bytes(), "here")
    assert replace(found, digest="") == manifest
    assert found.to_bytes() == manifest.to_bytes()
    assert found.step == 3


@MANY
@given(shapes, dtypes, randoms)
def test_chunks_are_accepted_if_every_element_is_in_one_of_them(shape: Shape, dtype: str, rng: Random) -> None:
    boxes = tiling(shape, rng)
    for _ in range(rng.randrange(4)):
        boxes = spoiled(boxes, shape, rng) or boxes
    entry, facts = entry_of(shape, dtype, boxes)
    manifest = manifest_of({"weight": entry}, facts)
    if covers_once(boxes, shape):
        manifest.check("here")
    else:
        with pytest.raises(CheckpointError, match="here is malformed: tensor 'weight' has "):
            manifest.check("here")


@pytest.mark.parametrize("change", ["drop", "twice", "swap", "beyond"])
def test_every_way_to_be_no_tiling_is_refused(change: str) -> None:
    """By example: the search above must come across all of them."""
    rows = [Box((row, 0), (row + 1, 4)) for row in range(3)]
    boxes, words = {
        "drop": (rows[:2], "more or fewer elements"),
        "twice": ([*rows, rows[0]], "more or fewer elements"),
        "swap": ([rows[0], rows[1], rows[1]], "overlap"),
        "beyond": ([*rows[:2], Box((2, 1), (3, 5))], "reaches beyond it"),
    }[change]
    entry, facts = entry_of((3, 4), "float32", boxes)
    with pytest.raises(CheckpointError, match=words):
        manifest_of({"weight": entry}, facts).check("here")


PLACES: dict[str, tuple[Chunk, str]] = {
    "in a file that there is not": (Chunk(Box((0,), (4,)), "b.distcp", 0, 26, 10), "of which nothing is known"),
    "past the end of the file": (Chunk(Box((0,), (4,)), "a.distcp", 10, 26, 20), "beyond the end"),
    "past the end of its item": (Chunk(Box((0,), (4,)), "a.distcp", 0, 16, 10), "beyond the end"),
    "before its item": (Chunk(Box((0,), (4,)), "a.distcp", 5, 20, 4), "beyond the end"),
    "in another number of dims": (Chunk(Box((0, 0), (2, 2)), "a.distcp", 0, 26, 10), "another number of dims"),
}


@pytest.mark.parametrize("place", PLACES)
def test_chunks_lie_within_files_that_there_are(place: str) -> None:
    chunk, words = PLACES[place]
    entry = Entry((4,), "float32", (chunk,))
    with pytest.raises(CheckpointError, match=words):
        manifest_of({"weight": entry}, FileFacts(26, "0" * 8)).check("here")


@pytest.mark.parametrize("name", ["../a.distcp", "/a.distcp", "a/b", "", ".hidden", "a\x00b", "a" * 300, "a\n"])
def test_files_have_plain_names(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"it names the file .*: expected a plain name"):
        Manifest({}, {name: FileFacts(0, "")}, {"step": 0}).check("here")


paths = st.lists(
    st.one_of(st.integers(0, 5), st.sampled_from(["body", "entries", "files", "about", "weight"])), max_size=7
)
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=3), st.just([]), st.just({})
)


@MANY
@given(randoms, junk)
def test_a_manifest_with_anything_else_in_it_is_read_or_refused_in_words(rng: Random, value: Any) -> None:
    """Any place of it can hold anything: it is either no problem, or one error and no other."""
    entry, facts = entry_of((3, 4), "float32", tiling((3, 4), rng))
    manifest = manifest_of({"weight": entry}, facts)
    body = json.loads(json.dumps(manifest.to_body()))
    at = body
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.2:
            at[key] = value
            break
        at = at[key]
    try:
        Manifest.from_body(body, "here").check("here")
    except CheckpointError as error:
        assert str(error).startswith("here is malformed: ")  # noqa: PT017


def test_a_changed_byte_is_seen() -> None:
    entry, facts = entry_of((3,), "float32", [Box((0,), (3,))])
    text = manifest_of({"weight": entry}, facts).to_bytes()
    accepted = []
    for place in range(len(text)):
        other = bytes([*text[:place], text[place] ^ 1, *text[place + 1 :]])
        try:
            Manifest.from_bytes(other, "here")
            accepted.append(place)
        except CheckpointError:
            pass
    assert accepted == []

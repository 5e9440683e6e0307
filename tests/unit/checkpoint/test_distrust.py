"""A manifest is believed in nothing: any byte of it that is not as it was written is noticed, and so is what nobody of ours writes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import layerwise
from layerwise.checkpoint.manifest import Chunk, Entry, FileFacts, Manifest
from layerwise.checkpoint.plain import from_plain, to_plain
from layerwise.errors import CheckpointError
from layerwise.routing.geometry import Box, interval_boxes

FILE = "__0_0.distcp"


def manifest(boxes: list[Box], shape: tuple[int, ...]) -> Manifest:
    """One tensor of bytes, its chunks one behind the other."""
    chunks, at = [], 0
    for box in boxes:
        chunks.append(Chunk(box, FILE, at, box.numel, at))
        at += box.numel
    entries = {"model.a": Entry(shape, "uint8", tuple(chunks))}
    return Manifest(entries, {FILE: FileFacts(at, "0" * 8)}, {"step": 1, "eps": 1e-08, "name": "ü"})


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    text = manifest([Box((0, 0), (2, 3))], (2, 3)).to_bytes()
    assert Manifest.from_bytes(text, "it").to_bytes() == text
    for place in range(len(text)):
        for bit in range(8):
            bad = bytearray(text)
            bad[place] ^= 1 << bit
            with pytest.raises(CheckpointError, match="it "):
                Manifest.from_bytes(bytes(bad), "it")


def grids() -> Iterator[tuple[str, tuple[int, ...], list[Box]]]:
    """Cuts that shards make."""
    cuts = (0, 5, 6, 31, 60)
    for shape in ((60,), (12, 5), (5, 4, 3)):
        pieces = [box for start, stop in itertools.pairwise(cuts) for box in interval_boxes(shape, start, stop)]
        yield f"flat {shape}", shape, pieces
    rows, columns = ((0, 3), (3, 6), (6, 8)), ((0, 1), (1, 5))
    grid = [Box((a, c), (b, d)) for a, b in rows for c, d in columns]
    yield "grid", (8, 5), grid
    # Columns that are cut at different rows.
    yield "crossing", (8, 2), [Box((0, 0), (3, 1)), Box((3, 0), (8, 1)), Box((0, 1), (5, 2)), Box((5, 1), (8, 2))]


@pytest.mark.parametrize(("shape", "boxes"), [pytest.param(shape, boxes, id=name) for name, shape, boxes in grids()])
def test_a_tensor_has_each_element_once(shape: tuple[int, ...], boxes: list[Box]) -> None:
    random.Random(1).shuffle(boxes)
    manifest(boxes, shape).check("it")
    for place, box in enumerate(boxes):
        for dim, size in enumerate(shape):
            for moved in (box.starts[dim] - 1, box.starts[dim] + 1):
                if 0 <= moved <= size - box.shape[dim]:
                    starts = (*box.starts[:dim], moved, *box.starts[dim + 1 :])
                    other = Box(starts, tuple(start + length for start, length in zip(starts, box.shape, strict=True)))
                    # As many elements, and some of them twice.
                    with pytest.raises(CheckpointError, match="overlap"):
                        manifest([*boxes[:place], other, *boxes[place + 1 :]], shape).check("it")


def test_items_that_overlap_and_files_that_are_too_large_are_refused() -> None:
    good = manifest([Box((0,), (4,)), Box((4,), (8,))], (8,))
    entry = good.entries["model.a"]
    same = (entry.chunks[0], entry.chunks[1]._replace(offset=0, data=0))
    with pytest.raises(CheckpointError, match="items that overlap"):
        replace(good, entries={"model.a": replace(entry, chunks=same)}).check("it")
    with pytest.raises(CheckpointError, match="has 1073741824 bytes: its tensors have no more"):
        replace(good, files={FILE: FileFacts(1 << 30, "0" * 8 * 64)}).check("it")


def test_plain_values_are_as_deep_as_they_may_be_and_no_deeper() -> None:
    value: object = {"a": (1, b"x", torch.bfloat16)}
    for _ in range(60):
        value = (value,)
    plain = to_plain(value, "extra", {})
    assert from_plain(json.loads(json.dumps(plain)), lambda _: torch.zeros(())) == value
    for _ in range(10):
        plain = [plain]
    with pytest.raises(ValueError, match="nested more than"):
        from_plain(plain, lambda _: torch.zeros(()))


def test_a_name_of_torch_that_is_no_dtype_is_none() -> None:
    for name in ("_inductor", "load", ["float32"], "Tensor"):
        with pytest.raises((TypeError, ValueError)):
            from_plain({"$": "dtype", "name": name}, lambda _: torch.zeros(()))


def test_extra_values_that_could_not_be_read_again_are_not_written(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    with pytest.raises(CheckpointError, match="Put it into tensors"):
        layerwise.save(tmp_path / "a", model, optimizer, extra={"order": list(range(200_000))})
    assert not (tmp_path / "a").exists()
    layerwise.save(tmp_path / "b", model, optimizer, extra={"order": torch.arange(200_000)})
    assert layerwise.load(tmp_path / "b", model, optimizer).extra["order"][-1] == 199_999


def test_a_buffer_that_became_a_param_has_no_state_to_go_on_from(tmp_path: Path) -> None:
    def built(*, trained: bool) -> tuple[nn.Module, layerwise.Optimizer]:
        model = nn.Linear(3, 2)
        if trained:
            model.gain = nn.Parameter(torch.ones(4))
        else:
            model.register_buffer("gain", torch.full((4,), 2.0))
        return model, layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))

    layerwise.save(tmp_path / "a", *built(trained=False))
    model, optimizer = built(trained=True)
    with pytest.raises(CheckpointError, match="'gain' has no optimizer state in the checkpoint: it was not trained"):
        layerwise.load(tmp_path / "a", model, optimizer)
    layerwise.load(tmp_path / "a", model, optimizer, reset=["gain"])
    assert torch.equal(model.get_parameter("gain"), torch.full((4,), 2.0))

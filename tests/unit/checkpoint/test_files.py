"""Data files: any box of a tensor is read right, however the tensor was cut, and torch reads the same."""

from __future__ import annotations

import io
import os
import tempfile
import zlib
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.checkpoint import saving
from layerwise.checkpoint.disk import damage_of
from layerwise.checkpoint.files import DataFile, Reader
from layerwise.checkpoint.manifest import ITEMSIZES, Chunk, Entry, Manifest
from layerwise.errors import CheckpointError
from layerwise.routing.geometry import Box
from tests.strategies import LIGHT, MANY
from tests.unit.checkpoint.tilings import (
    DTYPES,
    Shape,
    bits,
    covers_once,
    randoms,
    shapes,
    sub_box,
    tiling,
    values,
    whole_box,
)

dtypes = st.sampled_from(DTYPES)


def write(folder: Path, tensors: dict[str, torch.Tensor], rng: Random) -> Manifest:
    """Tensors cut anyhow, in two files."""
    files = {name: DataFile(folder / name) for name in ("a.distcp", "b.distcp")}
    entries = {}
    for key, tensor in tensors.items():
        chunks = []
        for box in tiling(tuple(tensor.shape), rng):
            name = rng.choice(sorted(files))
            part = tensor[tuple(map(slice, box.starts, box.stops))].contiguous()
            # Of its own: what is saved of a view is all that it is a view of.
            chunks.append(Chunk(box, name, *files[name].add(part.clone())))
        entries[key] = Entry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(chunks))
    return Manifest(entries, {name: file.close() for name, file in files.items()}, {"step": 0})


@LIGHT
@given(shapes, dtypes, randoms)
def test_any_box_of_any_chunking_is_read(shape: Shape, dtype: str, rng: Random) -> None:
    tensors = {"one": values(shape, dtype, rng), "two": values((3, 5), "float32", rng)}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        manifest = write(folder, tensors, rng)
        manifest.check("here")
        with Reader(folder, manifest) as reader:
            for key, tensor in tensors.items():
                boxes = [whole_box(tuple(tensor.shape)), *(sub_box(tuple(tensor.shape), rng) for _ in range(5))]
                for box in boxes:
                    into = torch.empty(box.shape, dtype=tensor.dtype)
                    reader.read(key, box, into)
                    assert bits(into) == bits(tensor[tuple(map(slice, box.starts, box.stops))])
        for entry in manifest.entries.values():
            for chunk in entry.chunks:
                item = (folder / chunk.file).read_bytes()[chunk.offset : chunk.offset + chunk.length]
                alone = torch.load(io.BytesIO(item), weights_only=True)
                assert tuple(alone.shape) == chunk.box.shape
                nbytes = chunk.box.numel * ITEMSIZES[entry.dtype]
                assert item[chunk.data - chunk.offset :][:nbytes] == bits(alone)
        for name, facts in manifest.files.items():
            written = (folder / name).read_bytes()
            assert facts == (len(written), f"{zlib.crc32(written):08x}" if written else "")
            assert damage_of(folder, name, facts) is None


@LIGHT
@given(randoms)
def test_a_box_is_read_into_memory_of_any_strides_and_another_dtype(rng: Random) -> None:
    tensor = torch.tensor([rng.gauss(0, 1) for _ in range(35)]).reshape(5, 7)
    with tempfile.TemporaryDirectory() as path:
        manifest = write(Path(path), {"one": tensor}, rng)
        with Reader(Path(path), manifest) as reader:
            box = sub_box((5, 7), rng)
            rows, cols = box.shape
            into = torch.empty(cols, 2 * rows).T[::2]
            reader.read("one", box, into)
            expected = tensor[tuple(map(slice, box.starts, box.stops))]
            assert torch.equal(into, expected)
            rounded = torch.empty(box.shape, dtype=torch.bfloat16)
            reader.read("one", box, rounded)
            assert torch.equal(rounded, expected.bfloat16())


@MANY
@given(shapes, st.integers(2, 64), randoms)
def test_large_boxes_are_written_in_parts_that_make_them_up(shape: Shape, most: int, rng: Random) -> None:
    tensor = values(shape, "int16", rng)
    origin = tuple(rng.randrange(4) for _ in shape)
    box = whole_box(shape).shifted_from(tuple(-start for start in origin))
    with mock.patch.object(saving, "_MOST_NBYTES", most):
        pieces = list(saving._pieces(box, tensor))
    for part, piece in pieces:
        assert piece.nbytes <= most
        inside = part.shifted_from(origin)
        assert bits(piece) == bits(tensor[tuple(map(slice, inside.starts, inside.stops))])
    assert covers_once([part.shifted_from(origin) for part, _ in pieces], shape)


def test_damage_is_told_by_its_kind(tmp_path: Path) -> None:
    manifest = write(tmp_path, {"one": torch.arange(12.0)}, Random(0))
    path, facts = tmp_path / "a.distcp", manifest.files["a.distcp"]
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 4, *whole[place + 1 :]]))
        assert (
            damage_of(tmp_path, "a.distcp", facts)
            == f"a.distcp has other bytes than were written, from 0 to {facts.nbytes}"
        )
    path.write_bytes(whole[:-1])
    assert damage_of(tmp_path, "a.distcp", facts) == f"a.distcp has {len(whole) - 1} bytes, expected {len(whole)}"
    path.unlink()
    assert "cannot be read: No such file" in str(damage_of(tmp_path, "a.distcp", facts))
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in str(damage_of(tmp_path, "a.distcp", facts))
    path.unlink()
    os.mkfifo(path)
    assert "is no ordinary file" in str(damage_of(tmp_path, "a.distcp", facts))


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    manifest = write(tmp_path, {"one": torch.arange(12.0)}, Random(1))
    for name in manifest.files:
        os.truncate(tmp_path / name, 16)
    with Reader(tmp_path, manifest) as reader, pytest.raises(CheckpointError, match="ends before its time"):
        reader.read("one", Box((0,), (12,)), torch.empty(12))

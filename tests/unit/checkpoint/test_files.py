"""Data files: any box of a tensor is read right, however the tensor was cut, and torch reads the same."""

from __future__ import annotations

import ctypes
import io
import os
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import layerwise.checkpoint.files
from layerwise.checkpoint import disk, saving
from layerwise.checkpoint.disk import Piece, damages_of, pieces_of
from layerwise.checkpoint.files import DataFile, Reader, Wanted
from layerwise.checkpoint.manifest import ITEMSIZES, Chunk, Entry, Manifest
from layerwise.errors import CheckpointError
from layerwise.routing.geometry import Box
from tests.ranks import run_ranks
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
        assert not damages_of(folder, manifest.files, pieces_of(manifest.files))


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
    name = "a.distcp"
    manifest = write(tmp_path, {"one": torch.arange(12.0)}, Random(0))
    path, facts = tmp_path / name, manifest.files[name]
    whole = path.read_bytes()

    def damage() -> str:
        return "; ".join(damages_of(tmp_path, {name: facts}, pieces_of({name: facts})))

    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(bytes([*whole[:place], whole[place] ^ 4, *whole[place + 1 :]]))
        assert damage() == f"a.distcp has other bytes than were written, from 0 to {facts.nbytes}"
    path.write_bytes(whole[:-1])
    assert damage() == f"a.distcp has {len(whole) - 1} bytes, expected {len(whole)}"
    path.unlink()
    assert "cannot be read: No such file" in damage()
    (tmp_path / "elsewhere").write_bytes(whole)
    path.symlink_to(tmp_path / "elsewhere")
    assert "cannot be read" in damage()
    path.unlink()
    os.mkfifo(path)
    assert "is no ordinary file" in damage()


def test_every_byte_is_in_one_piece_and_damage_is_found_in_any(tmp_path: Path) -> None:
    with mock.patch.object(disk, "PIECE", 1 << 12), mock.patch.object(disk, "_AT_A_TIME", 1000):
        files = {}
        for name, numel in (("__2_0.distcp", 10_000), ("__10_0.distcp", 3 << 12), ("__1_0.distcp", 0)):
            data = bytes(Random(numel).randrange(256) for _ in range(numel))
            (tmp_path / name).write_bytes(data)
            files[name] = disk.facts_of(data)
        pieces = pieces_of(files)
        assert pieces == [
            Piece("__1_0.distcp", 0),
            *(Piece("__2_0.distcp", start) for start in (0, 4096, 8192)),
            *(Piece("__10_0.distcp", start) for start in (0, 4096, 8192)),
        ]
        assert not damages_of(tmp_path, files, pieces)
        for piece in pieces[1:]:
            path = tmp_path / piece.file
            whole = path.read_bytes()
            place = Random(piece.start).randrange(piece.start, min(piece.start + 4096, len(whole)))
            path.write_bytes(bytes([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]))
            (text,) = damages_of(tmp_path, files, pieces)
            assert f"{piece.file} has other bytes than were written, from {piece.start} to" in text
            assert not damages_of(tmp_path, files, [other for other in pieces if other != piece])
            path.write_bytes(whole)
        (tmp_path / "__1_0.distcp").write_bytes(b"1")
        assert damages_of(tmp_path, files, pieces) == ["__1_0.distcp has 1 bytes, expected 0"]


def test_tensors_in_more_files_than_may_be_open_are_read(tmp_path: Path) -> None:
    files, entries, tensors = {}, {}, {}
    for number in range(7):
        file = DataFile(tmp_path / f"__{number}_0.distcp")
        tensors[f"{number}"] = tensor = torch.randn(3, number + 1)
        chunk = Chunk(whole_box((3, number + 1)), f"__{number}_0.distcp", *file.add(tensor))
        entries[f"{number}"] = Entry((3, number + 1), "float32", (chunk,))
        files[chunk.file] = file.close()
    with mock.patch.object(layerwise.checkpoint.files, "_MOST_OPEN", 2):
        before = len(os.listdir("/proc/self/fd"))
        with Reader(tmp_path, Manifest(entries, files, {"step": 0})) as reader:
            into = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
            reader.read_all(Wanted(key, whole_box(tuple(tensor.shape)), tensor) for key, tensor in into.items())
            assert len(os.listdir("/proc/self/fd")) <= before + 2
        assert len(os.listdir("/proc/self/fd")) == before
    assert all(torch.equal(into[key], tensor) for key, tensor in tensors.items())


M_MMAP_THRESHOLD = -3
"""What glibc's malloc.h calls it."""


def most_held(act: Callable[[], object]) -> int:
    """The most memory that this process has had in the meantime, beyond what it had."""

    def most() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = most()
    act()
    return most() - before


def read_with_little_memory(rank: int, world: int, path: str) -> None:
    ctypes.CDLL(None).mallopt(
        M_MMAP_THRESHOLD, 1 << 20
    )  # what is let go of goes back at once, and is not kept for later
    folder = Path(path)
    parts, numel = 40, 1 << 20
    file = DataFile(folder / "__0_0.distcp")
    tensor = torch.arange(numel, dtype=torch.float32)
    chunks = []
    for number in range(parts):
        chunks.append(Chunk(Box((number, 0), (number + 1, numel)), "__0_0.distcp", *file.add(tensor[None] + number)))
    manifest = Manifest({"one": Entry((parts, numel), "float32", tuple(chunks))}, {"__0_0.distcp": file.close()})
    box = whole_box((parts, numel))
    alike, other = torch.ones(parts, numel), torch.ones(parts, numel, dtype=torch.bfloat16)
    with Reader(folder, manifest) as reader:
        reader.read("one", box, alike)  # threads have memory of their own
        alike.zero_()
        assert most_held(lambda: reader.read("one", box, alike)) < 4 << 20
        assert (
            most_held(lambda: reader.read("one", box, other)) < (layerwise.checkpoint.files._AHEAD + 4) * tensor.nbytes
        )
    assert all(torch.equal(alike[number], tensor + number) for number in range(parts))
    assert all(torch.equal(other[number], (tensor + number).bfloat16()) for number in range(parts))
    checked = most_held(lambda: damages_of(folder, manifest.files, pieces_of(manifest.files)))
    assert checked < 8 << 20


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, which counts memory")
def test_what_is_copied_on_the_way_takes_bounded_memory(tmp_path: Path) -> None:
    """Bytes that go to where they are wanted take none; those of another dtype pass through a few parts' worth. In a process
    of its own: all memory of a process is counted."""
    run_ranks(1, read_with_little_memory, str(tmp_path))


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    manifest = write(tmp_path, {"one": torch.arange(12.0)}, Random(1))
    for name in manifest.files:
        os.truncate(tmp_path / name, 16)
    with Reader(tmp_path, manifest) as reader, pytest.raises(CheckpointError, match="ends before its time"):
        reader.read("one", Box((0,), (12,)), torch.empty(12))

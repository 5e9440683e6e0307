"""Tensors in the files of a checkpoint.

Every tensor is an item as torch's own distributed checkpoints have them, and its elements lie in it row by row, at a place
that the manifest names. So torch reads the file with its own reader, and we read it without one: nothing is unpickled.
"""

from __future__ import annotations

import ctypes
import io
import os
import queue
import threading
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.checkpoint.disk import Sums, opened, read_into
from layerwise.checkpoint.manifest import Chunk, Entry, FileFacts, Manifest
from layerwise.errors import CheckpointError
from layerwise.routing.geometry import Box, flat_index, row_major_strides

_ALIGNMENT = 64
_BEHIND = 4
"""Pieces that hashing may be behind writing."""
_HEADER = 30
"""Bytes of a zip record's header before its name."""


class Item(NamedTuple):
    """Where a tensor went."""

    offset: int
    length: int
    data: int


class DataFile:
    """A data file that is being written, summed up on the way by a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._sums = Sums()
        self._pieces: queue.Queue[bytes | memoryview | None] = queue.Queue(_BEHIND)
        self._summing = threading.Thread(target=self._sum_pieces, daemon=True)
        self._summing.start()
        self._frames: dict[tuple[torch.Size, torch.dtype], _Frame] = {}
        self.nbytes = 0

    def _sum_pieces(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._sums.add(piece)

    def add(self, tensor: Tensor) -> Item:
        """Write a tensor, whose memory nobody changes before the file is closed."""
        own = tensor.detach().cpu().contiguous()
        key = own.shape, own.dtype
        if key not in self._frames:
            self._frames[key] = _Frame.of(own)
        frame = self._frames[key]
        self._write(bytes(-self.nbytes % _ALIGNMENT))
        offset = self.nbytes
        self._write(frame.head)
        data = self.nbytes
        self._write(bytes_of(own))
        self._write(frame.tail)
        return Item(offset, self.nbytes - offset, data)

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self.nbytes += len(data)
        self._pieces.put(data)

    def close(self) -> FileFacts:
        """Everything is on disk when this returns."""
        self._pieces.put(None)
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._summing.join()
        return FileFacts(self.nbytes, self._sums.digits())

    def drop(self) -> None:
        """Let go of a file that nobody needs any more."""
        self._pieces.put(None)
        os.close(self._descriptor)


class _Frame(NamedTuple):
    """What torch.save() writes before and after the elements of a tensor. It is the same for all tensors of a shape: a zip file
    whose records are not compressed, with a sum of the elements that torch.load() does not look at."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> _Frame:
        written = io.BytesIO()
        torch.save(torch.zeros_like(tensor), written)
        with zipfile.ZipFile(written) as archive:
            record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        text = written.getbuffer()
        header = text[record.header_offset : record.header_offset + _HEADER]
        name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        start = record.header_offset + _HEADER + name + extra
        return cls(bytes(text[:start]), bytes(text[start + tensor.nbytes :]))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor on the host, without numpy; holds the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class Reader:
    """Reads boxes of tensors out of the data files of a checkpoint that was checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._open: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, key: str, box: Box, into: Tensor) -> None:
        """Fill a tensor of the box's shape with a box of a tensor, in the dtype that it has."""
        entry = self._manifest.entries[key]
        found = 0
        for chunk in entry.chunks:
            common = chunk.box.intersect(box) if entry.shape else chunk.box
            if common is not None and common.numel:
                target = into
                for dim, (start, size) in enumerate(
                    zip(common.shifted_from(box.starts).starts, common.shape, strict=True)
                ):
                    target = target.narrow(dim, start, size)
                self._read_part(entry, chunk, common, target)
                found += common.numel
        if found != box.numel:
            raise CheckpointError(
                f"tensor {key!r} has {found} of {box.numel} elements of a box: the manifest is wrong."
            )

    def whole(self, key: str) -> Tensor:
        """All of a tensor."""
        entry = self._manifest.entries[key]
        found = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self.read(key, Box((0,) * len(entry.shape), entry.shape), found)
        return found

    def _read_part(self, entry: Entry, chunk: Chunk, part: Box, target: Tensor) -> None:
        """A part of a chunk, from the first of its rows to the last, as they lie in the file; straight to where they go if they lie
        there alike."""
        dtype, shape = getattr(torch, entry.dtype), chunk.box.shape
        inside = part.shifted_from(chunk.box.starts)
        first = flat_index(inside.starts, shape)
        numel = flat_index(tuple(stop - 1 for stop in inside.stops), shape) - first + 1
        place = chunk.data + first * dtype.itemsize
        if numel == part.numel and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu":
            self._fill(chunk.file, place, bytes_of(target))
            return
        raw = torch.empty(numel, dtype=dtype)
        self._fill(chunk.file, place, bytes_of(raw))
        target.copy_(raw.as_strided(inside.shape, row_major_strides(shape)))

    def _fill(self, name: str, offset: int, target: memoryview) -> None:
        if name not in self._open:
            with opened(self._folder / name) as descriptor:
                self._open[name] = os.dup(descriptor)
        if read_into(self._open[name], offset, target) < len(target):
            raise CheckpointError(f"{self._folder / name} ends before its time: it was changed while it was read.")

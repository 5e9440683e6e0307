"""Tensors in the files of a checkpoint.

Every tensor is an item as torch's own distributed checkpoints have them, and its elements lie in it row by row, at a place
that the manifest names. So torch reads the file with its own reader, and we read it without one: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import io
import os
import queue
import threading
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.checkpoint.disk import opened
from layerwise.checkpoint.manifest import ITEMSIZES, Chunk, Entry, FileFacts, Manifest
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
    """A data file that is being written, hashed on the way by a thread of its own."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._hash = hashlib.sha256()
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_BEHIND)
        self._hashing = threading.Thread(target=self._hash_pieces, daemon=True)
        self._hashing.start()
        self.nbytes = 0

    def _hash_pieces(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._hash.update(piece)

    def write(self, data: bytes) -> int:
        """What torch.save() calls."""
        data = bytes(data)
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]
        self.nbytes += len(data)
        self._pieces.put(data)
        return len(data)

    def flush(self) -> None:
        """What torch.save() calls, too; files are brought to disk when they are closed."""

    def add(self, tensor: Tensor) -> Item:
        """Write a dense tensor in host memory."""
        self.write(bytes(-self.nbytes % _ALIGNMENT))
        offset = self.nbytes
        torch.save(tensor, self)  # type: ignore[arg-type]
        length = self.nbytes - offset
        return Item(offset, length, offset + self._elements_at(offset, length))

    def _elements_at(self, offset: int, length: int) -> int:
        """Where in the item that was written last the elements begin. It is a zip file, whose records are not compressed."""
        section = _Section(self._descriptor, offset, length)
        with zipfile.ZipFile(section) as archive:
            record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
        section.seek(record.header_offset)
        header = section.read(_HEADER)
        name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        return record.header_offset + _HEADER + name + extra

    def close(self) -> FileFacts:
        """Everything is on disk when this returns."""
        self._pieces.put(None)
        self._hashing.join()
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        return FileFacts(self.nbytes, self._hash.hexdigest())

    def drop(self) -> None:
        """Let go of a file that nobody needs any more."""
        self._pieces.put(None)
        os.close(self._descriptor)


class _Section(io.RawIOBase):
    """A part of an open file as a file, for whoever reads zip files."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._at = descriptor, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        found = os.pread(self._descriptor, left if size < 0 else min(size, left), self._offset + self._at)
        self._at += len(found)
        return found


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
                target.copy_(self._part(entry, chunk, common))
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

    def _part(self, entry: Entry, chunk: Chunk, part: Box) -> Tensor:
        """A part of a chunk, from the first of its rows to the last, as they lie in the file."""
        itemsize, shape = ITEMSIZES[entry.dtype], chunk.box.shape
        inside = part.shifted_from(chunk.box.starts)
        first = flat_index(inside.starts, shape)
        last = flat_index(tuple(stop - 1 for stop in inside.stops), shape)
        numel = last - first + 1
        raw = self._bytes(chunk.file, chunk.data + first * itemsize, numel * itemsize)
        flat = torch.frombuffer(raw, dtype=getattr(torch, entry.dtype))
        return flat.as_strided(inside.shape, row_major_strides(shape))

    def _bytes(self, name: str, offset: int, nbytes: int) -> bytearray:
        if name not in self._open:
            with opened(self._folder / name) as descriptor:
                self._open[name] = os.dup(descriptor)
        raw = bytearray(nbytes)
        view, done = memoryview(raw), 0
        while done < nbytes:
            count = os.preadv(self._open[name], [view[done:]], offset + done)
            if not count:
                raise CheckpointError(f"{self._folder / name} ends before its time: it was changed while it was read.")
            done += count
        return raw

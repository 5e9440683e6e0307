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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.checkpoint.disk import BINARY, THREADS, Sums, begin_writing, opened, read_into
from layerwise.checkpoint.manifest import Chunk, Entry, FileFacts, Manifest
from layerwise.errors import CheckpointError
from layerwise.routing.geometry import Box, flat_index, row_major_strides

_ALIGNMENT = 64
_BEHIND = 4
"""Items that summing up may be behind writing; what was copied from a device stays in memory so long."""
_EAGERLY = 8 << 20
"""Bytes after which the system is told to begin bringing them to disk."""
_AHEAD = 2 * THREADS
"""Parts that may be read before their turn has come to be copied to where they go."""
_MOST_OPEN = 128
"""Files that are open at once: a checkpoint may have thousands."""


class Item(NamedTuple):
    """Where a tensor went."""

    offset: int
    length: int
    data: int


class DataFile:
    """A data file that is being written, from where tensors lie. A thread of its own sums it up on the way, and has the system
    bring it to disk meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o644)
        self._sums = Sums()
        self._items: queue.Queue[list[bytes | memoryview] | None] = queue.Queue(_BEHIND)
        self._summing = threading.Thread(target=self._follow, daemon=True)
        self._summing.start()
        self._frames: dict[tuple[torch.Size, torch.dtype], _Frame] = {}
        self.nbytes = 0

    def _follow(self) -> None:
        begun = done = 0
        while (item := self._items.get()) is not None:
            done += sum(map(len, item))
            if done - begun >= _EAGERLY:
                begin_writing(self._descriptor, begun, done - begun)
                begun = done
            for data in item:
                self._sums.add(data)

    def add(self, tensor: Tensor) -> Item:
        """Write a tensor, whose memory nobody changes before the file is closed."""
        own = tensor.detach().cpu().contiguous()
        key = own.shape, own.dtype
        if key not in self._frames:
            self._frames[key] = _Frame.of(own)
        frame = self._frames[key]
        padding = bytes(-self.nbytes % _ALIGNMENT)
        offset = self.nbytes + len(padding)
        self._write([padding, frame.head, bytes_of(own), frame.tail])
        return Item(offset, self.nbytes - offset, offset + len(frame.head))

    def _write(self, item: list[bytes | memoryview]) -> None:
        left = [memoryview(data) for data in item]
        while left:
            try:
                count = _write(self._descriptor, left)
            except OSError as error:  # which does not say of which file
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            self.nbytes += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left:
                left[0] = left[0][count:]
        self._items.put(item)

    def close(self) -> FileFacts:
        """Everything is on disk when this returns."""
        self._items.put(None)
        os.fsync(self._descriptor)
        self._summing.join()
        os.close(self._descriptor)
        return FileFacts(self.nbytes, self._sums.digits())

    def drop(self) -> None:
        """Let go of a file that nobody needs any more."""
        self._items.put(None)
        self._summing.join()
        os.close(self._descriptor)


_write: Callable[[int, list[memoryview]], int] = getattr(
    os, "writev", lambda descriptor, left: os.write(descriptor, left[0])
)
"""Some of several stretches of memory, and how many bytes; where the system has no such call, of the first."""


class _Frame(NamedTuple):
    """What torch.save() writes before and after the elements of a tensor. It is the same for all tensors of a shape: a zip file
    whose records are not compressed, with a sum of the elements that torch.load() does not look at."""

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> _Frame:
        written = _WithoutElements()
        with torch.serialization.skip_data():
            torch.save(torch.empty_like(tensor), written)
        text = written.getvalue()
        if (written.place is None) != (tensor.nbytes == 0):
            raise CheckpointError(f"torch {torch.__version__} does not skip elements: expected a version that does.")
        return cls(text[: written.place], text[len(text) if written.place is None else written.place :])


class _WithoutElements(io.BytesIO):
    """What torch.save() writes where it is told to skip over elements, and the place of those, if there are any."""

    place: int | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self.place = self.tell()
        return self.place + offset


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor on the host, without numpy; holds the tensor."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


class Wanted(NamedTuple):
    """A box of a tensor in a checkpoint, and where it goes."""

    key: str
    box: Box
    into: Tensor
    """Of the box's shape, in any dtype, on any device."""


class _Part(NamedTuple):
    """A part of a chunk, and where it goes."""

    entry: Entry
    chunk: Chunk
    box: Box
    target: Tensor


class _Flight(NamedTuple):
    """Bytes that are being read."""

    arrival: Future[None]
    elements: Tensor | None
    """Where they are to be copied from; None where they are read straight to where they go."""
    target: Tensor


class Reader:
    """Reads boxes of tensors out of the data files of a checkpoint that was checked."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._open: dict[str, int] = {}
        self._threads = ThreadPoolExecutor(THREADS)
        self._flights: deque[_Flight] = deque()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._close_all()

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, key: str, box: Box, into: Tensor) -> None:
        """Fill a tensor of the box's shape with a box of a tensor, in the dtype that it has."""
        self.read_all([Wanted(key, box, into)])

    def read_all(self, wanted: Iterable[Wanted]) -> None:
        """Fill tensors with boxes of tensors, several at once. Threads fill memory of the host, and nothing else: what goes to
        another device, another dtype or other strides is copied there by the caller's, in order."""
        for one in wanted:
            for part in self._parts(one):
                if len(self._flights) == _AHEAD:
                    self._land()
                self._flights.append(self._launch(part))
        self._land_all()

    def _parts(self, wanted: Wanted) -> Iterator[_Part]:
        key, box, into = wanted
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
                yield _Part(entry, chunk, common, target)
                found += common.numel
        if found != box.numel:
            raise CheckpointError(
                f"tensor {key!r} has {found} of {box.numel} elements of a box: the manifest is wrong."
            )

    def whole(self, key: str) -> Tensor:
        """All of a tensor."""
        entry = self._manifest.entries[key]
        found = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="cpu")
        self.read(key, Box.whole(entry.shape), found)
        return found

    def _launch(self, part: _Part) -> _Flight:
        """Begin to read a part of a chunk, from the first of its rows to the last, as they lie in the file; straight to where
        they go if they lie there alike."""
        entry, chunk, box, target = part
        dtype, shape = getattr(torch, entry.dtype), chunk.box.shape
        inside = box.shifted_from(chunk.box.starts)
        first = flat_index(inside.starts, shape)
        numel = flat_index(tuple(stop - 1 for stop in inside.stops), shape) - first + 1
        place = chunk.data + first * dtype.itemsize
        if numel == box.numel and target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu":
            return _Flight(self._begin(chunk.file, place, bytes_of(target)), None, target)
        raw = torch.empty(numel, dtype=dtype, device="cpu")
        elements = raw.as_strided(inside.shape, row_major_strides(shape))
        return _Flight(self._begin(chunk.file, place, bytes_of(raw)), elements, target)

    def _begin(self, name: str, offset: int, target: memoryview) -> Future[None]:
        if name not in self._open:
            if len(self._open) == _MOST_OPEN:
                self._land_all()
                self._close_all()
            with opened(self._folder / name) as descriptor:
                self._open[name] = os.dup(descriptor)
        return self._threads.submit(self._fill, self._open[name], name, offset, target)

    def _fill(self, descriptor: int, name: str, offset: int, target: memoryview) -> None:
        if read_into(descriptor, offset, target) < len(target):
            raise CheckpointError(f"{self._folder / name} ends before its time: it was changed while it was read.")

    def _land(self) -> None:
        """Have what was begun first where it goes."""
        flight = self._flights.popleft()
        flight.arrival.result()
        if flight.elements is not None:
            flight.target.copy_(flight.elements)

    def _land_all(self) -> None:
        while self._flights:
            self._land()

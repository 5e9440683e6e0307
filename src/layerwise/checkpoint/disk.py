"""A checkpoint on disk, without torch: files that are whole or not there, and that are read without believing what is in them."""

from __future__ import annotations

import errno
import os
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from layerwise.checkpoint.manifest import FILE_NAME, PIECE, FileFacts, Manifest, most_nbytes
from layerwise.errors import CheckpointError

_THREADS = 4
"""That read and sum up pieces of a file at once; both let go of the interpreter."""


class Sums:
    """The sums of a file's pieces, as its bytes come."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._sum = self._numel = 0

    def add(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            part = left[: PIECE - self._numel]
            self._sum = zlib.crc32(part, self._sum)
            self._numel += len(part)
            left = left[len(part) :]
            if self._numel == PIECE:
                self._end_piece()

    def _end_piece(self) -> None:
        self._done.append(f"{self._sum:08x}")
        self._sum = self._numel = 0

    def digits(self) -> str:
        """All of them; nothing comes after that."""
        if self._numel:
            self._end_piece()
        return "".join(self._done)


def facts_of(data: bytes) -> FileFacts:
    """What a file of these bytes must be."""
    sums = Sums()
    sums.add(data)
    return FileFacts(len(data), sums.digits())


def write_file(path: Path, data: bytes) -> FileFacts:
    """A small file, whole and on disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return facts_of(data)


def sync_folder(path: Path) -> None:
    """Have a folder's names on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """An ordinary file, open for reading: no link to somewhere else, no device, no pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path} cannot be read: {why}. The checkpoint is damaged.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is no ordinary file: expected one of a checkpoint.")
        yield descriptor
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked."""
    path = folder / FILE_NAME
    if not folder.is_dir() or not os.path.lexists(path):
        what = "holds no manifest.json" if folder.is_dir() else "is no folder"
        raise CheckpointError(f"{folder} {what}: expected a checkpoint that was written whole.")
    with opened(path) as descriptor:
        nbytes = os.fstat(descriptor).st_size
        most = most_nbytes(sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder)) - nbytes)
        if nbytes > most:
            raise CheckpointError(f"{path} has {nbytes} bytes: no manifest of such a checkpoint has more than {most}.")
        text = bytes(read_at(descriptor, 0, nbytes))
    return Manifest.from_bytes(text, str(path))


def damage_of(folder: Path, name: str, facts: FileFacts) -> str | None:
    """What is wrong with a file of a checkpoint, if anything; reads all of it."""
    try:
        with opened(folder / name) as descriptor:
            nbytes = os.fstat(descriptor).st_size
            if nbytes != facts.nbytes:
                return f"{name} has {nbytes} bytes, expected {facts.nbytes}"
            starts = range(0, nbytes, PIECE)
            with ThreadPoolExecutor(_THREADS) as threads:
                sums = threads.map(lambda start: zlib.crc32(read_at(descriptor, start, PIECE)), starts)
                for start, found in zip(starts, sums, strict=True):
                    expected = facts.sums[8 * (start // PIECE) :][:8]
                    if f"{found:08x}" != expected:
                        return f"{name} has other bytes than were written, from {start} to {min(start + PIECE, nbytes)}"
    except CheckpointError as error:
        return str(error)
    return None


def read_at(descriptor: int, offset: int, nbytes: int) -> bytearray:
    """So many bytes of a file, or as many as there are."""
    found = bytearray(nbytes)
    return found[: read_into(descriptor, offset, memoryview(found))] if nbytes else found


def read_into(descriptor: int, offset: int, target: memoryview) -> int:
    """Fill memory from a file; how many bytes there were."""
    done = 0
    while done < len(target) and (count := os.preadv(descriptor, [target[done:]], offset + done)):
        done += count
    return done

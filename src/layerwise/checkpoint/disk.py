"""A checkpoint on disk, without torch: files that are whole or not there, and that are read without believing what is in them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from layerwise.checkpoint.manifest import FILE_NAME, PIECE, FileFacts, Manifest, most_nbytes
from layerwise.errors import CheckpointError

PARTIAL = ".partial"
"""How the name of a folder or file ends that is being written, or was when somebody was killed."""
THREADS = 4
"""That read and sum up parts of files at once; both let go of the interpreter."""
_AT_A_TIME = 256 << 10
"""Bytes that are read and then summed up: they are still in the processor's cache."""
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


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


def write_files(folder: Path, texts: Mapping[str, bytes]) -> None:
    """New small files by name, whole and on disk; they go there together."""
    with ExitStack() as stack:
        files = []
        for name, text in texts.items():
            file = stack.enter_context(open(folder / name, "xb"))
            file.write(text)
            file.flush()
            begin_writing(file.fileno(), 0, len(text))
            files.append(file)
        for file in files:
            os.fsync(file.fileno())


def partial_of(target: Path) -> Path:
    """Where something is written that gets its name when it is whole."""
    return target.with_name(target.name + PARTIAL)


def check_free(target: Path) -> None:
    """Raise if there is something of that name."""
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target} is there already: expected a new name. A checkpoint is never written over another, since neither would be whole "
            "if it were cut short. Save every step under a name of its own; layerwise.Checkpoints does."
        )


def make_partial(target: Path) -> Path:
    """A new folder to write in, in place of one that somebody who was killed has left."""
    partial = partial_of(target)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def begin_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the system begin to bring a part of a file to disk, where it lets itself be told (Linux). Nothing is promised: that
    is what fsync is for, which then has less to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(
            descriptor, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )


def sync_folder(path: Path) -> None:
    """Have a folder's names on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path, what: str = "a file of a checkpoint") -> Iterator[int]:
    """An ordinary file, open for reading: no link to somewhere else, no device, no pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path} cannot be read: {why}. Expected {what}.") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is no ordinary file: expected {what}.")
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


class Piece(NamedTuple):
    """A part of a file that has a sum of its own. An empty file is one, too."""

    file: str
    start: int


def pieces_of(files: Mapping[str, FileFacts]) -> list[Piece]:
    """All files piece by piece, those of a rank after those of the rank before it."""
    names = sorted(files, key=lambda name: (len(name), name))
    return [Piece(name, start) for name in names for start in range(0, max(1, files[name].nbytes), PIECE)]


def damages_of(folder: Path, files: Mapping[str, FileFacts], pieces: Sequence[Piece]) -> list[str]:
    """What is wrong with pieces of a checkpoint's files, once for each file; reads all of them, and holds little of it."""
    with ThreadPoolExecutor(THREADS) as threads:
        texts = threads.map(lambda piece: _damage_of(folder, piece, files[piece.file]), pieces)
        found: dict[str, str] = {}
        for piece, text in zip(pieces, texts, strict=True):
            if text is not None:
                found.setdefault(piece.file, text)
    return list(found.values())


def _damage_of(folder: Path, piece: Piece, facts: FileFacts) -> str | None:
    name, start = piece
    try:
        with opened(folder / name) as descriptor:
            nbytes = os.fstat(descriptor).st_size
            if nbytes != facts.nbytes:
                return f"{name} has {nbytes} bytes, expected {facts.nbytes}"
            stop = min(start + PIECE, nbytes)
            if sum_at(descriptor, start, stop) != facts.sums[8 * (start // PIECE) :][:8]:
                return f"{name} has other bytes than were written, from {start} to {stop}"
    except CheckpointError as error:
        return str(error)
    return None


def sum_at(descriptor: int, start: int, stop: int) -> str:
    """The sum of a part of a file, through memory that is used again and again; empty where there is nothing to sum up."""
    if hasattr(os, "posix_fadvise"):  # one long read in place of many short ones
        os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)
    memory = memoryview(bytearray(min(_AT_A_TIME, stop - start)))
    found = 0
    for at in range(start, stop, _AT_A_TIME):
        count = read_into(descriptor, at, memory[: stop - at])
        found = zlib.crc32(memory[:count], found)
    return f"{found:08x}" if start < stop else ""


def read_at(descriptor: int, offset: int, nbytes: int) -> bytearray:
    """So many bytes of a file, or as many as there are."""
    found = bytearray(nbytes)
    count = read_into(descriptor, offset, memoryview(found))
    return found if count == nbytes else found[:count]


def read_into(descriptor: int, offset: int, target: memoryview) -> int:
    """Fill memory from a file; how many bytes there were."""
    done = 0
    while done < len(target) and (count := os.preadv(descriptor, [target[done:]], offset + done)):
        done += count
    return done

"""A checkpoint on disk, without torch: files that are whole or not there, and that are read without believing what is in them."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import shutil
import stat
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from layerwise.checkpoint.manifest import FILE_NAME, PIECE, FileFacts, Manifest, most_nbytes
from layerwise.errors import CheckpointError
from layerwise.units import format_nbytes

_fcntl: Any = None
with suppress(ImportError):  # Windows
    _fcntl = importlib.import_module("fcntl")

PARTIAL = ".partial"
"""How the name of a folder or file ends that is being written, or was when somebody was killed."""
THREADS = 4
"""That read and sum up parts of files at once; both let go of the interpreter."""
_AT_A_TIME = 256 << 10
"""Bytes that are read and then summed up: they are still in the processor's cache."""
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range: Any = None
with suppress(TypeError, OSError):  # Windows has no library without a name
    _sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
"""How a file of bytes is opened. Not every system knows every flag."""
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_SEEKING = threading.Lock()
"""Held while a file is read in two steps, where the system does not read at a place in one."""


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


class Presence:
    """Says that somebody saves into a folder, as long as this lives, where the file system has locks: shared by all who do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._leave: Callable[[], object] = lambda: None

    def is_alone(self) -> bool:
        """Whether nobody else does, as far as that can be told; from now on others know of this one."""
        descriptor = self._joined()
        if descriptor is None:
            return True
        try:
            _fcntl.flock(descriptor, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            with suppress(OSError):
                _fcntl.flock(descriptor, _fcntl.LOCK_SH)
        return True

    def _joined(self) -> int | None:
        """The folder that is there now, opened and locked; None where that cannot be."""
        if _fcntl is None:
            return None
        try:
            if self._descriptor is None or not os.path.samestat(os.fstat(self._descriptor), os.stat(self._folder)):
                self._leave()
                self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | BINARY)
                self._leave = weakref.finalize(self, os.close, self._descriptor)
                _fcntl.flock(self._descriptor, _fcntl.LOCK_SH)
        except OSError:
            return None
        return self._descriptor


@contextmanager
def none_left(begun: Sequence[Path]) -> Iterator[None]:
    """Delete folders that are being written if that does not come to an end: they would take the room of what comes next."""
    try:
        yield
    except BaseException:
        for path in begun:
            shutil.rmtree(path, ignore_errors=True)
        raise


def check_room(folder: Path, nbytes: int) -> None:
    """Raise if there is certainly less room than this. Not every file system tells, and then there is none to see."""
    if not hasattr(os, "statvfs"):
        return
    found = os.statvfs(folder)
    room = found.f_bfree * found.f_frsize
    if 0 < room < nbytes:
        raise CheckpointError(
            f"{folder.parent} has room for {format_nbytes(room)}, and the checkpoint needs {format_nbytes(nbytes)}: expected room for one "
            "more than are kept. Nothing was written. Delete what nobody needs, keep fewer, or save to another disk."
        )


def begin_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Have the system begin to bring a part of a file to disk, where it lets itself be told (Linux). Nothing is promised: that
    is what fsync is for, which then has less to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(
            descriptor, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )


def sync_folder(path: Path) -> None:
    """Have a folder's names on disk, where a folder can be opened (not on Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def opened(path: Path, what: str = "a file of a checkpoint") -> Iterator[int]:
    """An ordinary file, open for reading: no link to somewhere else, no device, no pipe."""
    try:
        if not _NO_LINK and path.is_symlink():
            raise OSError(errno.ELOOP, "")
        descriptor = os.open(path, os.O_RDONLY | _NO_LINK | BINARY)
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
    while done < len(target) and (count := _read(descriptor, target[done:], offset + done)):
        done += count
    return done


def _read_in_two(descriptor: int, target: memoryview, offset: int) -> int:
    """Some bytes at a place of a file, and how many; threads share the place that a descriptor is at."""
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, len(target))
    target[: len(found)] = found
    return len(found)


def _read_in_one(descriptor: int, target: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [target], offset)


_read: Callable[[int, memoryview, int], int] = _read_in_one if hasattr(os, "preadv") else _read_in_two

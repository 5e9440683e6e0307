"""A checkpoint on disk, without torch: files that are whole or not there, and that are read without believing what is in them."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layerwise.checkpoint.manifest import FILE_NAME, FileFacts, Manifest, most_nbytes
from layerwise.errors import CheckpointError

_PIECE = 4 << 20
"""Bytes that are read at a time."""


def write_file(path: Path, data: bytes) -> FileFacts:
    """A small file, whole and on disk."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileFacts(len(data), hashlib.sha256(data).hexdigest())


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
        text = b"".join(_pieces(descriptor))
    return Manifest.from_bytes(text, str(path))


def _pieces(descriptor: int) -> Iterator[bytes]:
    while piece := os.read(descriptor, _PIECE):
        yield piece


def damage_of(folder: Path, name: str, facts: FileFacts) -> str | None:
    """What is wrong with a file of a checkpoint, if anything; reads all of it."""
    try:
        with opened(folder / name) as descriptor:
            nbytes = os.fstat(descriptor).st_size
            if nbytes != facts.nbytes:
                return f"{name} has {nbytes} bytes, expected {facts.nbytes}"
            found = hashlib.sha256()
            for piece in _pieces(descriptor):
                found.update(piece)
    except CheckpointError as error:
        return str(error)
    return None if found.hexdigest() == facts.sha256 else f"{name} has another SHA-256 than it was written with"

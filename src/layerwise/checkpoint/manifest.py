"""The manifest: what a checkpoint holds, where, and how to tell that it is whole. Plain JSON with a digest of itself; nothing
of it is believed before it is checked.

Tensors go by key and global box. A chunk is a box of one, dense, at a place in a data file.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from layerwise.errors import CheckpointError, listed
from layerwise.routing.geometry import Box

FILE_NAME = "manifest.json"
"""Written last: a folder without it is no checkpoint."""
FORMAT = "layerwise checkpoint 1"
PIECE = 16 << 20
"""Bytes of a file that have a sum of their own: few enough that no two flipped bits can hide from it."""
_MOST_NBYTES, _MOST_ALONE = 1 << 30, 1 << 20

ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element, by torch's name of the dtype."""

_FOR_TORCH = ".metadata"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")
_SUMS = re.compile(r"[0-9a-f]*")
_DIGITS = 8
_MOST_DIMS = 16
_MOST_NUMEL = 1 << 56
_MOST_BESIDE = 64 << 10
"""Bytes of an item beside its elements, and more than enough."""


def most_nbytes(data_nbytes: int) -> int:
    """Bytes that a manifest of so many bytes of other files has at most. Reading JSON takes many times its own size, and an item
    has more bytes than what is said of it."""
    return min(_MOST_NBYTES, _MOST_ALONE + data_nbytes)


class Chunk(NamedTuple):
    """A box of a tensor in a data file."""

    box: Box
    file: str
    offset: int
    """Where the item begins that torch's own checkpoints read."""
    length: int
    data: int
    """Where its elements begin, row by row."""


@dataclass(frozen=True)
class Entry:
    """One tensor."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


class FileFacts(NamedTuple):
    """What a file must be."""

    nbytes: int
    sums: str
    """CRC-32 of every piece of it, in hexadecimal digits. A stronger sum would tell no more: who changes a file on purpose
    changes its sum too, and what breaks by chance is found by this one, as fast as memory is copied. Sums of integers that
    torch takes are hardly faster, and two flipped signs can hide from them."""


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint, as data."""

    entries: Mapping[str, Entry]
    files: Mapping[str, FileFacts]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Everything that is no tensor: step, rules, options, what the user put beside, versions."""
    digest: str = field(default="", compare=False)
    """Of the body, where it was read."""

    @property
    def step(self) -> int:
        return int(self.about["step"])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def to_body(self) -> dict[str, Any]:
        return {
            "entries": {key: _entry_to_json(entry) for key, entry in sorted(self.entries.items())},
            "files": {name: list(facts) for name, facts in sorted(self.files.items())},
            "about": dict(self.about),
        }

    def to_bytes(self) -> bytes:
        body = self.to_body()
        return json.dumps({"format": FORMAT, "digest": _digest(body), "body": body}, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, text: bytes, where: str) -> Manifest:
        """Read one that somebody wrote, and check all of it; `where` is named in the error."""
        try:
            outer = json.loads(text)
            again = json.dumps(outer, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is no manifest: {str(error)[:200]}. The checkpoint is damaged.") from None
        if not isinstance(outer, dict) or outer.get("format") != FORMAT or not isinstance(outer.get("body"), dict):
            raise CheckpointError(
                f"{where} is no manifest of the format {FORMAT!r}: another program or version wrote it."
            )
        # The digest is of what the text says. 1E-8 and 1e-8, or a key that is there twice, say the same.
        digest = _digest(outer["body"])
        if again != text or outer.get("digest") != digest:
            raise CheckpointError(f"{where} does not have the digest that it says it has: the checkpoint is damaged.")
        found = replace(cls.from_body(outer["body"], where), digest=digest)
        found.check(where)
        return found

    @classmethod
    def from_body(cls, body: Mapping[str, Any], where: str) -> Manifest:
        """As data, not yet looked at."""
        try:
            found = cls(
                {key: _entry_from_json(entry) for key, entry in expect(body["entries"], dict).items()},
                {
                    name: FileFacts(_count(nbytes), expect(sums, str))
                    for name, (nbytes, sums) in expect(body["files"], dict).items()
                },
                expect(body["about"], dict),
            )
            _count(found.about["step"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where} is malformed: {type(error).__name__}: {str(error)[:200]}.") from None
        return found

    def check(self, where: str) -> None:
        """Raise unless every tensor is whole, each element once, within files that there are."""
        problem = next(self._problems(), None)
        if problem is not None:
            raise CheckpointError(f"{where} is malformed: {problem}")

    def _problems(self) -> Iterator[str]:
        chunks = [(chunk, entry) for entry in self.entries.values() for chunk in entry.chunks]
        yield from self._file_problems(chunks)
        overlaps = _Overlaps(len(chunks))
        for key, entry in self.entries.items():
            problem = _problem_with(entry, self.files, overlaps)
            if problem is not None:
                yield f"tensor {key[:200]!r} {problem}"
        end, last = 0, ""
        for chunk, _ in sorted(chunks, key=lambda one: (one[0].file, one[0].offset)):
            if chunk.file == last and chunk.offset < end:
                yield f"file {last!r} has items that overlap: a small file would make large tensors."
            end, last = chunk.offset + chunk.length, chunk.file

    def _file_problems(self, chunks: Sequence[tuple[Chunk, Entry]]) -> Iterator[str]:
        explained = dict.fromkeys(self.files, _MOST_BESIDE * (len(chunks) + 1))
        for chunk, entry in chunks:
            if chunk.file in explained:
                explained[chunk.file] += chunk.box.numel * ITEMSIZES.get(entry.dtype, 0)
        for name, facts in self.files.items():
            if not _NAME.fullmatch(name) and name != _FOR_TORCH:
                yield f"it names the file {name[:80]!r}: expected a plain name."
            if len(facts.sums) != _DIGITS * -(-facts.nbytes // PIECE) or not _SUMS.fullmatch(facts.sums):
                yield f"file {name!r} has no sum of {_DIGITS} hexadecimal digits for every {PIECE} bytes."
            if facts.nbytes > explained[name]:
                yield f"file {name!r} has {facts.nbytes} bytes: its tensors have no more than {explained[name]}."


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    return {
        "shape": list(entry.shape),
        "dtype": entry.dtype,
        "chunks": [
            [list(chunk.box.starts), list(chunk.box.shape), chunk.file, chunk.offset, chunk.length, chunk.data]
            for chunk in entry.chunks
        ],
    }


def _entry_from_json(entry: Mapping[str, Any]) -> Entry:
    return Entry(
        tuple(map(_count, entry["shape"])),
        expect(entry["dtype"], str),
        tuple(
            Chunk(_box(starts, sizes), expect(file, str), _count(offset), _count(length), _count(data))
            for starts, sizes, file, offset, length, data in entry["chunks"]
        ),
    )


def _box(starts: Sequence[Any], sizes: Sequence[Any]) -> Box:
    first = tuple(map(_count, starts))
    return Box(first, tuple(start + _count(size) for start, size in zip(first, sizes, strict=True)))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_NUMEL:
        found = value if isinstance(value, int | float) else type(value).__name__
        raise ValueError(f"{str(found)[:40]} is no count")
    return value


def expect(value: object, kind: type) -> Any:
    """A value that somebody wrote, if it is of that kind."""
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _problem_with(entry: Entry, files: Mapping[str, FileFacts], overlaps: _Overlaps) -> str | None:
    """What is wrong with a tensor, if anything: its chunks must make it up, each element once, within files that there
    are."""
    # Also where it has no elements: torch multiplies the other sizes all the same.
    if len(entry.shape) > _MOST_DIMS or math.prod(size or 1 for size in entry.shape) >= _MOST_NUMEL:
        return f"has the shape {entry.shape[:_MOST_DIMS]}: no tensor is as large."
    if entry.dtype not in ITEMSIZES:
        return f"has the dtype {entry.dtype[:40]!r}: known are {listed(sorted(ITEMSIZES), 20)}."
    for chunk in entry.chunks:
        if len(chunk.box.starts) != len(entry.shape):
            return "has a chunk with another number of dims."
        if any(stop > size for stop, size in zip(chunk.box.stops, entry.shape, strict=True)):
            return "has a chunk that reaches beyond it."
        facts = files.get(chunk.file)
        if facts is None:
            return f"lies in the file {chunk.file[:80]!r}, of which nothing is known."
        end = chunk.data + chunk.box.numel * ITEMSIZES[entry.dtype]
        if not (chunk.offset <= chunk.data and end <= chunk.offset + chunk.length <= facts.nbytes):
            return f"has a chunk beyond the end of its item or of the file {chunk.file!r}."
    if sum(chunk.box.numel for chunk in entry.chunks) != entry.numel:
        return "has more or fewer elements in its chunks than in all."
    return (
        "has chunks that overlap." if overlaps.among([chunk.box for chunk in entry.chunks if chunk.box.numel]) else None
    )


class _Overlaps:
    """Looks for boxes that share an element. Cuts of a tensor into shards are grids, or nearly so: that goes fast. Whoever makes
    it slow has not written what we write."""

    def __init__(self, chunks: int) -> None:
        self._left = 100_000 + 16 * chunks

    def among(self, boxes: Sequence[Box], dim: int = 0) -> bool:
        """Whether any two boxes, whose dims before this one are the same, share an element."""
        if len(boxes) < 2:
            return False
        if dim == len(boxes[0].starts):
            return True
        return any(self._in_a_row(row, dim) for row in _rows(boxes, dim))

    def _in_a_row(self, boxes: Sequence[Box], dim: int) -> bool:
        if len({(box.starts[dim], box.stops[dim]) for box in boxes}) == 1:
            return self.among(boxes, dim + 1)
        if dim + 1 == len(boxes[0].starts):
            return True
        alive: list[Box] = []
        for box in boxes:
            alive = [other for other in alive if other.stops[dim] > box.starts[dim]]
            self._left -= len(alive)
            if self._left < 0:
                raise CheckpointError(
                    "the checkpoint has tensors in too many chunks that cross: nothing of ours writes that."
                )
            if any(_meet(box, other) for other in alive):
                return True
            alive.append(box)
        return False


def _rows(boxes: Sequence[Box], dim: int) -> Iterator[list[Box]]:
    """Boxes along a dim, in sets between which there is a cut."""
    row: list[Box] = []
    end = 0
    for box in sorted(boxes, key=lambda box: box.starts[dim]):
        if row and box.starts[dim] >= end:
            yield row
            row = []
        row.append(box)
        end = max(end, box.stops[dim])
    yield row


def _meet(one: Box, other: Box) -> bool:
    return all(
        start < stop and first < last
        for start, stop, first, last in zip(one.starts, other.stops, other.starts, one.stops, strict=True)
    )

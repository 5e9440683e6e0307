"""From the rows and columns that were used together to a `Split`.

A use of a param is a rectangle of its elements, seen as rows of `pitch` elements each. Along the axis of its outputs every
index has a class: outputs of one class make one matrix. Whatever a `Split` cannot say is None, never something like it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from layerwise.routing.split import Split

_FEW = 4
Runs = list[tuple[int, object]]
"""Lengths of neighbours of one class, with the class."""


@dataclass(frozen=True, slots=True)
class Use:
    """One product with (a part of) a param: where its elements are, and the classes of its outputs."""

    offset: int
    out_stride: int
    in_stride: int
    n_out: int
    n_in: int
    classes: tuple[tuple[int, int], ...]
    """(length, class) along the outputs."""
    entry: float = 0
    """Which of several matrices used apart it is: entries of a stack, or products with different rows."""

    @property
    def is_transposed(self) -> bool:
        """Whether outputs lie next to each other: stored (in, out)."""
        return self.out_stride < self.in_stride if min(self.n_out, self.n_in) > 1 else self.n_out > 1 == self.out_stride


@dataclass(frozen=True, slots=True)
class _Rectangle:
    """A use as rows and columns: start, step and count of each, and the classes along its outputs."""

    rows: tuple[int, int, int]
    cols: tuple[int, int, int]
    classes: tuple[tuple[int, int], ...]
    outputs_are_rows: bool
    entry: float


def split_of(shape: tuple[int, ...], uses: Sequence[Use], *, one_for_all: bool) -> Split | str:
    """The split that the uses amount to, or why there is none. With `one_for_all`, an entry of a stack that was not used
    is like those that were: which are used depends on data."""
    numel = 1
    for size in shape:
        numel *= size
    first = uses[0].is_transposed
    pitch = _pitch(shape, uses[0])
    uses = [use for use in uses if use.is_transposed == first and _pitch(shape, use) == pitch]
    if pitch is None:
        return "it is multiplied in an order that is not that of its axes"
    n_rows = numel // pitch
    found = [_rectangle(use, pitch, first) for use in uses]
    rectangles = [rectangle for rectangle in found if rectangle is not None]
    if len(rectangles) < len(found):
        return "a part of it is multiplied that is no block of rows or columns"
    if first and len({(found.entry, found.rows) for found in rectangles}) > len({found.entry for found in rectangles}):
        return "its outputs are an axis outside that of its inputs, which no split can say"
    along_rows = _axis(rectangles, n_rows, rows=True)
    along_cols = _axis(rectangles, pitch, rows=False)
    if one_for_all and along_rows is None:
        along_rows = _repeated(rectangles, n_rows)
    if along_rows is None or along_cols is None:
        return "only a part of it was seen in use, or parts of it in ways that do not fit together"
    outer, inner = ("c", "r") if first else ("r", "c")
    return _combined(_structure(along_rows, outer), _structure(along_cols, inner))


def _pitch(shape: tuple[int, ...], use: Use) -> int | None:
    """Elements of a row: the trailing axes that hold the use's inner axis."""
    inner = (
        min((stride, size) for stride, size in ((use.out_stride, use.n_out), (use.in_stride, use.n_in)) if size > 1)
        if max(use.n_out, use.n_in) > 1
        else (1, 1)
    )
    outer_stride = max(use.out_stride, use.in_stride) if min(use.n_out, use.n_in) > 1 else 0
    trailing = 1
    for size in reversed(shape):
        trailing *= size
        reach = use.offset % trailing + inner[0] * (inner[1] - 1)
        if trailing >= inner[0] * inner[1] and reach < trailing and outer_stride % trailing == 0:
            return trailing
    return None


def _rectangle(use: Use, pitch: int, is_transposed: bool) -> _Rectangle | None:
    outer, n_outer = (use.in_stride, use.n_in) if is_transposed else (use.out_stride, use.n_out)
    inner, n_inner = (use.out_stride, use.n_out) if is_transposed else (use.in_stride, use.n_in)
    if n_outer == 1:
        outer = pitch
    if n_inner == 1:
        inner = 1
    start, col = divmod(use.offset, pitch)
    if outer % pitch:
        return None
    return _Rectangle(
        (start, outer // pitch, n_outer), (col, inner, n_inner), use.classes, not is_transposed, use.entry
    )


def _axis(rectangles: Sequence[_Rectangle], size: int, *, rows: bool) -> Runs | None:
    """Classes along an axis; None unless the rectangles tile it, each its own part or all of them all of it."""
    pieces: dict[tuple[int, int, int], Iterable[tuple[int, int, object]]] = {}
    for rectangle in rectangles:
        start, step, count = rectangle.rows if rows else rectangle.cols
        is_whole = count == size
        if rectangle.outputs_are_rows == rows:
            classes: Iterable[tuple[int, object]] = rectangle.classes
        else:
            classes = ((count, 0),)
        entry = -1 if is_whole else rectangle.entry
        runs = [(length, (entry, kind)) for length, kind in classes]
        before = pieces.get((start, step, count))
        if before is not None and rectangle.outputs_are_rows == rows and list(before) != _placed(runs, start, step):
            return None
        pieces[start, step, count] = _placed(runs, start, step)
    placed = sorted((piece for found in pieces.values() for piece in found), key=lambda piece: piece[0])
    cursor = 0
    for at, length, _ in placed:
        if at != cursor:
            return None
        cursor += length
    if cursor != size:
        return None
    return _merged((length, kind) for _, length, kind in placed)


def _placed(runs: Iterable[tuple[int, object]], start: int, step: int) -> list[tuple[int, int, object]]:
    found = []
    for length, kind in runs:
        if step == 1:
            found.append((start, length, kind))
        else:
            found.extend((start + index * step, 1, kind) for index in range(length))
        start += length * step
    return found


def _repeated(rectangles: Sequence[_Rectangle], n_rows: int) -> Runs | None:
    """The rows of a stack of which some entries were used, all in the same way: as if all had been."""
    patterns = {(rectangle.rows[1], rectangle.rows[2], rectangle.classes) for rectangle in rectangles}
    if len(patterns) != 1:
        return None
    step, count, classes = patterns.pop()
    starts = {rectangle.rows[0] % count for rectangle in rectangles}
    if step != 1 or n_rows % count or starts != {0}:
        return None
    inner = classes if rectangles[0].outputs_are_rows else ((count, 0),)
    return [(length, (entry, kind)) for entry in range(n_rows // count) for length, kind in inner]


def _merged(runs: Iterable[tuple[int, object]]) -> Runs:
    return [(sum(length for length, _ in group), kind) for kind, group in groupby(runs, key=lambda run: run[1])]


@dataclass(frozen=True, slots=True)
class _Axis:
    """One stored axis as axes of a grid, and its blocks along the last of them."""

    sizes: tuple[int, ...]
    roles: str
    blocks: tuple[int, ...] = ()


def _structure(runs: Runs, role: str) -> _Axis | None:
    """An axis of entries apart, each whole, in blocks or in blocks that take turns."""
    entries = [list(group) for _, group in groupby(runs, key=lambda run: run[1][0])]  # type: ignore[index]
    if len(entries) == 1:
        return _inner([(length, kind) for length, kind in runs], role)
    patterns = {tuple((length, kind[1]) for length, kind in entry) for entry in entries}  # type: ignore[index]
    if len({entry[0][1][0] for entry in entries}) < len(entries):  # type: ignore[index]
        # The same entry in several places: parts that take turns.
        return _inner(runs, role)
    inner = [_inner(list(pattern), role) for pattern in sorted(patterns, key=repr)]
    if len(set(inner)) == 1 and inner[0] is not None:
        return _Axis((len(entries), *inner[0].sizes), f"a{inner[0].roles}", inner[0].blocks)
    return _inner(runs, role)


def _few_as_blocks(axis: _Axis) -> _Axis:
    """A few equal parts one after the other read better as blocks than as a stack."""
    if axis.roles[0] == "a" and len(axis.roles) == 2 and axis.sizes[0] <= _FEW and not axis.blocks:
        return _Axis((axis.sizes[0] * axis.sizes[1],), axis.roles[1], (axis.sizes[1],) * axis.sizes[0])
    return axis


def _inner(runs: Runs, role: str) -> _Axis | None:
    total = sum(length for length, _ in runs)
    if len(runs) == 1:
        return _Axis((total,), role)
    if len({kind for _, kind in runs}) == len(runs):
        return _Axis((total,), role, tuple(length for length, _ in runs))
    for period in range(2, len(runs) // 2 + 1):
        if len(runs) % period == 0 and all(runs[n] == runs[n - period] for n in range(period, len(runs))):
            turn = runs[:period]
            if len({kind for _, kind in turn}) < period:
                return None
            length = sum(size for size, _ in turn)
            return _Axis((total // length, length), role * 2, tuple(size for size, _ in turn))
    return None


def _combined(rows: _Axis | None, cols: _Axis | None) -> Split | str:
    if rows is None or cols is None:
        return "its outputs are used apart in an order that no split can say"
    if not cols.blocks and "a" not in cols.roles:
        rows = _few_as_blocks(rows)
    if rows.blocks and cols.blocks:
        return "its rows and its columns are both in blocks, which no split can say"
    sizes, roles = (*rows.sizes, *cols.sizes), rows.roles + cols.roles
    if rows.blocks:
        return Split(grid=sizes, roles=roles, block_axis=len(rows.sizes) - 1, blocks=rows.blocks)
    if cols.blocks:
        return Split(grid=sizes, roles=roles, block_axis=len(sizes) - 1, blocks=cols.blocks)
    return Split(grid=sizes, roles=roles)

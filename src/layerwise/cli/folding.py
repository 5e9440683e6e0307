"""Long tables made short: params that differ in their layer number alone share a line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

_FEWEST_FOR_A_STRIDE = 3


def fold(names: Sequence[str], kinds: Sequence[Hashable]) -> list[tuple[str, list[int]]]:
    """Positions of the names that belong together, under a name for all of them, in order of first appearance.

    Names belong together if they are of one kind and differ in the numbers between their dots. Every name that the
    folded one can be read as is really there.

    >>> fold(["h.0.w", "h.0.b", "h.1.w", "h.1.b", "out.w"], ["m", "v", "m", "v", "m"])
    [('h.{0,1}.w', [0, 2]), ('h.{0,1}.b', [1, 3]), ('out.w', [4])]
    """
    groups: dict[Hashable, list[int]] = {}
    for position, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        groups.setdefault((_template(name), kind), []).append(position)
    folded = [folded for positions in groups.values() for folded in _fold_group(names, positions)]
    return sorted(folded, key=lambda item: item[1][0])


def _parts(name: str) -> list[str]:
    return name.split(".")


def _template(name: str) -> tuple[str, ...]:
    return tuple("" if part.isdecimal() else part for part in _parts(name))


def _fold_group(names: Sequence[str], positions: list[int]) -> Iterable[tuple[str, list[int]]]:
    """One name if the numbers are all combinations of those in each place; otherwise only the first number folds."""
    parts_by_position = {position: _parts(names[position]) for position in positions}
    columns = [sorted(set(column)) for column in zip(*parts_by_position.values(), strict=True)]
    if math.prod(map(len, columns)) == len(positions):
        return [(".".join(map(_together, columns)), positions)]
    first = next(place for place, column in enumerate(columns) if len(column) > 1)
    by_rest: dict[tuple[str, ...], list[int]] = {}
    for position, parts in parts_by_position.items():
        by_rest.setdefault((*parts[:first], *parts[first + 1 :]), []).append(position)
    return [found for members in by_rest.values() for found in _fold_group(names, members)]


def _together(column: Sequence[str]) -> str:
    return column[0] if len(column) == 1 else "{" + ranges(sorted(map(int, column))) + "}"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers in few words: runs as `0..5`, equal steps as `0..58..2`.

    >>> ranges([0, 1, 2, 5, 7, 8]), ranges([4, 12, 20, 28]), ranges([3])
    ('0..2,5,7,8', '4..28..8', '3')
    """
    if len(numbers) >= _FEWEST_FOR_A_STRIDE:
        strides = {right - left for left, right in pairwise(numbers)}
        if len(strides) == 1 and (stride := strides.pop()) > 1:
            return f"{numbers[0]}..{numbers[-1]}..{stride}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def counted(words: Sequence[str]) -> str:
    """`a, 2 of b`: equal entries of a long list need no repetition."""
    counts = Counter(words)
    return ", ".join(word if count == 1 else f"{count} of {word}" for word, count in counts.items())

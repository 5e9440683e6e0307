"""Where two plans differ, for ranks that have derived different ones."""

from __future__ import annotations

from collections.abc import Mapping


def first_difference(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """Where two plans differ first, in words: the bucket (or param) and the field."""
    return _difference(mine, theirs, "plan") or "the plans are equal"


def _difference(mine: object, theirs: object, where: str) -> str | None:
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        label = mine.get("label")
        here = label if isinstance(label, str) else where
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if key not in mine or key not in theirs:
                return f"{here}: {key!r} is only on one of them"
            found = _difference(mine[key], theirs[key], f"{here}, {key}")
            if found:
                return found
        return None
    if isinstance(mine, list) and isinstance(theirs, list):
        for position, (left, right) in enumerate(zip(mine, theirs, strict=False)):
            found = _difference(left, right, f"{where}[{position}]")
            if found:
                return found
        return None if len(mine) == len(theirs) else f"{where}: {len(mine)} entries against {len(theirs)}"
    return None if mine == theirs else f"{where}: {mine!r} against {theirs!r}"

"""Routing rules as TOML: read with every mistake at once, and printed back.

Rules are tried in the order in which they are written:

    [[rule]]
    pattern = "*.router.weight"
    to = "other"
    options = {lr = 1e-4}

    [[rule]]
    module_type = "FusedAttention"
    to = "matrix"
    split = {grid = [8, 192, 512], roles = "rrc", block_axis = 1, blocks = [64, 64, 64]}
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from layerwise.config.gone import GONE
from layerwise.config.rules import RULES_BY_KIND, AdaMuon, AdamW, Lion, Muon, NorMuon, Rule
from layerwise.errors import ConfigError, Problem, did_you_mean, shown
from layerwise.routing.rules import RouteRule
from layerwise.routing.split import Split, is_size

_RULES_BY_FAMILY: dict[object, tuple[type[Rule], ...]] = {
    "matrix": (Muon, NorMuon, AdaMuon, AdamW),  # AdamW: matrices may be under the element-wise baseline
    "other": (AdamW, Lion),
}


class _Unfit(ValueError):
    """A value of the wrong kind; the message says what was expected."""


def read_rules(path: str) -> list[RouteRule]:
    """The rules of a file; none for an empty path, which is how a config says that there is no file."""
    if path == "":
        return []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([Problem(path, "there is no such file.")]) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        why = getattr(error, "strerror", None) or error  # without the path, which the system would repeat
        raise ConfigError([Problem(repr(path), f"cannot be read as text: {why}.")]) from None
    return rules_from_toml(text, path)


def rules_from_toml(text: str, where: str) -> list[RouteRule]:
    """The `[[rule]]` tables of a TOML document as rules, in order; `where` names the document in messages.

    >>> rules_from_toml('[[rule]]\\npattern = "*.gate.weight"\\nto = "other"', "rules.toml")[0].label
    "'*.gate.weight'"
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        raise ConfigError([Problem(where, f"is not valid TOML: {error}.")]) from None
    problems = [
        Problem(f"{where}: {key}", f"is unknown: a file of rules holds [[rule]] tables.{_close(key, ('rule',))}")
        for key in document
        if key != "rule"
    ]
    tables = document.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        wrong = f"expected [[rule]] tables, got {shown(tables)}. Write [[rule]] above each rule."
        raise ConfigError([*problems, Problem(f"{where}: rule", wrong)])
    read = [_Table(table, f"{where}: rule {number}", problems) for number, table in enumerate(tables, start=1)]
    rules = [table.rule() for table in read]
    if problems:
        raise ConfigError(problems)
    return [rule for rule in rules if rule is not None]


class _Table:
    """One `[[rule]]` table. Values that do not fit are noted in `problems`, and then there is no rule."""

    def __init__(self, table: Mapping[str, object], where: str, problems: list[Problem]) -> None:
        self.table, self.where, self.problems = table, where, problems

    def rule(self) -> RouteRule | None:
        before = len(self.problems)
        values: dict[str, object] = {}
        for key, value in self.table.items():
            if key == "options":
                values[key] = self._options(value)
            elif key == "split" and value != "whole":
                values[key] = self._split(value)
            else:
                values[key] = self._value(key, value, _RULE_KEYS, key)
        if "to" not in self.table:
            self._note("to", "is missing: expected 'matrix' or 'other'.")
        if len(self.problems) > before:
            return None
        try:
            return RouteRule(**values)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:  # what only the rule as a whole knows
            self.problems.append(Problem(self.where, str(error)))
            return None

    def _note(self, key: str, what: str) -> None:
        self.problems.append(Problem(f"{self.where}.{key}", what))

    def _value(self, key: str, value: object, known: Mapping[str, Callable[[object], object]], path: str) -> object:
        if key not in known:
            self._note(path, f"is unknown.{did_you_mean(key, known)}")
            return None
        try:
            return known[key](value)
        except _Unfit as unfit:
            self._note(path, f"expected {unfit}, got {shown(value)}.")
            return None

    def _split(self, value: object) -> Split | None:
        if not isinstance(value, Mapping):
            self._note("split", f"expected 'whole' or a table of grid and roles, got {shown(value)}.")
            return None
        before = len(self.problems)
        for key in ("grid", "roles"):
            if key not in value:
                self._note(f"split.{key}", f"is missing: a split needs {_SPLIT_NEEDS[key]}.")
        found = {key: self._value(key, item, _SPLIT_KEYS, f"split.{key}") for key, item in value.items()}
        if len(self.problems) > before:
            return None
        try:
            return Split(**found)  # type: ignore[arg-type]
        except ValueError as error:
            self._note("split", str(error))
            return None

    def _options(self, value: object) -> dict[str, object]:
        if not isinstance(value, Mapping):
            self._note("options", f"expected a table such as {{lr = 1e-3}}, got {shown(value)}.")
            return {}
        family = self.table.get("to")
        allowed = _RULES_BY_FAMILY.get(family, tuple(RULES_BY_KIND.values())) if isinstance(family, str) else ()
        known = {name for rule in allowed for name in rule.option_names()}
        options: dict[str, object] = {}
        for name, item in value.items():
            if known and name not in known:
                close = f" It is gone: {GONE[name]}." if name in GONE else did_you_mean(name, known)
                self._note(f"options.{name}", f"is no option of {_either(allowed)}.{close}")
                continue
            try:
                options[name] = _option(item)
            except _Unfit as unfit:
                self._note(f"options.{name}", f"expected {unfit}, got {shown(item)}.")
        if len(options) == len(value):
            self._try_options(options, allowed)
        return options

    def _try_options(self, options: Mapping[str, object], allowed: Sequence[type[Rule]]) -> None:
        """The update rules have the last word on their own numbers: the first one that has all these fields says it."""
        for rule in allowed:
            if options.keys() <= set(rule.option_names()):
                try:
                    rule(**{"lr": 0.0, **options})  # type: ignore[arg-type]
                except ValueError as error:
                    self._note("options", str(error))
                return


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Unfit("a string")
    return value


def _integer(value: object) -> int:
    if not is_size(value):
        raise _Unfit("an integer")
    return value


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(map(is_size, value)):
        raise _Unfit("a list of integers")
    return tuple(value)


def _option(value: object) -> object:
    """A value that an option may have. Lists become tuples, since rules are values."""
    if isinstance(value, list):
        return tuple(_option(item) for item in value)
    if not isinstance(value, str | int | float):
        raise _Unfit("a number, a string, true, false or a list of them")
    return value


_RULE_KEYS: dict[str, Callable[[object], object]] = {
    "pattern": _text,
    "module_type": _text,
    "to": _text,
    "row_blocks": _integers,
    "split": _text,  # "whole"; anything else is read as a table
    "options": _option,
}
_SPLIT_KEYS: dict[str, Callable[[object], object]] = {
    "grid": _integers,
    "roles": _text,
    "block_axis": _integer,
    "blocks": _integers,
}
_SPLIT_NEEDS = {"grid": "the sizes of its axes", "roles": "one letter of r, c, a for each axis"}


def _close(word: str, known: Sequence[str]) -> str:
    hint = did_you_mean(word, known)
    return hint if "Did you mean" in hint else ""


def _either(rules: Sequence[type[Rule]]) -> str:
    names = [rule.__name__ for rule in rules]
    return f"{', '.join(names[:-1])} or {names[-1]}"


# -- printing them back ----------------------------------------------------------------------------


def rules_to_toml(rules: Sequence[RouteRule]) -> str:
    """The rules as TOML that `rules_from_toml` reads back to equal ones.

    >>> print(rules_to_toml([RouteRule(pattern="*.gate.weight", to="other", options={"lr": 1e-4})]), end="")
    [[rule]]
    pattern = "*.gate.weight"
    to = "other"
    options = {lr = 0.0001}
    """
    return "\n".join(_rule_text(rule, number) for number, rule in enumerate(rules, start=1))


def _rule_text(rule: RouteRule, number: int) -> str:
    if rule.when is not None:
        raise ValueError(
            f"route rule {number} ({rule.label}) cannot be written to a file: it has a Python predicate. "
            "Say it with pattern or module_type."
        )
    lines = ["[[rule]]"]
    for name in ("pattern", "module_type"):
        if getattr(rule, name) is not None:
            lines.append(f"{name} = {_toml(getattr(rule, name), number)}")
    lines.append(f"to = {_toml(rule.to, number)}")
    if rule.row_blocks:
        lines.append(f"row_blocks = {_toml(rule.row_blocks, number)}")
    if rule.split is not None:
        lines.append(f"split = {_toml(_split_value(rule.split), number)}")
    if rule.options:
        lines.append(f"options = {_toml(rule.options, number)}")
    return "\n".join(lines) + "\n"


def _split_value(split: Split | str) -> object:
    if not isinstance(split, Split):
        return split
    # Not Split.to_json: a block axis without blocks means nothing, but equal has to come back as equal.
    found: dict[str, object] = {"grid": split.grid, "roles": split.roles}
    found.update({"block_axis": split.block_axis} if split.block_axis or split.blocks else {})
    found.update({"blocks": split.blocks} if split.blocks else {})
    return found


def _toml(value: object, number: int) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {_toml(item, number)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item, number) for item in value)}]"
    if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(
            f"route rule {number} cannot be written to a file: TOML has no way to say {value!r} to a rule."
        )
    # JSON writes numbers, booleans and strings as TOML does, but for DEL, which TOML wants escaped too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: object) -> str:
    text = str(name)
    return text if text.isascii() and text.replace("_", "").isalnum() else json.dumps(text)

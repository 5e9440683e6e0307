"""From a config file and command-line overrides to a `TrainConfig`, or to a list of everything that is wrong with them.

A file is TOML, or JSON as `dump_json` writes it. An override is `--section.field value` (also `--section.field=value`;
`-` and `_` are the same). Both go through the same conversion, so a flag and a file say the same thing about the same
mistake.
"""

from __future__ import annotations

import json
import math
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal, Union, get_args, get_origin, get_type_hints

from layerwise.config.gone import GONE, WAS_DEFAULT, gone_value
from layerwise.config.schema import SECTIONS, TrainConfig
from layerwise.errors import ConfigError, Problem, did_you_mean, shown

_NONE_WORDS = ("none", "None", "null")
_TRUE_WORDS = ("true", "yes", "on", "1")
_FALSE_WORDS = ("false", "no", "off", "0")

_SHIPPED = Path(__file__).parents[1] / "configs"

FIELD_TYPES: dict[str, dict[str, object]] = {name: get_type_hints(section) for name, section in SECTIONS.items()}
"""Section -> field -> its type: what loader, help and tests mean by "every setting"."""


@dataclass(frozen=True, slots=True)
class Override:
    """One `--section.field value` of the command line, not yet looked at."""

    flag: str
    """As it was typed, for messages."""

    words: tuple[str, ...]
    """What followed it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A config and where each value that is not a default came from."""

    config: TrainConfig
    origin_by_path: dict[str, str]
    """`"optim.lr"` -> `"file"` or `"flag"`."""

    problems: tuple[Problem, ...] = ()
    """What did not fit; the config has defaults in its place."""

    in_doubt: frozenset[str] = frozenset()
    """Settings whose values nobody knows: those that did not fit, and those that are not there where a name was misspelt."""


class _Unfit(ValueError):
    """A value that does not fit its field; the message says what was expected."""


# -- the command line ------------------------------------------------------------------------------


def split_overrides(argv: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Take the dotted flags out of `argv`; what is left belongs to the command itself."""
    overrides: list[Override] = []
    rest: list[str] = []
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        flag, equals, value = word.partition("=")
        if not (flag.startswith("--") and "." in flag):
            rest.append(word)
            continue
        words = [value] if equals else []
        while len(words) < _arity(flag) and position < len(argv) and not argv[position].startswith("--"):
            words.append(argv[position])
            position += 1
        overrides.append(Override(flag, tuple(words)))
    return overrides, rest


def _field_path(flag: str) -> tuple[str, str]:
    """`--model.d-model` -> `("model", "d_model")`."""
    section, _, name = flag.removeprefix("--").replace("-", "_").partition(".")
    return section, name


def _arity(flag: str) -> int:
    """How many words a flag takes; one when it is unknown, so that the next flag is not swallowed."""
    section, name = _field_path(flag)
    kind = FIELD_TYPES.get(section, {}).get(name)
    return len(get_args(kind)) if get_origin(kind) is tuple else 1


# -- loading ---------------------------------------------------------------------------------------


def load(path: str | None, overrides: Sequence[Override] = ()) -> Loaded:
    """Read `path` (none: all defaults), apply `overrides` on top; one `ConfigError` has every problem of both."""
    loaded = load_what_fits(path, overrides)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded


def load_what_fits(path: str | None, overrides: Sequence[Override] = ()) -> Loaded:
    """The same, but with problems as a part of the result, so that more of them can be found in what does fit."""
    taken = _Taken()
    if path is not None:
        taken.take_file(path)
    for override in overrides:
        taken.take_override(override)
    sections = {name: section(**taken.values[name]) for name, section in SECTIONS.items()}
    return Loaded(TrainConfig(**sections), taken.origins, tuple(taken.problems), taken.in_doubt())


class _Taken:
    """What was taken from a file and from flags, and what was not."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
        self.origins: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._unfit: set[str] = set()
        self._misspelt: set[str] = set()
        """Sections with a name in them that nobody knows: it may mean any setting that is not there."""

    def in_doubt(self) -> frozenset[str]:
        absent = {
            f"{section}.{name}"
            for section in self._misspelt
            for name in FIELD_TYPES[section]
            if name not in self.values[section]
        }
        return frozenset(self._unfit | absent)

    def _note(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))

    def take_file(self, path: str) -> None:
        document = _read(path, self.problems)
        if self.problems or not document.keys() <= SECTIONS.keys():
            self._misspelt.update(section for section in SECTIONS if section not in document)
        for section, table in document.items():
            if section not in SECTIONS:
                self._note(f"{path}: {section}", f"unknown section.{did_you_mean(section, SECTIONS)}")
            elif not isinstance(table, Mapping):
                self._note(f"{path}: {section}", f"expected a section of settings, got {shown(table)}.")
                self._misspelt.add(section)
            else:
                for name, value in table.items():
                    if path.endswith(".json") and (name, value) in WAS_DEFAULT:
                        continue
                    self._take(f"{path}: {section}.{name}", (section, str(name)), value, _from_document)
                    self.origins[f"{section}.{name}"] = "file"

    def take_override(self, override: Override) -> None:
        section, name = _field_path(override.flag)
        if section not in SECTIONS:
            self._note(override.flag, f"unknown section {section!r}.{did_you_mean(section, SECTIONS)}")
            self._misspelt.update(SECTIONS)
        elif not override.words and name in FIELD_TYPES[section]:
            self._note(override.flag, f"has no value: expected {_expected(FIELD_TYPES[section][name])}.")
            self._unfit.add(f"{section}.{name}")
        else:
            self._take(override.flag, (section, name), override.words, _from_words)
            self.origins[f"{section}.{name}"] = "flag"

    def _take(
        self, where: str, path: tuple[str, str], value: object, convert: Callable[[object, object], object]
    ) -> None:
        """Convert one value into its place, or say why it does not fit."""
        section, name = path
        kinds = FIELD_TYPES[section]
        if name not in kinds:
            if name in GONE:
                self._note(where, f"is gone: {GONE[name]}.")
            else:
                self._note(where, f"unknown setting.{did_you_mean(name, kinds)}")
                self._misspelt.add(section)
            return
        try:
            self.values[section][name] = convert(kinds[name], value)
        except _Unfit as unfit:
            self._note(where, f"{unfit}{gone_value(name, _as_text(value))}")
            self._unfit.add(f"{section}.{name}")


def shipped_configs() -> dict[str, Path]:
    """The config files of this package by name: `tiny`, `moe` ..., which stand for them on the command line."""
    return {file.stem: file for file in sorted(_SHIPPED.glob("*.toml"))}


def _read(path: str, problems: list[Problem]) -> Mapping[str, object]:
    """The file, or the config of this package that is called so, as a nested mapping; empty, with a problem noted, when it
    cannot be read."""
    file = Path(path)
    shipped = shipped_configs()
    if path in shipped and not file.is_file():
        file = shipped[path]
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = "there is no such file. Without a file, every setting has its default."
        if file.name == path and not file.suffix:
            what = f"no config of layerwise has this name, and {what}{did_you_mean(path, shipped)}"
        problems.append(Problem(path, what))
        return {}
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        problems.append(Problem(repr(path), f"cannot be read as text: {error}."))
        return {}
    is_json = path.endswith(".json")
    try:
        document: object = json.loads(text) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested brackets
        problems.append(Problem(path, f"is not valid {'JSON' if is_json else 'TOML'}: {error}."))
        return {}
    if not isinstance(document, Mapping):
        problems.append(Problem(path, f"expected an object of sections, got {shown(document)}."))
        return {}
    return document


# -- one value -------------------------------------------------------------------------------------


def _from_document(kind: object, value: object) -> object:
    """A value of a TOML or JSON document as `kind`; files are typed, so a quoted number is a mistake."""
    if _is_optional(kind):
        if value is None or (isinstance(value, str) and value in _NONE_WORDS):  # TOML has no null of its own
            return None
        return _from_document(_inner(kind), value)
    if _is_bool_or_word(kind):
        return value if isinstance(value, bool) else _choice(kind, value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return _finite(value)
    if kind is str and isinstance(value, str):
        return value
    if get_origin(kind) is Literal:
        return _choice(kind, value)
    if get_origin(kind) is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return _tuple(kind, value, _from_document)
    raise _Unfit(f"expected {_expected(kind)}, got {shown(value)}.")


def _from_words(kind: object, value: object) -> object:
    """Words of the command line as `kind`."""
    words = value if isinstance(value, tuple) else (value,)
    text = str(words[0]) if words else ""
    if _is_optional(kind):
        return None if text in _NONE_WORDS else _from_words(_inner(kind), value)
    if get_origin(kind) is tuple:
        parts = text.split(",") if len(words) == 1 else words
        return _tuple(kind, parts, _from_words)
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        return _choice(kind, text)
    if (kind is bool or _is_bool_or_word(kind)) and text.lower() in (*_TRUE_WORDS, *_FALSE_WORDS):
        return text.lower() in _TRUE_WORDS
    if _is_bool_or_word(kind):
        return _choice(kind, text)
    if kind in (int, float):
        try:
            return int(text) if kind is int else _finite(float(text))
        except _Unfit:
            raise
        except ValueError:
            pass  # said below, in our words
    raise _Unfit(f"expected {_expected(kind)}, got {shown(text)}.")


def _as_text(value: object) -> object:
    """The one word of a flag, or the value of a file."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _tuple(kind: object, parts: Sequence[object], convert: Callable[[object, object], object]) -> tuple[object, ...]:
    inner = get_args(kind)
    if len(parts) != len(inner):
        raise _Unfit(f"expected {_expected(kind)}, got {len(parts)}: {shown(list(parts))}.")
    return tuple(convert(item, part) for item, part in zip(inner, parts, strict=True))


def _choice(kind: object, value: object) -> object:
    choices = get_args(_word_of(kind) if _is_bool_or_word(kind) else kind)
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    # did_you_mean lists the choices when nothing is close, and they are listed here already
    close = hint if "Did you mean" in hint else ""
    raise _Unfit(f"expected {_expected(kind)}, got {shown(value)}.{close}")


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise _Unfit(f"expected a finite number, got {shown(value)}.")
    return number


def _is_optional(kind: object) -> bool:
    return isinstance(kind, types.UnionType) and type(None) in get_args(kind)


def _is_bool_or_word(kind: object) -> bool:
    """Whether a type is `bool | Literal[...]`."""
    return get_origin(kind) in (types.UnionType, Union) and bool in get_args(kind)


def _word_of(kind: object) -> object:
    return next(arg for arg in get_args(kind) if arg is not bool)


def _inner(kind: object) -> object:
    return next(arg for arg in get_args(kind) if arg is not type(None))


def _expected(kind: object) -> str:
    """A type in words."""
    if _is_optional(kind):
        return f"{_expected(_inner(kind))} or none"
    if _is_bool_or_word(kind):
        return f"true, false or {' or '.join(get_args(_word_of(kind)))}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is tuple:
        return f"{len(get_args(kind))} numbers"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}[kind]  # type: ignore[index]


# -- writing it down -------------------------------------------------------------------------------


def dump_json(config: TrainConfig) -> str:
    """Every setting with its value; `load` reads it back to an equal config."""
    return json.dumps(asdict(config), indent=2) + "\n"


def dump_toml(loaded: Loaded) -> str:
    """The config as a TOML file, each line with its origin; `load` reads it back to an equal config."""
    lines: list[str] = []
    for section, kind in SECTIONS.items():
        lines.append(f"[{section}]")
        record = getattr(loaded.config, section)
        for item in fields(kind):
            setting = f"{item.name} = {_toml(getattr(record, item.name))}"
            origin = loaded.origin_by_path.get(f"{section}.{item.name}", "default")
            lines.append(f"{setting:<40} # {origin}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # JSON writes numbers, booleans and strings as TOML does, but for DEL, which TOML wants escaped too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

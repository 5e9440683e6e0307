"""A recorded routing: where every param goes and how it splits, in a file that a run can pin.

Defaults may learn more with time, and then say something else. A run that is pinned goes by its file, and a model that the
file does not describe is refused. Params that differ in their layer number alone share a line:

    {"format": "layerwise routing 1",
     "params": [{"names": ["model.layers.*.attn.qkv.weight"], "count": 32, "shape": [12288, 4096], "family": "matrix",
                 "split": {"grid": [3, 4096, 4096], "roles": "arc"}, "reason": "..."}]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerwise.errors import ConfigError, Problem, listed
from layerwise.routing.defaults import Family
from layerwise.routing.matrices import matrices_of
from layerwise.routing.refusals import starred
from layerwise.routing.rules import Route
from layerwise.routing.spec import ParamSpec, ParamTable
from layerwise.routing.split import Split

_FORMAT = "layerwise routing 1"


@dataclass(frozen=True, slots=True)
class Line:
    """What the file says of one param, or of all params of a kind."""

    shape: tuple[int, ...]
    family: Family
    split: Split | None
    reason: str
    count: int


@dataclass(frozen=True)
class Recorded:
    """A routing file that was read."""

    where: str
    lines: Mapping[str, Line]
    """By name, with stars for the numbers of layers where a line is for all of them."""

    def route(self, param: ParamSpec) -> Route | None:
        """Where the file sends a param; None if it says nothing of it."""
        line = self.lines.get(param.fqn) or self.lines.get(starred(param.fqn))
        if line is None or line.shape != param.shape:
            return None
        reason = f"{line.reason} (as recorded in {self.where})"
        if line.family != "matrix":
            return Route(family=line.family, reason=reason)
        return Route(family="matrix", reason=reason, matrices=matrices_of(param, line.split), split=line.split)

    def check(self, table: ParamTable) -> None:
        """Raise unless the file describes exactly the trainable params of this model."""
        missing = [param.fqn for param in table if param.trainable and self.route(param) is None]
        counts = dict.fromkeys(self.lines, 0)
        for param in table:
            name = param.fqn if param.fqn in self.lines else starred(param.fqn)
            if param.trainable and name in counts:
                counts[name] += 1
        gone = [name for name, line in self.lines.items() if counts[name] != line.count]
        if missing or gone:
            parts = [f"it says nothing of {listed(missing)} in this shape"] if missing else []
            parts += [f"it has {listed(gone)}, of which the model has more or fewer"] if gone else []
            raise ValueError(
                f"the recorded routing {self.where!r} is not of this model: {'; '.join(parts)}. Record it anew: layerwise inspect "
                "MODEL --record FILE."
            )


def routing_to_json(table: ParamTable, routes: Mapping[str, Route]) -> str:
    """The routes of a model as a file, read back by `read_routing` to the same routes."""
    groups: dict[tuple[object, ...], list[ParamSpec]] = {}
    kinds: dict[str, set[tuple[object, ...]]] = {}
    for param in table:
        if param.trainable:
            route = routes[param.fqn]
            kind = (starred(param.fqn), param.shape, route.family, route.split, route.reason)
            groups.setdefault(kind, []).append(param)
            kinds.setdefault(starred(param.fqn), set()).add(kind)
    params = []
    for (name, shape, family, split, reason), members in groups.items():
        is_alone = len(kinds[str(name)]) == 1
        params.append(
            {
                "names": [name] if is_alone else [param.fqn for param in members],
                "count": len(members) if is_alone else 1,
                "shape": shape,
                "family": family,
                **({"split": split.to_json()} if isinstance(split, Split) else {}),
                "reason": reason,
            }
        )
    lines = ",\n  ".join(json.dumps(line) for line in params)
    return f'{{"format": {json.dumps(_FORMAT)},\n "params": [\n  {lines}\n ]}}\n'


def read_routing(path: str | Path) -> Recorded:
    """A file that `routing_to_json` wrote. What is wrong with it is said in one error."""
    where = str(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([Problem(where, "there is no such file.")]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError([Problem(where, f"cannot be read as JSON: {error}.")]) from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ConfigError([Problem(where, f"is no recorded routing: expected a file of format {_FORMAT!r}.")])
    lines: dict[str, Line] = {}
    for number, entry in enumerate(document.get("params", ()), start=1):
        try:
            lines.update(dict.fromkeys(entry["names"], _line(entry)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError([Problem(f"{where}: params {number}", f"cannot be read: {error!r}.")]) from None
    return Recorded(where, lines)


def is_recorded(path: str) -> bool:
    """Whether a file holds a recorded routing, and not rules: JSON begins with a brace, TOML cannot. False for a path that
    cannot be read, which `read_rules` says."""
    try:
        return Path(path).read_text(encoding="utf-8").lstrip().startswith("{")
    except (OSError, ValueError):
        return False


def _line(entry: dict[str, Any]) -> Line:
    family: Family = entry["family"]
    if family not in ("matrix", "other"):
        raise ValueError(f"family is {family!r}, expected 'matrix' or 'other'")
    split = entry.get("split")
    if split is not None:
        blocks = tuple(split.get("blocks", ()))
        split = Split(
            grid=tuple(split["grid"]), roles=split["roles"], block_axis=split.get("block_axis", 0), blocks=blocks
        )
    return Line(tuple(entry["shape"]), family, split, str(entry["reason"]), int(entry["count"]))

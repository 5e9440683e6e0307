"""Whether a checkpoint fits a model: what is missing, what is left over, what has another shape or rule. All of it at once, before
anything is written, and nothing of it silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from layerwise.checkpoint.bare import BareModule
from layerwise.checkpoint.contents import FROZEN, MASTER, MODEL, STATE, Contents, ParamFacts, Part, state_key
from layerwise.checkpoint.manifest import Manifest
from layerwise.config.rules import RULES_BY_KIND
from layerwise.errors import CheckpointError, did_you_mean

_MOST_PROBLEMS = 30


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do about a checkpoint that is of a somewhat different model. Patterns are globs over names of params."""

    rename: Mapping[str, str] = field(default_factory=dict)
    """From names in the checkpoint, or what they begin with, to names in the model."""
    missing: Sequence[str] = ()
    """Params and buffers that may be missing: they keep the values that they have, and new state."""
    unused: Sequence[str] = ()
    """Of the checkpoint, what the model may do without."""
    reset: Sequence[str] = ()
    """Params whose optimizer state starts anew, because their rule or split has changed."""


class Read(NamedTuple):
    """What goes where."""

    key: str
    """In the checkpoint."""
    part: Part


class _Names:
    """The checkpoint's params by the names that they have in the model."""

    def __init__(self, manifest: Manifest, policy: Policy) -> None:
        self.facts = _facts_of(manifest)
        self._policy = policy
        self._theirs: dict[str, str] = {}
        for name, said in self.facts.items():
            for known in (*said.aliases, name):
                self._theirs[self._renamed(known)] = name

    def _renamed(self, name: str) -> str:
        for old, new in self._policy.rename.items():
            if name == old:
                return new
            if name.startswith(old.rstrip(".") + "."):
                return new.rstrip(".") + name[len(old.rstrip(".")) :]
        return name

    def theirs(self, name: str) -> str:
        """The checkpoint's name of what the model calls so."""
        return self._theirs.get(name, name)

    def known(self) -> list[str]:
        return sorted(self._theirs)


def _facts_of(manifest: Manifest) -> dict[str, ParamFacts]:
    """What the checkpoint says of params; nobody has looked at it yet."""
    said = manifest.about.get("params", {})
    try:
        found = {name: ParamFacts(*facts) for name, facts in said.items()}
        right = all(
            isinstance(facts.rule, str)
            and isinstance(facts.split, list)
            and all(isinstance(alias, str) for alias in facts.aliases)
            for facts in found.values()
        )
    except (AttributeError, TypeError):
        right = False
    if not right:
        raise CheckpointError(
            "what the checkpoint says of params is malformed: expected shape, rule, split and aliases."
        )
    return found


def fit(contents: Contents | BareModule, manifest: Manifest, policy: Policy) -> list[Read]:
    """Everything that is to be read on this rank. Raises with all problems, unless the policy says what to do; those of a
    param are the same whoever has it."""
    fitting = _Fitting(contents, manifest, policy)
    problems = list(fitting.problems())
    if problems:
        shown = "\n".join(f"  {number}. {text}" for number, text in enumerate(problems[:_MOST_PROBLEMS], start=1))
        more = f"\n  and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise CheckpointError(
            f"the checkpoint does not fit the model ({len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was "
            f"changed):\n{shown}{more}\nrename=, missing=, unused= and reset= say what to do about such differences."
        )
    return [read for read in fitting.reads() if _is_alike(manifest, read)]


def _is_alike(manifest: Manifest, read: Read) -> bool:
    """Raise unless a tensor is what it is to be read into; a chunk of another one would be written before that shows."""
    entry, part = manifest.entries.get(read.key), read.part
    if entry is None:
        raise CheckpointError(f"{read.key!r} is missing in the checkpoint.")
    theirs, mine = _kind_of(getattr(torch, entry.dtype)), _kind_of(part.tensor.dtype)
    if entry.shape != part.shape or theirs != mine:
        raise CheckpointError(
            f"{read.key!r} has the shape {entry.shape} and is {theirs} in the checkpoint, expected {part.shape} and {mine}."
        )
    return True


def _kind_of(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating point" if dtype.is_floating_point else str(dtype)


class _Fitting:
    def __init__(self, contents: Contents | BareModule, manifest: Manifest, policy: Policy) -> None:
        self._contents, self._entries, self._policy = contents, manifest.entries, policy
        self._names = _Names(manifest, policy)
        self._params = contents.facts()
        self._buffers = {name: shape for name, shape in contents.constant_shapes().items() if name not in self._params}
        self._takes_state: set[str] = set()

    def problems(self) -> Iterator[str]:
        for name, mine in self._params.items():
            yield from self._weight_problems(name, tuple(mine.shape))
            if self._contents.optimizer is not None and not self._may_miss(name):
                yield from self._state_problems(name, mine)
        for name, shape in self._buffers.items():
            yield from self._weight_problems(name, shape)
        yield from self._leftovers()

    def _weight_problems(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        key = f"{MODEL}.{self._names.theirs(name)}"
        entry = self._entries.get(key)
        if entry is None:
            if not self._may_miss(name):
                yield f"{name!r} is missing in the checkpoint.{did_you_mean(name, self._names.known())}"
        elif entry.shape != shape:
            yield f"{name!r} has the shape {entry.shape} in the checkpoint, expected {shape}."

    def _state_problems(self, name: str, mine: ParamFacts) -> Iterator[str]:
        """What keeps a param from going on with the state that it had."""
        said = self._names.facts.get(self._names.theirs(name))
        if _matches(name, self._policy.reset) or f"{MODEL}.{self._names.theirs(name)}" not in self._entries:
            return
        if said is None:
            if mine.rule != FROZEN:
                yield f"{name!r} has no optimizer state in the checkpoint: it was no param."
        elif said.rule == mine.rule == FROZEN:
            return
        elif mine.rule == FROZEN:
            if said.rule:
                yield f"{name!r} has optimizer state in the checkpoint (of {said.rule!r}), and is frozen here."
        elif said.rule in ("", FROZEN):
            why = "it was frozen" if said.rule else "it was saved without an optimizer"
            yield f"{name!r} has no optimizer state in the checkpoint: {why}."
        elif said.rule != mine.rule:
            yield f"{name!r} was updated by {said.rule!r}, and is by {mine.rule!r} here: its state is of another kind."
        elif said.split != mine.split:
            yield f"{name!r} was split into the matrices {said.split}, and is into {mine.split} here: homes keep state of others."
        else:
            self._takes_state.add(name)
            for kind in RULES_BY_KIND[mine.rule].state_names:
                key = state_key(self._names.theirs(name), kind)
                if key not in self._entries:
                    yield f"{key!r} is missing in the checkpoint."

    def _leftovers(self) -> Iterator[str]:
        """What of the checkpoint nobody has any use for. With several stages nobody here knows: what one misses it finds
        itself."""
        if len(self._contents.groups.stages) > 1:
            return
        have = {self._names.theirs(name) for name in (*self._params, *self._buffers)}
        for key in self._entries:
            name = key.removeprefix(f"{MODEL}.")
            if key.startswith(f"{MODEL}.") and name not in have and not _matches(name, self._policy.unused):
                yield f"{name!r} is in the checkpoint, and the model has no such param or buffer."

    def _may_miss(self, name: str) -> bool:
        """Whether what the checkpoint does not have is to stay as it is."""
        is_there = f"{MODEL}.{self._names.theirs(name)}" in self._entries
        return not is_there and _matches(name, self._policy.missing)

    def reads(self) -> Iterator[Read]:
        """Masters from masters, and from weights where those were the truth; everything else from what it was."""
        for name, part in self._contents.masters():
            theirs = self._names.theirs(name)
            master = state_key(theirs, MASTER)
            key = master if master in self._entries else f"{MODEL}.{theirs}"
            if key in self._entries:
                yield Read(key, part)
        for part in self._contents.constants():
            key = f"{MODEL}.{self._names.theirs(part.key.removeprefix(f'{MODEL}.'))}"
            if key in self._entries:
                yield Read(key, part)
        for part in (*self._contents.state(), *self._contents.home_state()):
            name, kind = _param_and_kind(part.key, self._params)
            if kind != MASTER and name in self._takes_state:
                yield Read(state_key(self._names.theirs(name), kind), part)


def _param_and_kind(key: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """The param that a key of the optimizer's state is of, and what it is."""
    name = key.removeprefix(f"{STATE}.")
    kind: list[str] = []
    while name not in params:
        name, _, last = name.rpartition(".")
        kind.insert(0, last)
    return name, ".".join(kind)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

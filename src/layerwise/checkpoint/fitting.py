"""Whether a checkpoint fits a model: what is missing, what is left over, what has another shape or rule. All of it at once, before
anything is written, and nothing of it silently."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from layerwise.checkpoint.bare import BareModule
from layerwise.checkpoint.contents import FROZEN, MASTER, MODEL, STATE, Contents, ParamFacts, Part, state_key
from layerwise.checkpoint.manifest import Manifest
from layerwise.checkpoint.own import by_itself, own_key
from layerwise.config.rules import RULES_BY_KIND
from layerwise.errors import CheckpointError, a_few, did_you_mean, listed

LOSS_SCALE = "loss_scale"
_MOST_PROBLEMS = 30
_BUFFER = ParamFacts([], FROZEN, [], [])
"""What is said of buffers."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do about a checkpoint that is of a somewhat different model. Patterns are globs over names of params."""

    rename: Mapping[str, str] = field(default_factory=dict)
    """From names in the checkpoint, or what they begin with, to names in the model."""
    missing: Sequence[str] = ()
    """Params and buffers that may be missing, or of another shape: they keep the values that they have, and new state."""
    unused: Sequence[str] = ()
    """Of the checkpoint, what the model may do without."""
    reset: Sequence[str] = ()
    """Params whose optimizer state starts anew, because their rule or split has changed; "loss_scale" where only one side
    has one."""

    def __post_init__(self) -> None:
        if not isinstance(self.rename, Mapping):
            raise TypeError(f"rename must be a dict from old names to new ones, got {self.rename!r}.")
        for name in ("missing", "unused", "reset"):
            if isinstance(getattr(self, name), str):
                raise TypeError(
                    f"{name} must be a list of patterns, got {getattr(self, name)!r}: expected {name}=[...]."
                )

    def facts(self) -> dict[str, object]:
        """As plain data: the same on every rank."""
        lists = {name: list(getattr(self, name)) for name in ("missing", "unused", "reset")}
        return {"rename": dict(self.rename), **lists}


class Read(NamedTuple):
    """What goes where."""

    key: str | None
    """In the checkpoint; None for state that starts anew."""
    part: Part


class Reads(NamedTuple):
    """Everything that is to be read."""

    model: list[Read]
    """Masters, and what is not trained. What forward reads follows when this is there."""
    state: list[Read]
    begun: dict[str, int]
    """After which step the state of each param of this rank began, by its name in the plan."""


class Names:
    """The checkpoint's params and buffers by the names that they have in the model."""

    def __init__(self, manifest: Manifest, policy: Policy) -> None:
        self.facts = _facts_of(manifest)
        self.weights = [key.removeprefix(f"{MODEL}.") for key in manifest.entries if key.startswith(f"{MODEL}.")]
        self._policy = policy
        others = {alias: name for name, said in self.facts.items() for alias in said.aliases}
        known = {**others, **{name: name for name in self.weights}}
        self._used: set[str] = set()
        called: dict[str, dict[str, str]] = {}
        for name, theirs in known.items():
            called.setdefault(self._renamed(name), {})[theirs] = name
        _refuse_shared({new: sorted(names.values()) for new, names in called.items() if len(names) > 1})
        self._theirs: dict[str, str] = {new: theirs for new, names in called.items() for theirs in names}

    def _renamed(self, name: str) -> str:
        for old, new in self._policy.rename.items():
            if name == old or name.startswith(old.rstrip(".") + "."):
                self._used.add(old)
                return new if name == old else new.rstrip(".") + name[len(old.rstrip(".")) :]
        return name

    def idle_renames(self) -> list[str]:
        """What `rename` names in vain."""
        return [old for old in self._policy.rename if old not in self._used]

    def theirs(self, name: str) -> str:
        """The checkpoint's name of what the model calls so; empty where it has no such thing."""
        return self._theirs.get(name, "")


def _refuse_shared(twice: Mapping[str, Sequence[str]]) -> None:
    """Raise if things of the checkpoint would share a name, before anything is said of what has which: one of them would be taken
    for the other."""
    pairs = [
        f"'{_shown(one)}' and '{_shown(other)}' would both be '{_shown(new)}'"
        for new, (one, other, *_) in sorted(twice.items())
    ]
    if pairs:
        raise CheckpointError(
            f"rename= gives one name to two things of the checkpoint: {a_few(pairs)}. Nothing was changed. "
            "Give each a name of its own. To leave one out, rename it to what the model does not have, and list it in unused=."
        )


def _facts_of(manifest: Manifest) -> dict[str, ParamFacts]:
    """What the checkpoint says of params; nobody has looked at it yet."""
    said = manifest.about.get("params", {})
    try:
        found = {name: ParamFacts(*facts) for name, facts in said.items()}
        right = all(
            isinstance(facts.rule, str)
            and all(len(matrix) == 4 and isinstance(matrix[2], list) for matrix in facts.split)
            and all(isinstance(alias, str) for alias in facts.aliases)
            and type(facts.begun) is int
            and 0 <= facts.begun <= manifest.step
            for facts in found.values()
        )
    except (AttributeError, KeyError, TypeError):
        right = False
    if not right:
        raise CheckpointError(
            "what the checkpoint says of params is malformed: expected shape, rule, split, aliases and a step."
        )
    return found


def fit(
    contents: Contents | BareModule,
    manifest: Manifest,
    policy: Policy,
    elsewhere: Collection[str] = (),
    has_own: bool = False,
) -> Reads:
    """Everything that is to be read on this rank. Raises with all problems, unless the policy says what to do; those of a
    param are the same whoever has it. `elsewhere` names what only other ranks have; with `has_own` ranks go on with the buffers
    that were each one's own."""
    fitting = _Fitting(contents, manifest, policy, elsewhere, has_own)
    problems = list(fitting.problems())
    if problems:
        shown = "\n".join(f"  {number}. {text}" for number, text in enumerate(problems[:_MOST_PROBLEMS], start=1))
        more = f"\n  and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
        raise CheckpointError(
            f"the checkpoint does not fit the model ({len(problems)} problem{'s' if len(problems) > 1 else ''}; nothing was "
            f"changed):\n{shown}{more}\nrename=, missing=, unused= and reset= say what to do about such differences."
        )
    found = Reads(list(fitting.of_model()), list(fitting.of_state()), fitting.begun())
    for read in (*found.model, *found.state):
        _check_alike(manifest, read)
    return found


def _check_alike(manifest: Manifest, read: Read) -> None:
    """Raise unless a tensor is what it is to be read into; a chunk of another one would be written before that shows."""
    part = read.part
    if read.key is None:
        return
    entry = manifest.entries.get(read.key)
    if entry is None:
        raise CheckpointError(f"{read.key!r} is missing in the checkpoint.")
    theirs, mine = _kind_of(getattr(torch, entry.dtype)), _kind_of(part.tensor.dtype)
    if entry.shape != part.shape or theirs != mine:
        raise CheckpointError(
            f"{read.key!r} has the shape {entry.shape} and is {theirs} in the checkpoint, expected {part.shape} and {mine}."
        )


def _kind_of(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating point" if dtype.is_floating_point else str(dtype)


class _Fitting:
    def __init__(
        self,
        contents: Contents | BareModule,
        manifest: Manifest,
        policy: Policy,
        elsewhere: Collection[str],
        has_own: bool,
    ) -> None:
        self._has_own = has_own
        self._contents, self._entries, self._policy = contents, manifest.entries, policy
        self._about, self._step = manifest.about, manifest.step
        self._names = Names(manifest, policy)
        self._params = contents.facts()
        self._buffers = {name: shape for name, shape in contents.constant_shapes().items() if name not in self._params}
        self._known = (*self._params, *self._buffers, *elsewhere)
        have = {self._names.theirs(name) for name in self._known}
        self._unclaimed = [name for name in self._names.weights if name not in have]
        self._takes_state: set[str] = set()

    def problems(self) -> Iterator[str]:
        for name, mine in self._params.items():
            problem = self._weight_problem(name, tuple(mine.shape))
            if problem is not None:
                yield problem
            elif self._contents.optimizer is not None and self._is_there(name, tuple(mine.shape)):
                yield from self._state_problems(name, mine)
        for name, shape in self._buffers.items():
            problem = self._weight_problem(name, shape)
            if problem is not None:
                yield problem
            elif self._contents.optimizer is not None:
                yield from self._state_problems(name, ParamFacts(list(shape), FROZEN, [], []))
        for name in self._unclaimed:
            if not _matches(name, self._policy.unused):
                yield f"'{_shown(name)}' is in the checkpoint, and the model has no such param or buffer."
        yield from self._scale_problems()
        yield from self._idle_problems()

    def _idle_problems(self) -> Iterator[str]:
        """What was asked for and comes to nothing: nobody means that."""
        for old in self._names.idle_renames():
            yield f"rename= has {old!r}, and nothing in the checkpoint is called so or begins so.{did_you_mean(old, self._names.weights)}"
        for pattern in self._policy.reset if self._contents.optimizer is not None else ():
            if not any(_matches(name, (pattern,)) for name in (*self._known, LOSS_SCALE)):
                yield f"reset= has {pattern!r}, which matches no param.{did_you_mean(pattern, self._known)}"

    def _is_there(self, name: str, shape: tuple[int, ...]) -> bool:
        entry = self._entries.get(f"{MODEL}.{self._names.theirs(name)}")
        return entry is not None and entry.shape == shape

    def _weight_problem(self, name: str, shape: tuple[int, ...]) -> str | None:
        entry = self._entries.get(f"{MODEL}.{self._names.theirs(name)}")
        if self._is_there(name, shape) or _matches(name, self._policy.missing):
            return None
        if entry is None:
            return f"{name!r} is missing in the checkpoint.{did_you_mean(name, map(_shown, self._unclaimed))}"
        return f"{name!r} has the shape {entry.shape} in the checkpoint, expected {shape}."

    def _state_problems(self, name: str, mine: ParamFacts) -> Iterator[str]:
        """What keeps a param from going on with the state that it had."""
        said = self._names.facts.get(self._names.theirs(name), _BUFFER)
        if _matches(name, self._policy.reset) or said.rule == mine.rule == FROZEN:
            return
        if mine.rule == FROZEN:
            if said.rule:
                yield f"{name!r} has optimizer state in the checkpoint (of {said.rule!r}), and is not trained here."
        elif said.rule in ("", FROZEN):
            why = "it was not trained" if said.rule else "it was saved without an optimizer"
            yield f"{name!r} has no optimizer state in the checkpoint: {why}."
        elif said.rule != mine.rule:
            yield f"{name!r} was updated by {said.rule!r}, and is by {mine.rule!r} here: its state is of another kind."
        elif said.split != mine.split:
            yield f"{name!r} was split into {_matrices(said, mine)}, and is into {_matrices(mine, said)} here: homes keep state of others."
        else:
            self._takes_state.add(name)
            for kind in RULES_BY_KIND[mine.rule].state_names:
                key = state_key(self._names.theirs(name), kind)
                if key not in self._entries:
                    yield f"{key!r} is missing in the checkpoint."

    def _scale_problems(self) -> Iterator[str]:
        optimizer, scale = self._contents.optimizer, self._about.get("loss_scale")
        if optimizer is None or not self._about.get("has_optimizer") or _matches(LOSS_SCALE, self._policy.reset):
            return
        if (scale is None) != (optimizer.stepper.scaler is None):
            has, lacks = ("optimizer", "checkpoint") if scale is None else ("checkpoint", "optimizer")
            yield f"the {has} has a loss scale, and the {lacks} has none: name {LOSS_SCALE!r} in reset= to go on all the same."

    def of_model(self) -> Iterator[Read]:
        """Masters from masters, and from weights where those were the truth; everything else from what it was."""
        for name, part in self._contents.masters():
            theirs = self._names.theirs(name)
            master = state_key(theirs, MASTER)
            key = master if master in self._entries else f"{MODEL}.{theirs}"
            if self._is_there(name, part.shape):
                yield Read(key, part)
        for part in self._contents.constants():
            name = part.key.removeprefix(f"{MODEL}.")
            if self._is_there(name, part.shape):
                key, rank = f"{MODEL}.{self._names.theirs(name)}", self._contents.groups.rank
                own = self._has_own and own_key(key, rank) in self._entries
                yield Read(own_key(key, rank), by_itself(part, rank)) if own else Read(key, part)

    def begun(self) -> dict[str, int]:
        """Where state starts anew, after the step of the checkpoint."""
        if not isinstance(self._contents, Contents):
            return {}
        found = {}
        for fqn in self._contents.rules:
            name = self._contents.name_of(fqn)
            said = self._names.facts.get(self._names.theirs(name), _BUFFER)
            found[fqn] = said.begun if name in self._takes_state else self._step
        return found

    def of_state(self) -> Iterator[Read]:
        """State that has nothing to go on from starts anew, whatever was there."""
        for part in (*self._contents.state(), *self._contents.home_state()):
            name, kind = _param_and_kind(part.key, self._params)
            if kind != MASTER:
                key = state_key(self._names.theirs(name), kind)
                yield Read(key if name in self._takes_state else None, part)


def _shown(name: str) -> str:
    """A name of the checkpoint as it may be printed: it may have been made to write over a terminal, or to fill it."""
    return repr(name[:200])[1:-1]


def _matrices(mine: ParamFacts, other: ParamFacts) -> str:
    """The matrices that a param breaks into: their shapes, and where they lie where those are the same."""
    shapes = [f"{rows} x {cols}" for rows, cols, *_ in mine.split]
    if [matrix[:2] for matrix in mine.split] == [matrix[:2] for matrix in other.split]:
        shapes = [f"{text} from {tuple(starts)}" for text, (_, _, starts, _) in zip(shapes, mine.split, strict=True)]
    return listed(shapes, 6)


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

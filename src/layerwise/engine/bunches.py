"""What is updated together: runs of one param group whose state is of one age."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from layerwise.config.rules import Rule
from layerwise.engine.param_groups import GroupPlan
from layerwise.engine.runs import Run, pieces, runs_of
from layerwise.kernels.lists import Kept, Tensors
from layerwise.memory.parts import UpdateParts
from layerwise.memory.shards import Shard


class Bunch(NamedTuple):
    """Runs of a param group that rules see at once."""

    kind: str
    """Of its rule."""
    group: int
    begun: int
    """The step after which its state began."""
    runs: list[Run]
    masters: Tensors
    states: Mapping[str, list[Tensor]]
    parts: UpdateParts
    """These two without what goes to batches directly."""


def bunches_of(
    groups: Sequence[GroupPlan],
    shards: Iterable[Shard],
    begun: Mapping[str, int],
    direct: Iterable[Run],
    *,
    stay: bool,
) -> list[Bunch]:
    """Params of one group whose state began after the same step; matrix rules do not ask when. What is `direct` goes to batches."""
    taken: dict[Shard, list[slice]] = {}
    for run in direct:
        taken.setdefault(run.shard, []).append(slice(run.start, run.stop))
    key_of = {
        fqn: (index, 0 if group.rule.is_matrix_rule else begun.get(fqn, 0))
        for index, group in enumerate(groups)
        for fqn in group.fqns
    }
    keys = sorted(set(key_of.values()))
    number_of = {fqn: keys.index(key) for fqn, key in key_of.items()}
    runs = [run for shard in shards for run in runs_of(shard, number_of)]
    found = []
    for number, (index, since) in enumerate(keys):
        own, rule = [run for run in runs if run.group == number], groups[index].rule
        left = [
            piece
            for run in own
            for piece in pieces(run, [part for part in taken.get(run.shard, ()) if run.start <= part.start < run.stop])
        ]
        masters = Kept(run.of(run.shard.master) for run in own)
        found.append(Bunch(rule.kind, index, since, own, masters, states_of(rule, left), parts_of(left, stay=stay)))
    return found


def states_of(rule: Rule, runs: Iterable[Run]) -> dict[str, list[Tensor]]:
    """What a rule keeps of these runs, by name."""
    runs = list(runs)
    return {name: Kept(run.of(run.shard.state[name]) for run in runs) for name in rule.state_names}


def parts_of(runs: Iterable[Run], *, stay: bool) -> UpdateParts:
    """Where their gradients are; `stay`: the same in every step."""
    return UpdateParts(((run.shard, slice(run.start, run.stop)) for run in runs), stay=stay)

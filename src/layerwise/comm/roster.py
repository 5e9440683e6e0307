"""What pipeline stages have to know of each other before they plan: who trains what, which weights are copies of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerwise.buffers.bind import vocabulary_shapes
from layerwise.comm.groups import Groups, share
from layerwise.errors import PlanMismatchError, did_you_mean
from layerwise.layout.plan import Plan


@dataclass(frozen=True)
class Roster:
    """Facts about all stages, the same on every rank. Where there is one stage nothing is exchanged for it."""

    fqns: tuple[tuple[str, ...], ...]
    """Trainable params of every stage."""
    copies: Mapping[str, Mapping[int, str]]
    """Of each tied weight, the fqn of its copy on every stage that holds one."""
    vocabularies: frozenset[tuple[int, int]]
    """Shapes of the embeddings of any stage: a linear layer onto the rows of one is an output head, wherever it is."""

    @property
    def stages_by_tie(self) -> dict[str, tuple[int, ...]]:
        """The stages that hold a copy of each tied weight."""
        return {tie: tuple(sorted(copies)) for tie, copies in self.copies.items()}

    @classmethod
    def of(
        cls,
        groups: Groups,
        chunks: Sequence[nn.Module],
        trainables: Mapping[str, nn.Parameter],
        ties: Mapping[str, str],
    ) -> Roster:
        if len(groups.stages) == 1:
            return cls((tuple(trainables),), {}, frozenset(vocabulary_shapes(*chunks)))

        def mine() -> dict[str, Any]:
            facts = {
                "fqns": list(trainables),
                "ties": _describe_ties(ties, trainables),
                "vocabularies": sorted(vocabulary_shapes(*chunks)),
            }
            # One rank speaks for its stage: the others will have to plan the same.
            return facts if groups.rank == min(groups.stages[groups.stage]) else {}

        gathered: list[Any] = share(groups, mine)
        stages = [gathered[min(ranks)] for ranks in groups.stages]
        return cls(
            fqns=tuple(tuple(stage["fqns"]) for stage in stages),
            copies=_copies([stage["ties"] for stage in stages]),
            vocabularies=frozenset((rows, cols) for stage in stages for rows, cols in stage["vocabularies"]),
        )

    def check_cuts(self, groups: Groups, plan: Plan) -> None:
        """Raise on every rank unless all stages cut a tied weight alike: its shards are summed place by place."""
        if not self.copies:
            return
        cuts = {
            bucket.tie: [plan.buffers[bucket.buffer].key.layout, bucket.num_shards, bucket.numel, list(bucket.borders)]
            for bucket in plan.buckets
            if bucket.tie
        }
        gathered: list[Any] = share(groups, lambda: cuts)
        for tie, copies in self.copies.items():
            first, *others = ((stage, gathered[min(groups.stages[stage])].get(tie)) for stage in sorted(copies))
            for other in others:
                if other[1] != first[1]:
                    raise PlanMismatchError(
                        f"tie {tie!r} is stored as {_cut_in_words(first[1])} on stage {first[0]} and as "
                        f"{_cut_in_words(other[1])} on stage {other[0]}: expected the same. Give all stages the same layout, "
                        "reducer and rules."
                    )


def _cut_in_words(cut: Sequence[Any] | None) -> str:
    if cut is None:
        return "a part of a bucket that others share"
    layout, num_shards, numel, borders = cut
    return f"{layout}, {numel} elements in {num_shards} shards" + (f" at {borders}" if borders else "")


def _describe_ties(ties: Mapping[str, str], params: Mapping[str, nn.Parameter]) -> dict[str, dict[str, object]]:
    """What other stages have to know of this stage's copies."""
    found: dict[str, dict[str, object]] = {}
    for tie, fqn in ties.items():
        param = params.get(fqn)
        if param is None:
            raise ValueError(
                f"tie {tie!r} names {fqn!r}, which is no trainable param of this stage." + did_you_mean(fqn, params)
            )
        found[tie] = {"fqn": fqn, "shape": list(param.shape), "dtype": str(param.dtype)}
    return found


def _copies(described: Sequence[Mapping[str, Mapping[str, object]]]) -> dict[str, dict[int, str]]:
    """The copies of each tied weight, from what every stage says of its own."""
    found: dict[str, dict[int, Mapping[str, object]]] = {}
    for stage, ties in enumerate(described):
        for tie, copy in ties.items():
            found.setdefault(tie, {})[stage] = copy
    for tie, copies in found.items():
        if len(copies) < 2:
            (stage, copy), *_ = copies.items()
            raise ValueError(
                f"tie {tie!r} is on stage {stage} only ({copy['fqn']!r}, of {len(described)} stages): expected a copy on "
                "another one. Name it in ties= of both."
            )
        (first, one), *others = copies.items()
        for stage, other in others:
            for name in ("shape", "dtype"):
                if one[name] != other[name]:
                    raise ValueError(
                        f"tie {tie!r} has {name} {one[name]} on stage {first} ({one['fqn']!r}) and {other[name]} on stage "
                        f"{stage} ({other['fqn']!r}): copies of one weight must be alike."
                    )
    return {tie: {stage: str(copy["fqn"]) for stage, copy in copies.items()} for tie, copies in found.items()}

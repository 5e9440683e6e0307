"""What pipeline stages have to know of each other before they plan: who trains what, which weights are copies of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from layerwise.comm.groups import Groups, derive_together, share
from layerwise.errors import PlanMismatchError, did_you_mean
from layerwise.layout.plan import Plan
from layerwise.models.table import domains_by_prefix, param_table, vocabulary_shapes
from layerwise.routing.rules import RouteRule, rules_in_use
from layerwise.routing.spec import EXPERT


@dataclass(frozen=True)
class Roster:
    """Facts about all stages, the same on every rank. Where there is one stage nothing is exchanged for it."""

    fqns: tuple[tuple[str, ...], ...]
    """Trainable params of every stage."""
    copies: Mapping[str, Mapping[int, str]]
    """Of each tied weight, the fqn of its copy on every stage that holds one."""
    vocabularies: frozenset[tuple[int, int]]
    """Shapes of the embeddings of any stage: a linear layer onto the rows of one is an output head, wherever it is."""
    has_experts: bool
    """Whether any stage has params of the expert domain."""
    rules: frozenset[str] = frozenset()
    """What routing rules look for that have params on any stage; nothing where there is one stage, which must have them."""

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
        frozen: Collection[str],
        ties: Mapping[str, str],
        rules: Sequence[RouteRule] | None = None,
    ) -> Roster:
        if len(groups.stages) == 1:
            return derive_together(
                groups,
                "modules",
                lambda: cls(
                    (tuple(trainables),), {}, frozenset(vocabulary_shapes(*chunks)), _has_experts(chunks, trainables)
                ),
                lambda roster: {},
            )

        def mine() -> dict[str, Any]:
            facts = {
                "fqns": list(trainables),
                "ties": _describe_ties(ties, trainables, frozen),
                "vocabularies": sorted(vocabulary_shapes(*chunks)),
                "experts": _has_experts(chunks, trainables),
            }
            # One rank speaks for its stage: the others will have to plan the same.
            return facts if groups.rank == min(groups.stages[groups.stage]) else {}

        gathered: list[Any] = share(groups, mine)
        stages = [gathered[min(ranks)] for ranks in groups.stages]
        vocabularies = frozenset((rows, cols) for stage in stages for rows, cols in stage["vocabularies"])

        def in_use() -> dict[str, Any]:
            table = param_table(*chunks, vocabularies=vocabularies, ties=ties)
            return {"rules": sorted(rules_in_use(table, rules))}

        found: list[Any] = share(groups, in_use)  # whoever has rules: each stage may have its own
        return cls(
            fqns=tuple(tuple(stage["fqns"]) for stage in stages),
            copies=_copies([stage["ties"] for stage in stages]),
            vocabularies=vocabularies,
            has_experts=any(stage["experts"] for stage in stages),
            rules=frozenset(label for theirs in found for label in theirs["rules"]),
        )


def check_alike(groups: Groups, roster: Roster, what: str, mine: Mapping[str, Mapping[str, str]]) -> None:
    """Raise on every rank unless all stages say the same of the copies of a tied weight: `mine` is what this one says of
    each of its own."""
    if not roster.copies:
        return
    gathered: list[Any] = share(groups, lambda: dict(mine))
    for tie, copies in roster.copies.items():
        (first, one), *others = ((stage, gathered[min(groups.stages[stage])].get(tie, {})) for stage in sorted(copies))
        for stage, other in others:
            for name in [*one, *other]:
                if one.get(name) != other.get(name):
                    raise PlanMismatchError(
                        f"tie {tie!r} {what} with {name} {one.get(name)} on stage {first} ({copies[first]!r}) and {other.get(name)} "
                        f"on stage {stage} ({copies[stage]!r}): copies of one weight must be alike. Give all stages the same "
                        "layout, rules and options for it."
                    )


def cuts_of_ties(plan: Plan) -> dict[str, dict[str, str]]:
    """How each tied weight is stored and routed, in words: its shards are summed place by place, and all of its copies
    must take the same update."""
    found = {}
    for bucket in plan.buckets:
        if bucket.tie:
            route = plan.routes[bucket.placements[0].fqn]
            found[bucket.tie] = {
                "layout": plan.buffers[bucket.buffer].key.layout,
                "elements": str(bucket.numel),
                "shards": str(bucket.shards.to_json()),
                "route": route.family,
                "matrices": str([(matrix.rows, matrix.cols) for matrix in route.matrices]),
                "options": str(dict(route.options)),
            }
    return found


def _has_experts(chunks: Sequence[nn.Module], trainables: Mapping[str, nn.Parameter]) -> bool:
    domain_of = domains_by_prefix(*chunks)
    return any(domain_of(fqn) == EXPERT for fqn in trainables)


def _describe_ties(
    ties: Mapping[str, str], params: Mapping[str, nn.Parameter], frozen: Collection[str]
) -> dict[str, dict[str, object]]:
    """What other stages have to know of this stage's copies."""
    found: dict[str, dict[str, object]] = {}
    for tie, fqn in ties.items():
        param = params.get(fqn)
        if fqn in frozen:
            raise ValueError(
                f"tie {tie!r} names {fqn!r}, which is frozen: expected a param that is trained on every stage."
            )
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

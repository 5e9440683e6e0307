"""Phase 2, stats: one pass over local shards, one all-reduce of one vector, and decisions that are functions of reduced
values only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate, compress, count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.comm.groups import share
from layerwise.engine.engine import Engine
from layerwise.engine.gradients import Divisors
from layerwise.engine.totals import Seen, Totals
from layerwise.kernels.stats import add_totals, count_zeros, square_sums, verdict_of
from layerwise.kernels.verdicts import Bounds
from layerwise.layout.schedule import CommOp, stats_op
from layerwise.layout.shards import OwnShards, speaks_for
from layerwise.layout.stats import HASH_WORDS, stats_sizes
from layerwise.memory.parts import UpdateParts
from layerwise.memory.shards import Shard

_WORD_BITS = 12
"""Bits per consistency word. Sums of squares of such words over up to 2^14 ranks stay exact in fp64."""


_COUNTED = 1 << 15
"""Above the number of ranks: three counts of them go as one number."""


class _Parts(NamedTuple):
    """Views of the vector that is reduced, in the order of `StatsSizes`, which says what they are."""

    groups: Tensor
    zeros: Tensor
    problems: Tensor
    scaled: Tensor
    unscaled: Tensor
    words: Tensor
    squared_words: Tensor
    late: Tensor
    missing: Tensor
    disagreeing: Tensor
    nonfinite: Tensor


class _Numbers(NamedTuple):
    """The same, read back."""

    groups: Sequence[float]
    zeros: Sequence[float]
    problems: Sequence[float]
    scaled: Sequence[float]
    unscaled: Sequence[float]
    words: Sequence[float]
    squared_words: Sequence[float]
    late: Sequence[float]
    missing: Sequence[float]
    disagreeing: Sequence[float]
    nonfinite: Sequence[float]


class StatsPass:
    """Collects and reduces the statistics of one step's gradients, over all ranks of all stages and domains.

    Every element of every gradient is counted once: by the rank that holds it, by the first where several hold copies, and
    by the first stage where several have a copy of the weight. The other copies are looked at too, for inf and NaN: one that
    only a single replica has would be taken there and nowhere else.
    """

    def __init__(
        self, engine: Engine, group_of: Mapping[str, str], named_groups: Collection[str], *, zeros: bool
    ) -> None:
        storage, groups = engine.storage, engine.groups
        self._communicator = engine.everyone
        self._zeros = zeros
        self._stage = groups.stage
        self._stage_sizes = [len(ranks) for ranks in groups.stages]
        self.names = sorted({"matrix", "other", *named_groups})
        self._entries = [(stage, fqn) for stage, fqns in enumerate(engine.roster.fqns) for fqn in sorted(fqns)]
        position = {fqn: index for index, (stage, fqn) in enumerate(self._entries) if stage == self._stage}
        self._position = position
        own = _own_facts(engine)
        group_position = {name: index for index, name in enumerate(self.names)}
        pairs = [(shard, span) for shard in storage.shards if _is_first_copy(shard, engine) for span in shard.spans]
        counts = [speaks_for(shard.plan, span, storage.ranks[shard.plan.domain]) for shard, span in pairs]
        self._device = storage.device
        ties = sorted(engine.roster.copies.items())
        self._tie_position = {tie: len(groups.stages) + index for index, (tie, _) in enumerate(ties)}
        # How many ranks send each hash.
        self._senders = [
            *self._stage_sizes,
            *(sum(self._stage_sizes[stage] for stage in copies) for _, copies in ties),
        ]
        self._sizes = stats_sizes(
            norm_groups=len(self.names),
            stages=len(groups.stages),
            ties=len(ties),
            params=len(self._entries),
            parted=sum(facts.is_voted for facts in own.values()),
        )
        self._groups = torch.tensor(
            [
                group_position[group_of[span.fqn]] if is_counted else -1
                for (_, span), is_counted in zip(pairs, counts, strict=True)
            ],
            dtype=torch.long,
            device=self._device,
        )
        self._updates = UpdateParts(((shard, span.part) for shard, span in pairs), stay=storage.keeps_updates)
        self._counted_updates = UpdateParts(
            ((shard, span.part) for (shard, span), is_counted in zip(pairs, counts, strict=True) if is_counted),
            stay=storage.keeps_updates,
        )
        # How many ranks hold any of each param. One that lies in buffers comes to all of its stage.
        self._everywhere = [
            float(own[entry].holders if entry in own else self._stage_sizes[entry[0]]) for entry in self._entries
        ]
        # Where ranks hold different experts under one name, one count is of several params.
        self._is_one = [entry not in own or not own[entry].is_apart for entry in self._entries]
        # Those of which every holder has the same, so that their counts tell it all.
        self._is_whole = [entry not in own or not own[entry].is_parted for entry in self._entries]
        self._voted = [index for index, entry in enumerate(self._entries) if entry in own and own[entry].is_voted]
        votes = {fqn: _vote(shard, fqn, engine) for shard in engine.plan.copied_in_parts for fqn in shard.fqns}
        self._votes = {fqn: (self._voted.index(position[fqn]), vote) for fqn, vote in votes.items()}
        self._params = torch.tensor([position[span.fqn] for _, span in pairs], dtype=torch.long, device=self._device)
        # Memory that the device reads and writes by itself: the host waits once, for what comes back.
        self._known, self._found = (
            torch.zeros(self.numel, dtype=torch.float64, pin_memory=self._device.type == "cuda", device="cpu")
            for _ in range(2)
        )
        self._known_parts = self._parts(self._known)
        self._known_part = slice(self._sizes.groups + self._sizes.zeros, self.numel - self._sizes.nonfinite)
        """What of the vector the host knows."""

    @property
    def numel(self) -> int:
        """Length of the vector."""
        return self._sizes.numel

    @property
    def op(self) -> CommOp:
        return stats_op(self.numel, self._communicator.world)

    def begin(self, divisors: Divisors) -> Tensor:
        """One pass over sums of gradients; returns the vector with what they come to here, as far as it is under way.

        Norms are those of the sums, divided at the end: for gradients whose sums are exact the norm is too, on any number
        of ranks.
        """
        sums = square_sums(self._updates.now()).to(self._device)
        if divisors.own != divisors.common:
            sums *= (divisors.common / divisors.own) ** 2
        vector = torch.zeros(self.numel, dtype=torch.float64, device=self._device)
        groups, nonfinite = vector[: self._sizes.groups], vector[self._known_part.stop :]
        add_totals(sums, self._groups, self._params, groups=groups, nonfinite=nonfinite)
        if self._zeros:
            vector[self._sizes.groups] = count_zeros(self._counted_updates.now())
        return vector

    def reduce(self, vector: Tensor, mine: Seen, divisors: Divisors) -> Callable[[], Totals]:
        """One all-reduce of that and of what this rank has seen, and one read-back: what this gives waits for it. It is to be
        called before the next one begins."""
        self._known.zero_()
        self._note(mine)
        vector[self._known_part].copy_(self._known[self._known_part], non_blocking=True)
        return self.reduce_alone(vector, divisors, mine.joint)

    def reduce_alone(self, vector: Tensor, divisors: Divisors, joint: Collection[str] = ()) -> Callable[[], Totals]:
        """The same without what this rank has seen: where there is nothing to tell."""
        self._communicator.all_reduce(self.op, vector).wait()
        come_back = self._coming_back(vector)
        return lambda: self._read(come_back(), divisors, joint)

    def decide(self, vector: Tensor, bounds: Bounds) -> Tensor:
        """What is to be done about the reduced vector, on the device."""
        return verdict_of(vector[: self._sizes.groups], vector[self._known_part.stop :], bounds)

    def _note(self, mine: Seen) -> None:
        """Write what is known to the host into the vector, which is zero; most of it is mostly zero."""
        parts = self._known_parts
        self._note_settings(mine.settings, mine.tie_settings, mine)
        for part, fqns in ((parts.late, mine.late), (parts.missing, mine.missing)):
            if fqns:
                part[[self._position[fqn] for fqn in fqns]] = 1.0
        for fqn, (place, vote) in self._votes.items():
            if fqn in mine.missing:
                parts.disagreeing[place] = vote

    def _coming_back(self, vector: Tensor) -> Callable[[], _Numbers]:
        """The reduced vector on the host, once it is asked for."""
        if not vector.is_cuda:
            return partial(self._numbers, vector)
        self._found.copy_(vector, non_blocking=True)
        copied = torch.cuda.current_stream(vector.device).record_event()

        def come_back() -> _Numbers:
            copied.synchronize()
            return self._numbers(self._found)

        return come_back

    def _numbers(self, vector: Tensor) -> _Numbers:
        numbers = vector.tolist()
        ends = list(accumulate(self._sizes, initial=0))
        return _Numbers(*(numbers[first:stop] for first, stop in pairwise(ends)))

    def meet(self, settings: str) -> bool:
        """Send these settings and nothing else, where other ranks may be sending all of theirs; whether all are the same."""
        self._known.zero_()
        self._note_settings(settings, {}, None)
        vector = self._known.to(self._device, non_blocking=True, copy=True)
        self._communicator.all_reduce(self.op, vector).wait()
        return self._is_consistent(self._coming_back(vector)())

    def _note_settings(self, settings: str, tie_settings: Mapping[str, str], mine: Seen | None) -> None:
        """Words of this rank's settings, at its stage's place and at those of its ties, and what little comes before them
        in the vector: with one write, for each takes as long as all of it."""
        stages = len(self._stage_sizes)
        words = [0.0] * self._sizes.words
        hashed = {self._stage: settings, **{self._tie_position[tie]: text for tie, text in tie_settings.items()}}
        for position, text in hashed.items():
            words[position * HASH_WORDS : (position + 1) * HASH_WORDS] = map(float, _words(text))
        scaled, unscaled = [0.0] * stages, [0.0] * stages
        if mine is not None:
            scaled[self._stage], unscaled[self._stage] = float(mine.is_scaled), float(mine.is_unscaled)
        problems = [0.0 if mine is None else mine.has_problem + _COUNTED * (mine.is_odd + _COUNTED * mine.has_zeroed)]
        numbers = [*problems, *scaled, *unscaled, *words, *(word * word for word in words)]
        self._known[self._known_part.start :][: len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")

    def _parts(self, vector: Tensor) -> _Parts:
        return _Parts(*torch.split(vector, list(self._sizes)))

    def _is_consistent(self, found: _Numbers) -> bool:
        # All senders of a word sent the same exactly if N * sum(w^2) == (sum w)^2, which every rank finds alike from
        # reduced values.
        senders = (sender for sender in self._senders for _ in range(HASH_WORDS))
        return all(
            squared * sender == word * word
            for sender, word, squared in zip(senders, found.words, found.squared_words, strict=True)
        )

    def _read(self, found: _Numbers, divisors: Divisors, joint: Collection[str]) -> Totals:
        calls, problems = divmod(int(found.problems[0]), _COUNTED)
        zeroed, odd = divmod(calls, _COUNTED)
        return Totals(
            square_sums=dict(zip(self.names, found.groups, strict=True)),
            num_zeros=int(found.zeros[0]) if self._zeros else None,
            missing={self._name(self._entries[index]): count for index, count in _counted(found.missing).items()},
            nonfinite=tuple(self._name(self._entries[index]) for index in _counted(found.nonfinite)),
            late=frozenset(self._entries[index] for index in _counted(found.late)),
            nothing_arrived=found.missing == self._everywhere,
            disagreeing={
                self._name(self._entries[index]): (int(found.missing[index]), int(self._everywhere[index]))
                for index in self._disagreeing(found, joint)
            },
            consistent=self._is_consistent(found),
            problems=problems,
            has_extra_step=bool(odd and zeroed),
            scaled=tuple(map(int, found.scaled)),
            unscaled=tuple(map(int, found.unscaled)),
            divisors=divisors,
        )

    def _disagreeing(self, found: _Numbers, joint: Collection[str]) -> list[int]:
        """Places of the params whose holders do not agree on whether there is a gradient, though they must."""
        partial = [index for index, count in _counted(found.missing).items() if count < self._everywhere[index]]
        if not partial:
            return []
        voted = {index for index, vote in zip(self._voted, found.disagreeing, strict=True) if vote != 0.0}
        together = {self._position[fqn] for fqn in joint}
        return [
            index
            for index in partial
            if index in voted
            or (self._is_one[index] and (self._is_whole[index] or found.late[index] > 0 or index in together))
        ]

    def _name(self, entry: tuple[int, str]) -> str:
        stage, fqn = entry
        return fqn if len(self._stage_sizes) == 1 else f"{fqn} of stage {stage}"


def _counted(counts: Sequence[float]) -> dict[int, int]:
    """Places of the params that were counted anywhere, and how often: few, so the others cost no work of Python's."""
    return {index: int(counts[index]) for index in compress(count(), counts)}


class _OwnFacts(NamedTuple):
    """Facts that all stages know of a param in memory of its own."""

    holders: int
    """Number of ranks of its stage that hold any element of it."""
    is_apart: bool
    """Whether ranks hold different params under this name, as with experts."""
    is_parted: bool
    is_voted: bool
    """Whether several ranks have copies of parts of it."""


def _own_facts(engine: Engine) -> dict[tuple[int, str], _OwnFacts]:
    """Facts of the params of all stages, by stage and name. Collective: all ranks of all stages call it."""
    plan, groups = engine.plan, engine.groups
    voted = {fqn for shard in plan.copied_in_parts for fqn in shard.fqns}
    mine = {
        fqn: _OwnFacts(
            shard.num_holders * (plan.world // shard.world), shard.world < plan.world, shard.is_parted, fqn in voted
        )
        for shard in plan.own
        for fqn in shard.fqns
    }
    if len(groups.stages) == 1 or plan.options.memory != "params":
        return {(groups.stage, fqn): facts for fqn, facts in mine.items()}
    told: list[Any] = share(groups, lambda: mine)
    return {
        (stage, fqn): _OwnFacts(*facts)
        for stage, ranks in enumerate(groups.stages)
        for fqn, facts in told[min(ranks)].items()
    }


def _vote(shard: OwnShards, fqn: str, engine: Engine) -> int:
    """What this rank adds to a param's number if it has no gradient of it. The first of the ranks with copies of a part
    outweighs all the others, so a part adds nothing exactly if all of them have a gradient or none has; and every part goes
    by a factor of its own, so that parts do not make up for each other."""
    rank, found = engine.storage.ranks[shard.domain], 0
    for span in shard.spans_of(fqn, rank):
        ranks = shard.copies(span, rank)
        part = f"{engine.groups.expert_place} {span[:-1]}".encode()
        factor = int.from_bytes(hashlib.sha256(part).digest()[:4], "big") + 1
        found += factor * (1 - len(ranks) if rank == ranks[0] else 1)
    return found


def _is_first_copy(shard: Shard, engine: Engine) -> bool:
    """Whether this stage is the first that has a copy of a shard's weight."""
    tie = shard.plan.tie
    return not tie or min(engine.roster.copies[tie]) == engine.groups.stage


def _words(text: str) -> list[int]:
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return [(digest >> (_WORD_BITS * index)) & ((1 << _WORD_BITS) - 1) for index in range(HASH_WORDS)]

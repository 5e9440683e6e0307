"""The order of gathers: one sequence on every rank, and how far each reader launches it.

At first it is the order of the plan. While the first step's forward runs, modules say what they are about to read; from
then on gathers come in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from layerwise.comm.groups import Groups, share
from layerwise.errors import warn
from layerwise.layout.schedule import gather_order
from layerwise.memory.replicas import Replica


class GatherOrder:
    """The sequence in which the buckets of a model are gathered.

    Args:
        replicas: all buckets, by index.
        chunks: the pipeline chunk of each.
        prefetch: how many gathers may be under way beyond the one that is read; None means all.
        by_chunk: whether the first read of a chunk launches all of its gathers, and none of the next chunk.
        learns: whether modules tell in which order they run.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        chunks: Sequence[int],
        *,
        prefetch: int | None,
        by_chunk: bool,
        learns: bool,
    ) -> None:
        self._replicas, self._chunks = replicas, chunks
        self._prefetch, self._by_chunk = prefetch, by_chunk
        # In which order modules first asked for buckets: the true forward order, once it has been seen.
        self._asked: list[int] | None = [] if learns else None
        self._when_learned: list[Callable[[], object]] = []
        self.set(gather_order(len(replicas)))

    def set(self, sequence: Sequence[int]) -> None:
        """Gather in this order, from the next round on."""
        self.sequence = list(sequence)
        """Indices of buckets."""
        last = len(sequence) - 1
        ahead = last + 1 if self._prefetch is None else self._prefetch
        self.first = min(ahead - 1, last)
        """The position up to which gathers are launched once masters have moved."""
        self.reach = {index: min(position + ahead, last) for position, index in enumerate(self.sequence)}
        """The position up to which the reader of a bucket launches them."""
        if self._by_chunk:
            # All of a chunk at once, and nothing of the next: the pipeline's stages run the same chunk together. Also
            # what nobody asked for in the first forward, and would come last.
            in_turn = list(dict.fromkeys(self._chunks[index] for index in self.sequence))
            self.sequence.sort(key=lambda index: in_turn.index(self._chunks[index]))
            last_of = {self._chunks[index]: position for position, index in enumerate(self.sequence)}
            self.reach = {index: last_of[self._chunks[index]] for index in self.sequence}
            self.first = -1

    def ask(self, replicas: Iterable[Replica]) -> None:
        """A module that reads these is about to run."""
        if self._asked is not None:
            self._asked.extend(replica.plan.index for replica in replicas if replica.plan.index not in self._asked)

    def when_learned(self, then: Callable[[], object]) -> None:
        """Call this once nobody needs to `ask` any more."""
        self._when_learned.append(then)

    def learn(self, groups: Groups) -> None:
        """Once, in the first step: gather in the order in which forward asked, from now on. Ranks of a stage take their
        first one's word, since they must launch alike. No gather may be left to launch, and none be due: it may raise."""
        if self._asked is None:
            return
        asked, first = self._asked, min(groups.stages[groups.stage])

        def mine() -> dict[str, object]:
            # In here, because a warning may be an error, and one on one rank must be one on all.
            if groups.rank == first and [index for index in self.sequence if index in asked] != asked:
                name = self._replicas[asked[0]].plan.placements[0].fqn
                warn(
                    "modules run in another order than they were registered in: params are gathered as they run from now "
                    f"on, first the bucket of {name!r}.",
                )
            return {"order": asked}

        told: Any = share(groups, mine)
        order = told[first]["order"]
        self._asked = None
        for then in self._when_learned:
            then()
        self.set([*order, *(index for index in self.sequence if index not in order)])

"""The storage plan's two answers: which spans has rank r, and who holds (copies of) what.

Work, exchange, statistics and memory know shards by this alone. Buckets of flat buffers answer it (`layout/buckets.py`),
and so does what somebody else has cut into boxes (`layout/boxes.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from layerwise.config.layouts import WorkPolicy
from layerwise.layout.spans import Span, numel_in
from layerwise.routing.matrices import Matrix

Held: TypeAlias = tuple[int, int, int, int]
"""(first, stop, numel, step): each of the ranks range(first, stop, step) holds so many elements of a matrix. Bare, because
every matrix has a few of them and nothing is quicker to make."""

Ranks: TypeAlias = Sequence[int]
"""Numbers of ranks in their domain, ascending."""


class ShardPlan(Protocol):
    """Params that are stored together, one shard of them on every rank of their domain."""

    @property
    def index(self) -> int:
        """Position among all shard plans of the model."""

    @property
    def label(self) -> str: ...
    @property
    def domain(self) -> str: ...
    @property
    def world(self) -> int:
        """Ranks of its domain."""

    @property
    def fqns(self) -> tuple[str, ...]:
        """The params, in backward order."""

    @property
    def tie(self) -> str:
        """Name of the tie, where it is the copy of a weight that lives on another pipeline stage too."""

    @property
    def work(self) -> WorkPolicy: ...

    def param_numel(self, fqn: str) -> int:
        """Elements of one of the params."""

    def shard_numel(self, rank: int) -> int:
        """Elements of a rank's shard, padding included."""

    def shard_numels(self) -> tuple[int, ...]:
        """Elements of every rank's shard."""

    def spans(self, rank: int) -> tuple[Span, ...]:
        """What a rank's shard has of the params, in order."""

    def spans_of(self, fqn: str, rank: int) -> Sequence[Span]:
        """What it has of one of them."""

    def copies(self, span: Span, rank: int) -> Ranks:
        """Who holds the elements of this span of that rank; it among them. Copies are cut alike."""

    def ranks_of(self, matrix: Matrix) -> Ranks:
        """Who holds any of a matrix."""

    def holders(self, matrix: Matrix) -> list[Held]:
        """How much of a matrix each rank holds, copies counted for each of them; each rank in one of them, by first ranks."""

    def to_json(self) -> dict[str, object]:
        """As plain data, for ranks to compare."""


class OwnShards(ShardPlan, Protocol):
    """Shards in the memory of the params themselves, which somebody else may have cut."""

    @property
    def most_spans(self) -> int:
        """How many spans the rank has that has most of them."""

    @property
    def num_holders(self) -> int:
        """How many ranks hold anything."""

    @property
    def has_copies(self) -> bool:
        """Whether several ranks hold the same elements."""

    @property
    def is_parted(self) -> bool:
        """Whether some that hold anything hold other elements than others."""


class Piece(NamedTuple):
    """A span that has elements of a matrix, of the first rank that holds it, and all ranks that do."""

    span: Span
    holders: Ranks


def pieces_of(plan: ShardPlan, matrix: Matrix) -> Iterator[Piece]:
    """The spans that make up a matrix, each once, however many copies there are of it."""
    for rank in plan.ranks_of(matrix):
        for span in plan.spans_of(matrix.fqn, rank):
            holders = plan.copies(span, rank)
            if holders[0] == rank and numel_in(matrix, span):
                yield Piece(span, holders)


def speaks_for(plan: ShardPlan, span: Span, rank: int) -> bool:
    """Whether a rank is the first of those that hold one of its spans: what is done once is done by it."""
    return plan.copies(span, rank)[0] == rank


def param_whole_on(plan: ShardPlan, matrix: Matrix) -> Ranks:
    """The ranks that hold all of a matrix's param in one span: what counts for it counts for all matrices of the param,
    and some params have hundreds."""
    first = plan.holders(matrix)[0][0]
    spans = plan.spans_of(matrix.fqn, first)
    is_whole = len(spans) == 1 and spans[0].numel == plan.param_numel(matrix.fqn)
    return plan.copies(spans[0], first) if is_whole else ()


def whole_on(plan: ShardPlan, matrix: Matrix) -> Ranks:
    """The ranks that hold a matrix whole."""
    return ranks_in([run for run in plan.holders(matrix) if run[2] == matrix.rows * matrix.cols])


def held_by(runs: Iterable[Held], rank: int) -> int:
    """How much a rank has, according to runs of which it is in one at most."""
    for first, stop, numel, step in runs:
        if first <= rank < stop and (rank - first) % step == 0:
            return numel
    return 0


def ranks_in(runs: Sequence[Held]) -> Ranks:
    """The ranks of some runs, in order."""
    if len(runs) == 1:
        ((first, stop, _, step),) = runs
        return range(first, stop, step)
    return tuple(sorted(rank for first, stop, _, step in runs for rank in range(first, stop, step)))


def nearest(ranks: Ranks, to: int, world: int) -> int:
    """Of these ranks, out of `world`, the one that is nearest to a rank: itself, or the one that comes as far along among them
    as it comes among all. Neighbours share a machine, copies lie one behind the other, and so each of them serves as many
    ranks as the others do."""
    if len(ranks) == 1:
        return ranks[0]
    return to if to in ranks else ranks[to * len(ranks) // world]

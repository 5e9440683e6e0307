"""The work plan: which rank orthogonalises each logical matrix, and which matrices travel together.

Homes come from LPT over all matrices of a domain at once: the dearest first, each to the least loaded rank. Matrices of
one shape are then dealt again among the homes that LPT chose for that shape, so that as many elements as possible are
already where they are needed; loads stay as they were.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerwise.layout.cost import newton_schulz_cost
from layerwise.layout.storage import BucketPlan, BufferPlan, Placement
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import Route

EVERY_RANK = -1
"""Home of a matrix that every rank holds whole: each orthogonalises its own copy and nothing moves."""

DEFAULT_COHORT_NUMEL = 32 * 1024 * 1024
"""Elements that each rank has in flight per cohort, on average. 64 MiB in bf16: well past where links reach their
bandwidth."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One matrix, where it lies and who orthogonalises it."""

    matrix: Matrix
    bucket: int
    placement: int
    """Index into the bucket's placements."""
    home: int
    cohort: int


@dataclass(frozen=True)
class WorkPlan:
    """All matrices of a domain in backward order, with their homes and cohorts."""

    domain: str
    world: int
    items: tuple[WorkItem, ...]
    num_cohorts: int
    loads: tuple[int, ...]
    """Newton-Schulz cost per rank."""

    @property
    def imbalance(self) -> float:
        """Cost of the busiest rank over the mean; 1.0 is perfect."""
        total = sum(self.loads)
        return max(self.loads) * self.world / total if total else 1.0


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A matrix before it has a home."""

    matrix: Matrix
    bucket: BucketPlan
    placement: int
    cost: int

    @property
    def key(self) -> tuple[str, int]:
        return self.matrix.fqn, self.matrix.index


def holders(matrix: Matrix, bucket: BucketPlan, placement: Placement) -> dict[int, int]:
    """How many elements of the matrix each shard of its bucket holds."""
    found = {}
    for shard in bucket.shards_holding(placement, matrix.flat_start, matrix.flat_stop):
        numel = matrix.numel_within(*bucket.held(placement, shard))
        if numel:
            found[shard] = numel
    return found


def _longest_first(candidates: Sequence[_Candidate], world: int) -> tuple[dict[tuple[str, int], int], list[int]]:
    """Homes by LPT, and the load of every rank."""
    loads = [(0, rank) for rank in range(world)]
    home_by_key = {}
    for candidate in sorted(candidates, key=lambda c: (-c.cost, c.key)):
        load, rank = loads[0]
        home_by_key[candidate.key] = rank
        heapq.heapreplace(loads, (load + candidate.cost, rank))
    by_rank = [0] * world
    for load, rank in loads:
        by_rank[rank] = load
    return home_by_key, by_rank


def _nearest_of_equals(candidates: Sequence[_Candidate], home_by_key: dict[tuple[str, int], int]) -> None:
    """Among matrices of one shape, swap homes so that most elements stay where they are. Greedy, largest saving
    first."""
    by_shape: dict[tuple[int, int], list[_Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_shape[candidate.matrix.rows, candidate.matrix.cols].append(candidate)
    for equals in by_shape.values():
        free = Counter(home_by_key[candidate.key] for candidate in equals)
        held = {c.key: holders(c.matrix, c.bucket, c.bucket.placements[c.placement]) for c in equals}
        wishes = [(-numel, key, rank) for key, found in held.items() for rank, numel in found.items() if rank in free]
        placed: dict[tuple[str, int], int] = {}
        for _, key, rank in sorted(wishes):
            if key not in placed and free[rank]:
                placed[key] = rank
                free[rank] -= 1
        left = iter(sorted(free.elements()))
        dealt = {key: placed[key] if key in placed else next(left) for key in sorted(held)}
        # Greedy may do worse than the deal it started from; then that one stays.
        saved = sum(held[key].get(rank, 0) - held[key].get(home_by_key[key], 0) for key, rank in dealt.items())
        if saved >= 0:
            home_by_key.update(dealt)


def _cohorts(candidates: Sequence[_Candidate], world: int, cohort_numel: int) -> list[int]:
    """The cohort of each matrix: consecutive in backward order, closed when full."""
    cohorts, cohort, filled = [], 0, 0
    for candidate in candidates:
        if filled >= cohort_numel * world:
            cohort, filled = cohort + 1, 0
        cohorts.append(cohort)
        filled += candidate.matrix.numel
    return cohorts


def plan_work(
    buffers: Sequence[BufferPlan],
    routes: Mapping[str, Route],
    *,
    domain: str,
    world: int,
    cohort_numel: int = DEFAULT_COHORT_NUMEL,
) -> WorkPlan:
    """Homes and cohorts of every matrix of a domain."""
    buckets = [
        bucket
        for buffer in buffers
        if buffer.key.domain == domain and buffer.key.family == "matrix"
        for bucket in buffer.buckets
    ]
    candidates = [
        _Candidate(matrix, bucket, position, newton_schulz_cost(matrix.rows, matrix.cols))
        for bucket in sorted(buckets, key=lambda bucket: bucket.index)
        for position, placement in enumerate(bucket.placements)
        for matrix in routes[placement.fqn].matrices
    ]
    sharded = [candidate for candidate in candidates if candidate.bucket.num_shards > 1]
    home_by_key, loads = _longest_first(sharded, world)
    _nearest_of_equals(sharded, home_by_key)
    everywhere = sum(candidate.cost for candidate in candidates if candidate.bucket.num_shards == 1)
    cohorts = _cohorts(candidates, world, cohort_numel)
    items = tuple(
        WorkItem(
            matrix=candidate.matrix,
            bucket=candidate.bucket.index,
            placement=candidate.placement,
            home=home_by_key.get(candidate.key, EVERY_RANK),
            cohort=cohort,
        )
        for candidate, cohort in zip(candidates, cohorts, strict=True)
    )
    return WorkPlan(
        domain=domain,
        world=world,
        items=items,
        num_cohorts=cohorts[-1] + 1 if cohorts else 0,
        loads=tuple(load + everywhere for load in loads),
    )

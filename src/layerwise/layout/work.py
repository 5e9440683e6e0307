"""The work plan: which rank orthogonalises each logical matrix, and which matrices travel together.

Homes come from LPT over all matrices of a domain at once: the dearest first, each to the least loaded rank. Matrices of
one shape are then dealt again among the homes that LPT chose for that shape, so that as many elements as possible are
already where they are needed; loads stay as they were.

Where the storage plan keeps params whole (`padded`, `compact`) the rank that holds a matrix is its home, and nothing
moves.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
    key: int
    """Its place among all candidates by name: what ties are decided by, and quicker to compare than names."""


def holders(matrix: Matrix, bucket: BucketPlan, placement: Placement) -> dict[int, int]:
    """How many elements of the matrix each shard of its bucket holds."""
    shards = bucket.shards_holding(placement, matrix.flat_start, matrix.flat_stop)
    if len(matrix.grid) == 1 and len(shards) > 1 and not bucket.borders:
        # Between its first and its last shard there is nothing but the matrix. Asked for every matrix of every plan.
        size, start = bucket.numel // bucket.num_shards, placement.offset + matrix.flat_start
        found = dict.fromkeys(shards, size)
        found[shards.start] = (shards.start + 1) * size - start
        found[shards.stop - 1] = start + matrix.numel - (shards.stop - 1) * size
        return found
    found = {}
    for shard in shards:
        numel = matrix.numel_within(*bucket.held(placement, shard))
        if numel:
            found[shard] = numel
    return found


def _longest_first(candidates: Sequence[_Candidate], before: Sequence[int]) -> tuple[dict[int, int], list[int]]:
    """Homes by LPT on top of the loads that ranks have before, and the load of every rank."""
    loads = [(load, rank) for rank, load in enumerate(before)]
    heapq.heapify(loads)
    home_by_key = {}
    for candidate in sorted(candidates, key=lambda c: (-c.cost, c.key)):
        load, rank = loads[0]
        home_by_key[candidate.key] = rank
        heapq.heapreplace(loads, (load + candidate.cost, rank))
    by_rank = [0] * len(before)
    for load, rank in loads:
        by_rank[rank] = load
    return home_by_key, by_rank


def _nearest_of_equals(candidates: Sequence[_Candidate], home_by_key: dict[int, int]) -> None:
    """Among matrices of one shape, swap homes so that most elements stay where they are. Greedy, largest saving
    first."""
    by_shape: dict[tuple[int, int], list[_Candidate]] = defaultdict(list)
    for candidate in candidates:
        by_shape[candidate.matrix.rows, candidate.matrix.cols].append(candidate)
    for equals in by_shape.values():
        free = Counter(home_by_key[candidate.key] for candidate in equals)
        held = {c.key: holders(c.matrix, c.bucket, c.bucket.placements[c.placement]) for c in equals}
        placed = _greedily(held, free)
        left = iter(sorted(free.elements()))
        dealt = {key: placed[key] if key in placed else next(left) for key in sorted(held)}
        # Greedy may do worse than the deal it started from; then that one stays.
        saved = sum(held[key].get(rank, 0) - held[key].get(home_by_key[key], 0) for key, rank in dealt.items())
        if saved >= 0:
            home_by_key.update(dealt)


def _greedily(held: Mapping[int, Mapping[int, int]], free: Counter[int]) -> dict[int, int]:
    """A home for those matrices that find room with one of their holders, the largest share first; takes it from
    `free`."""
    wishes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for key in sorted(held):
        for rank, numel in held[key].items():
            if rank in free:
                wishes[numel].append((key, rank))
    placed: dict[int, int] = {}
    for numel in sorted(wishes, reverse=True):
        for key, rank in wishes[numel]:
            if key not in placed and free[rank]:
                placed[key] = rank
                free[rank] -= 1
    return placed


def _given_homes(candidates: Sequence[_Candidate], world: int) -> tuple[dict[int, int], list[int]]:
    """Homes that the storage plan decides, and what each rank has to do because of them."""
    home_by_key: dict[int, int] = {}
    loads = [0] * world
    everywhere = 0
    holder_of: dict[tuple[int, int], int] = {}
    for candidate in candidates:
        if candidate.bucket.num_shards == 1:
            home_by_key[candidate.key] = EVERY_RANK
            everywhere += candidate.cost
        elif candidate.bucket.whole:
            place = candidate.bucket.index, candidate.placement
            if place not in holder_of:
                holder_of[place] = _holder(candidate.bucket, candidate.bucket.placements[candidate.placement])
            home = home_by_key[candidate.key] = holder_of[place]
            loads[home] += candidate.cost
    return home_by_key, [load + everywhere for load in loads]


def _holder(bucket: BucketPlan, placement: Placement) -> int:
    """The one shard that holds a param; anything else is a mistake of the storage plan."""
    shards = bucket.shards_holding(placement, 0, placement.numel)
    if len(shards) != 1:
        raise ValueError(
            f"param {placement.fqn!r} crosses a shard border of {bucket.label} (shards {shards.start} to {shards.stop - 1}): "
            "its layout keeps every param whole in one shard."
        )
    return shards.start


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
    names = sorted(placement.fqn for bucket in buckets for placement in bucket.placements)
    first_key = dict(zip(names, accumulate((len(routes[fqn].matrices) for fqn in names), initial=0), strict=False))
    candidates = [
        _Candidate(
            matrix,
            bucket,
            position,
            newton_schulz_cost(matrix.rows, matrix.cols),
            first_key[placement.fqn] + matrix.index,
        )
        for bucket in sorted(buckets, key=lambda bucket: bucket.index)
        for position, placement in enumerate(bucket.placements)
        for matrix in routes[placement.fqn].matrices
    ]
    home_by_key, before = _given_homes(candidates, world)
    free = [candidate for candidate in candidates if candidate.key not in home_by_key]
    homes, loads = _longest_first(free, before)
    _nearest_of_equals(free, homes)
    home_by_key.update(homes)
    cohorts = _cohorts(candidates, world, cohort_numel)
    items = tuple(
        WorkItem(
            matrix=candidate.matrix,
            bucket=candidate.bucket.index,
            placement=candidate.placement,
            home=home_by_key[candidate.key],
            cohort=cohort,
        )
        for candidate, cohort in zip(candidates, cohorts, strict=True)
    )
    return WorkPlan(
        domain=domain,
        world=world,
        items=items,
        num_cohorts=cohorts[-1] + 1 if cohorts else 0,
        loads=tuple(loads),
    )

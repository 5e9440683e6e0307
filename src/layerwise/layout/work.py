"""The work plan: which rank orthogonalises each logical matrix, and which matrices travel together.

Homes come from LPT over all matrices of a domain at once: the dearest first, each to the least loaded rank. Matrices of
one shape are then dealt again among the homes that LPT chose for that shape, and ranks trade places, so that as many
elements as possible are already where they are needed; no load grows by that.

Where a shard plan says `stay`, the rank that holds a matrix whole is its home, and where it says `repeat` all ranks that
do are: each orthogonalises its own copy. That nothing moves then is a result.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, count, repeat
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from layerwise.layout.cost import DEFAULT_COST, NewtonSchulz
from layerwise.layout.shards import Held, Ranks, ShardPlan, held_by, param_whole_on, whole_on
from layerwise.routing.matrices import Matrix
from layerwise.routing.rules import Route

DEFAULT_COHORT_NUMEL = 32 * 1024 * 1024
"""Elements that each rank has in flight per cohort, on average. 64 MiB in bf16: well past where links reach their
bandwidth."""

_STAYING_COHORT = 8
"""How much larger a cohort is that goes nowhere. Nothing waits for a wire then, and large batches of one shape are what
products are fast at: the memory of a step bounds them alone."""


class WorkItem(NamedTuple):
    """One matrix, where it lies and who orthogonalises it."""

    matrix: Matrix
    shard: int
    """Number of the shard plan that it lies in."""
    homes: Ranks
    """One rank, or several that do the same."""
    cohort: int


@dataclass(frozen=True)
class WorkPlan:
    """All matrices of a domain in backward order, with their homes and cohorts."""

    domain: str
    world: int
    items: tuple[WorkItem, ...]
    num_cohorts: int
    cost: NewtonSchulz
    """What a matrix costs."""
    loads: tuple[int, ...]
    """FLOPs per rank, of all matrices that it is home to."""

    @property
    def imbalance(self) -> float:
        """FLOPs of the busiest rank over the mean; 1.0 is perfect."""
        return imbalance_of(self.loads)


def imbalance_of(loads: Sequence[int]) -> float:
    """The largest load over the mean; 1.0 where nobody has any."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def loads_of(homes: Iterable[tuple[Matrix, Ranks | None]], world: int, cost: NewtonSchulz) -> list[int]:
    """FLOPs of every rank: of each matrix, on all its homes. One without homes counts nowhere."""
    loads = [0] * world
    everywhere = 0
    rows = cols = flops = 0
    for matrix, ranks in homes:
        if ranks is None:
            continue
        if matrix.rows != rows or matrix.cols != cols:  # shapes come in long runs
            rows, cols = matrix.rows, matrix.cols
            flops = cost.flops(rows, cols)
        if len(ranks) == 1:
            loads[ranks[0]] += flops
        elif len(ranks) == world:
            everywhere += flops
        else:
            for rank in ranks:
                loads[rank] += flops
    return [load + everywhere for load in loads]


def spread(by_rank: Sequence[int], world: int) -> list[int]:
    """Values of the ranks of a domain, for every rank of the dense one: neighbours hold different parts of the model."""
    times = world // len(by_rank)
    return list(by_rank) if times == 1 else [value for value in by_rank for _ in range(times)]


_LOOKED_AT = 4
"""Of ranks that hold equally much of a matrix, how many are thought of as its home."""

Shape: TypeAlias = tuple[int, int]
"""Rows and columns of a matrix."""


class _Stack(NamedTuple):
    """The matrices of one param and where they lie. Models have tens of thousands of matrices and hundreds of params:
    what can be decided for all matrices of a param is decided once."""

    matrices: tuple[Matrix, ...]
    plan: ShardPlan
    first_key: int
    """The place of its first matrix among all matrices by name: what ties are decided by, and quicker to compare than
    names."""


class _Candidate(NamedTuple):
    """A matrix before it has a home."""

    key: int
    matrix: Matrix
    stack: _Stack


def _longest_first(
    by_shape: Mapping[Shape, Sequence[_Candidate]], before: Sequence[int], cost: NewtonSchulz
) -> tuple[dict[int, int], list[int]]:
    """Homes by LPT on top of the loads that ranks have before, and the load of every rank."""
    loads = [(load, rank) for rank, load in enumerate(before)]
    heapq.heapify(loads)
    dearest = sorted(
        (-flops, candidate.key)
        for shape, equals in by_shape.items()
        for flops in (cost.flops(*shape),)
        for candidate in equals
    )
    home_by_key = {}
    for negative_flops, key in dearest:
        load, rank = loads[0]
        home_by_key[key] = rank
        heapq.heapreplace(loads, (load - negative_flops, rank))
    by_rank = [0] * len(before)
    for load, rank in loads:
        by_rank[rank] = load
    return home_by_key, by_rank


def _nearest_of_equals(shapes: Iterable[Mapping[int, Sequence[Held]]], home_by_key: dict[int, int]) -> None:
    """Among matrices of one shape, swap homes so that most elements stay where they are. Greedy, largest saving
    first."""
    for held in shapes:
        free = Counter(home_by_key[key] for key in held)
        placed, saved = _greedily(held, free)
        left = iter(sorted(free.elements()))
        dealt = {key: placed[key] if key in placed else next(left) for key in held}
        # Greedy may do worse than the deal it started from; then that one stays. (Who was not placed holds nothing of
        # what is left for him.)
        for key, runs in held.items():
            home = home_by_key[key]
            saved -= held_by(runs, home)
        if saved >= 0:
            home_by_key.update(dealt)


def _greedily(held: Mapping[int, Sequence[Held]], free: Counter[int]) -> tuple[dict[int, int], int]:
    """A home for those matrices that find room with one of their holders, the largest share first, and how many
    elements need not move because of it; takes them from `free`."""
    wishes: dict[int, list[tuple[int, Held]]] = defaultdict(list)
    for key, runs in held.items():
        for run in runs:
            wishes[run[2]].append((key, run))
    placed: dict[int, int] = {}
    saved = 0
    # Room only shrinks: of the ranks of a run, those before the one that the last matrix found are full for good.
    begins: dict[Held, int] = {}
    for numel in sorted(wishes, reverse=True):
        for key, run in wishes[numel]:
            if key in placed:
                continue
            first, stop, _, step = run
            for rank in range(begins.get(run, first), stop, step):
                if free.get(rank):
                    placed[key] = begins[run] = rank
                    free[rank] -= 1
                    saved += numel
                    break
            else:
                begins[run] = stop
    return placed, saved


def _nearest_ranks(
    shapes: Iterable[Mapping[int, Sequence[Held]]], home_by_key: Mapping[int, int], before: Sequence[int]
) -> list[int]:
    """For every rank the one that takes over all its work, so that more elements stay where they are. Only ranks with
    the same load before trade places. Greedy, largest saving first."""
    world = len(before)
    stays: defaultdict[int, int] = defaultdict(int)  # by home * world + rank: quicker than by pairs
    for held in shapes:
        for key, runs in held.items():
            home = home_by_key[key]
            row = home * world
            for first, stop, numel, step in runs:
                if stop - first == 1:
                    stays[row + first] += numel
                elif first <= home < stop and (home - first) % step == 0:
                    stays[row + home] += numel
                else:  # All in it are alike: it is enough to look at some, and at other ones for other homes.
                    count = len(range(first, stop, step))
                    for number in range(home, home + min(count, _LOOKED_AT)):
                        stays[row + first + number % count * step] += numel
    place: dict[int, int] = {}
    free = set(range(world))
    for _, pair in sorted((-numel, pair) for pair, numel in stays.items()):
        home, rank = divmod(pair, world)
        if home not in place and rank in free and before[home] == before[rank]:
            place[home] = rank
            free.remove(rank)
    left = set(range(world)).difference(place)
    for home, rank in zip(*(sorted(some, key=lambda rank: (before[rank], rank)) for some in (left, free)), strict=True):
        place[home] = rank
    gained = sum(stays.get(home * world + rank, 0) - stays.get(home * world + home, 0) for home, rank in place.items())
    return [place[rank] if gained > 0 else rank for rank in range(world)]


def _given_homes(stack: _Stack) -> list[Ranks | None]:
    """The homes that the shard plan's policy decides for the matrices of a param; None for those that are dealt out."""
    if stack.plan.work == "balance" and stack.plan.world > 1:
        return [None] * len(stack.matrices)
    everything = param_whole_on(stack.plan, stack.matrices[0])
    if everything:
        return [everything if stack.plan.work == "repeat" else _one_rank(everything[0])] * len(stack.matrices)
    found: list[Ranks | None] = []
    for matrix in stack.matrices:
        ranks = whole_on(stack.plan, matrix)
        found.append((ranks if stack.plan.work == "repeat" else _one_rank(ranks[0])) if ranks else None)
    return found


@cache
def _one_rank(rank: int) -> Ranks:
    return range(rank, rank + 1)


def _cohorts(
    stacks: Iterable[_Stack], homes: Iterable[Sequence[Ranks | None]], world: int, cohort_numel: int
) -> list[int]:
    """The cohort of each matrix: consecutive in backward order, closed when ranks have `cohort_numel` each on average.
    What several ranks orthogonalise counts for each of them."""
    cohorts, cohort, filled = [], 0, 0
    for stack, homes_of in zip(stacks, homes, strict=True):
        for matrix, own in zip(stack.matrices, homes_of, strict=True):
            if filled >= cohort_numel * world:
                cohort, filled = cohort + 1, 0
            cohorts.append(cohort)
            filled += matrix.rows * matrix.cols * (1 if own is None else len(own))
    return cohorts


def _staying_cohorts(stacks: Iterable[_Stack], cohort_numel: int) -> list[int]:
    """The cohort of each matrix where every rank does everything: matrices of one shape together, in equal parts that are
    larger than a cohort may be elsewhere, and small parts of several shapes in one cohort, as long as that is not larger
    than there, or than the largest part."""
    by_shape: dict[Shape, list[int]] = defaultdict(list)
    matrices = [matrix for stack in stacks for matrix in stack.matrices]
    for position, matrix in enumerate(matrices):
        by_shape[matrix.rows, matrix.cols].append(position)
    most_numel = _STAYING_COHORT * cohort_numel
    parts: list[tuple[list[int], int]] = []
    for (rows, cols), positions in by_shape.items():
        length = -(-len(positions) // max(1, -(-len(positions) * rows * cols // most_numel)))
        for first in range(0, len(positions), length):
            part = positions[first : first + length]
            parts.append((part, len(part) * rows * cols))
    bound = max(cohort_numel, *(numel for _, numel in parts), 0)
    cohorts, cohort, filled = [0] * len(matrices), 0, 0
    for part, numel in parts:
        if filled and filled + numel > bound:
            cohort, filled = cohort + 1, 0
        filled += numel
        for position in part:
            cohorts[position] = cohort
    return cohorts


def _stacks(plans: Sequence[ShardPlan], routes: Mapping[str, Route]) -> list[_Stack]:
    """The params of these plans that matrix rules manage, in backward order."""
    members = [
        (plan, fqn)
        for plan in sorted(plans, key=lambda plan: plan.index)
        for fqn in plan.fqns
        if routes[fqn].family == "matrix"
    ]
    names = sorted(fqn for _, fqn in members)
    first_key = dict(zip(names, accumulate((len(routes[fqn].matrices) for fqn in names), initial=0), strict=False))
    return [_Stack(routes[fqn].matrices, plan, first_key[fqn]) for plan, fqn in members]


def plan_work(
    plans: Iterable[ShardPlan],
    routes: Mapping[str, Route],
    *,
    domain: str,
    world: int,
    cohort_numel: int = DEFAULT_COHORT_NUMEL,
    cost: NewtonSchulz = DEFAULT_COST,
) -> WorkPlan:
    """Homes and cohorts of every matrix of a domain."""
    stacks = _stacks([plan for plan in plans if plan.domain == domain], routes)
    given = [_given_homes(stack) for stack in stacks]
    by_shape: dict[Shape, list[_Candidate]] = defaultdict(list)
    for stack, homes_of in zip(stacks, given, strict=True):
        for key, matrix, homes in zip(count(stack.first_key), stack.matrices, homes_of, strict=False):
            if homes is None:
                by_shape[matrix.rows, matrix.cols].append(_Candidate(key, matrix, stack))
    before = loads_of(chain.from_iterable(map(zip, (stack.matrices for stack in stacks), given)), world, cost)
    home_by_key, loads = _longest_first(by_shape, before, cost)
    held_by_shape = [
        {key: stack.plan.holders(matrix) for key, matrix, stack in sorted(equals, key=itemgetter(0))}
        for equals in by_shape.values()
    ]
    _nearest_of_equals(held_by_shape, home_by_key)
    place = _nearest_ranks(held_by_shape, home_by_key, before)
    if all(homes is not None and len(homes) == world for homes_of in given for homes in homes_of):
        cohorts = _staying_cohorts(stacks, cohort_numel)
    else:
        cohorts = _cohorts(stacks, given, world, cohort_numel)
    items: list[WorkItem] = []
    for stack, homes_of in zip(stacks, given, strict=True):
        chosen: list[Ranks] = [
            _one_rank(place[home_by_key[key]]) if known is None else known
            for key, known in enumerate(homes_of, start=stack.first_key)
        ]
        mine = cohorts[len(items) : len(items) + len(chosen)]
        items.extend(map(WorkItem._make, zip(stack.matrices, repeat(stack.plan.index), chosen, mine, strict=False)))
    return WorkPlan(
        domain=domain,
        world=world,
        items=tuple(items),
        num_cohorts=max(cohorts, default=-1) + 1,
        cost=cost,
        loads=tuple(load for _, load in sorted(zip(place, loads, strict=True))),
    )

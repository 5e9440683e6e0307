"""Bytes that every rank will hold, by what they are for: the figures that `buffers.storage`, the optimizer and the
exchanger come to once they run, without running them.

What is not counted is what the model and its kernels need for themselves: activations, the workspace of Newton-Schulz,
and what a communication library allocates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import NamedTuple, TypeAlias

from layerwise.config.rules import Rule
from layerwise.dtypes import DType
from layerwise.layout.choice import spread
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommSchedule, Phase, reduce_op
from layerwise.layout.slots import passage_nbytes, place_slots, usable
from layerwise.layout.storage import GRAD_SLOTS, BucketPlan, BufferPlan
from layerwise.layout.work import WorkPlan
from layerwise.planner.rules import Rules, wire_dtypes_for
from layerwise.planner.timing import numbers_of

_FP32 = DType.FP32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    params: int
    """Replicas, padding included, and frozen params."""
    grads: int
    """Full gradients (or the slots they are leased from), shards apart from them, and the fp32 copies that updates are
    computed in where gradients are narrower."""
    masters: int
    """Nothing where params are fp32: their own shard is the master."""
    state: int
    """Momenta and second moments."""
    slots: int
    """Staging: the ring of the exchange, which stays until it is freed, and at the worst moment what a reduction receives or
    the matrices of one cohort and what became of them."""

    @property
    def total(self) -> int:
        return self.params + self.grads + self.masters + self.state + self.slots

    def to_json(self) -> dict[str, int]:
        return {
            "params": self.params,
            "grads": self.grads,
            "masters": self.masters,
            "state": self.state,
            "slots": self.slots,
            "total": self.total,
        }


def memory_by_rank(plan: Plan, schedule: CommSchedule, rules: Rules) -> list[Memory]:
    """What each rank of the dense domain holds, at its most, in a step of an optimizer with these rules.

    Ranks of a smaller domain are taken to be arranged as `layout.choice.sent_by_rank` says.
    """
    return [_memory(held) for held in _held_by_rank(plan, schedule, rules)]


def worst_memory(plan: Plan, schedule: CommSchedule, rules: Rules) -> Memory:
    """What the rank holds that holds most."""
    return _memory(max(_held_by_rank(plan, schedule, rules), key=sum))


def lagging_nbytes(plan: Plan) -> int:
    """Bytes more that a rank holds at most where reductions lag behind backward, and full gradients are released once they
    are reduced: then those of one backward may all be there before the first is over, with what is in flight."""
    more = 0
    for buffer in plan.buffers:
        if plan.leases_grads(buffer):
            count = len(buffer.buckets)
            slot = max(bucket.numel for bucket in buffer.buckets) * plan.grad_dtype.itemsize
            more += count * slot - _full_grads(plan, buffer)
            flying = zip(_reduction_staging(plan, buffer), _reduction_staging(plan, buffer, count), strict=True)
            more += max(most - usual for usual, most in flying)
    return more


_Held: TypeAlias = tuple[int, int, int, int, int]
"""The fields of a `Memory`, in order: thousands of ranks have one, and most are only compared."""


def _memory(held: _Held) -> Memory:
    params, grads, masters, state, slots = held
    return Memory(params=params, grads=grads, masters=masters, state=state, slots=slots)


def _held_by_rank(plan: Plan, schedule: CommSchedule, rules: Rules) -> Iterator[_Held]:
    """What every rank holds."""
    frozen = sum(param.nbytes for param in plan.table if plan.routes[param.fqn].family == "frozen")
    params, full = frozen, 0
    masters, grads, state, reducing = ([0] * plan.world for _ in range(4))
    for buffer in plan.buffers:
        world = plan.world_by_domain[buffer.key.domain]
        held = spread(_shard_numels(buffer.buckets, world), plan.world)
        each = _bytes_per_held_element(plan, buffer)
        params += buffer.numel * buffer.key.dtype.itemsize
        full += _full_grads(plan, buffer)
        masters = _plus(masters, held, 0 if buffer.key.dtype is DType.FP32 else _FP32)
        grads = _plus(grads, held, each)
        state = _plus(state, held, _FP32 * len(rules.of(buffer.key.family).state_names))
        reducing = _plus(reducing, spread(_reduction_staging(plan, buffer), plan.world))
    batches = [0] * plan.world
    passages: list[list[list[int]]] = []
    if rules.matrix.is_matrix_rule:
        dtypes = wire_dtypes_for(plan, rules)
        for work in plan.works:
            homes = _home_numels(work, rules.matrix)
            state = _plus(state, spread(homes.state, plan.world), _FP32)
            # One domain after the other, one cohort's matrices and what becomes of them at a time.
            sizes = [dtypes[work.domain, cohort].itemsize for cohort in range(work.num_cohorts)]
            here = ([2 * numel * size for numel in numels] for numels, size in zip(homes.by_cohort, sizes, strict=True))
            batches = list(map(max, batches, spread(_most(here), plan.world)))
            passages.append([spread(passage, plan.world) for passage in _passages(work, schedule, sizes)])
    grads = [full + apart for apart in grads]
    slots = map(add, map(max, reducing, batches), _own_slots(plan, passages))
    return zip(repeat(params, plan.world), grads, masters, state, slots, strict=True)


def _plus(totals: Sequence[int], more: Sequence[int], times: int = 1) -> list[int]:
    return list(map(add, totals, (value * times for value in more))) if times else list(totals)


# -- what stays --------------------------------------------------------------------------------------


def _shard_numels(buckets: Iterable[BucketPlan], world: int) -> list[int]:
    """Elements of these buckets that each rank of their domain holds a shard of."""
    everywhere, uneven = 0, [0] * world
    for bucket in buckets:
        numels = bucket.shard_numels()
        if numels.count(numels[0]) == len(numels):
            everywhere += numels[0]
        else:
            uneven = list(map(add, uneven, numels))
    return [numel + everywhere for numel in uneven]


def _is_ordered(buffer: BufferPlan) -> bool:
    return buffer.buckets[0].reducer.startswith("ordered")


def _full_grads(plan: Plan, buffer: BufferPlan) -> int:
    """Memory in which backward accumulates."""
    if plan.leases_grads(buffer):
        slots = min(GRAD_SLOTS, len(buffer.buckets))
        return slots * max(bucket.numel for bucket in buffer.buckets) * plan.grad_dtype.itemsize
    return buffer.numel * plan.grad_dtype.itemsize


def _bytes_per_held_element(plan: Plan, buffer: BufferPlan) -> int:
    """Bytes of a shard of the reduced gradient and of its fp32 copy, where they do not lie in the full gradient."""
    # An ordered sum is taken in fp32 and stays that.
    shard = DType.FP32 if _is_ordered(buffer) else plan.grad_dtype
    apart = plan.leases_grads(buffer) or shard is not plan.grad_dtype
    return (shard.itemsize if apart else 0) + (0 if shard is DType.FP32 else _FP32)


# -- what comes and goes -----------------------------------------------------------------------------


def _reduction_staging(plan: Plan, buffer: BufferPlan, leased: int = GRAD_SLOTS) -> list[int]:
    """Bytes in flight per rank when most is, and no more than so many `leased` gradients. A collective reduces in place; an
    ordered one receives every rank's part of the shard before it adds them up, and holds what it sent where that was
    rounded first."""
    world = plan.world_by_domain[buffer.key.domain]
    if not _is_ordered(buffer):
        return [0] * world
    flights = [_flight(plan, bucket, world) for bucket in buffer.buckets]
    # Handles are waited for at the end of backward, or once they are ready and a leased slot is needed: with a wire as
    # fast as backward, when the next bucket has filled.
    most = leased if plan.leases_grads(buffer) else len(flights)
    together = [flights[start : start + most] for start in range(max(1, len(flights) - most + 1))]
    return [max(sum(flight[rank] for flight in flown) for flown in together) for rank in range(world)]


def _flight(plan: Plan, bucket: BucketPlan, world: int) -> list[int]:
    wire = reduce_op(bucket, plan.grad_dtype).dtype.itemsize
    rounded = bucket.numel * wire if bucket.reducer == "ordered_bf16" and world > 1 else 0
    return [rounded + world * bucket.shard_numel(rank) * wire for rank in range(world)]


class _Homes(NamedTuple):
    """What the matrices mean for the ranks that are home to them."""

    by_cohort: list[Sequence[int]]
    """Elements of each cohort's matrices, per rank; one number where it is that of every rank."""
    state: list[int]
    """Numbers of state that lives with them, per rank."""


def _home_numels(work: WorkPlan, rule: Rule) -> _Homes:
    by_cohort: dict[int, list[int]] = {}
    state = [0] * work.world
    everywhere = [0] * work.num_cohorts
    state_everywhere = 0
    has_state = bool(rule.home_state(1, 1))
    for matrix, _, homes, cohort in work.items:
        kept = sum(map(math.prod, rule.home_state(*matrix.logical_shape).values())) if has_state else 0
        if len(homes) == work.world:
            everywhere[cohort] += matrix.rows * matrix.cols
            state_everywhere += kept
        else:
            if cohort not in by_cohort:
                by_cohort[cohort] = [0] * work.world
            for home in homes:
                by_cohort[cohort][home] += matrix.rows * matrix.cols
                state[home] += kept
    return _Homes(
        by_cohort=[
            [numel + more for numel in by_cohort[cohort]] if cohort in by_cohort else (more,)
            for cohort, more in enumerate(everywhere)
        ],
        state=[numel + state_everywhere for numel in state],
    )


def _most(columns: Iterable[Sequence[int]]) -> Sequence[int]:
    """The largest number of each rank, from columns that have one per rank, or one for all of them."""
    most: list[int] = []
    everywhere = 0
    for column in columns:
        if len(column) == 1:
            everywhere = max(everywhere, column[0])
        else:
            most = list(map(max, most, column)) if most else list(column)
    return [max(everywhere, numel) for numel in most] if most else (everywhere,)


def _passages(work: WorkPlan, schedule: CommSchedule, sizes: Sequence[int]) -> list[Sequence[int]]:
    """Bytes of a slot for each cohort of a domain that moves, per rank."""
    found: list[Sequence[int]] = []
    for cohort, itemsize in enumerate(sizes):
        there, back = (schedule.find(phase, f"{work.domain} cohort {cohort}") for phase in _WAYS)
        if there is not None and back is not None:
            sent, received = ([numel * itemsize for numel in op.sent] for op in (there, back))
            found.append(list(map(passage_nbytes, sent, received)))
    return found


_WAYS: tuple[Phase, Phase] = ("exchange", "return")


def _own_slots(plan: Plan, passages: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Bytes of slots on each rank that do not lie in gradients, from those of each domain's cohorts' passages by rank."""
    itemsize = plan.grad_dtype.itemsize
    known: dict[object, int] = {}
    own = []
    for rank in range(plan.world):
        mine = [[passage[rank] for passage in domain] for domain in passages]
        regions = []
        if plan.options.staging == "gradients":
            regions = [run.stop - run.start for run in usable(plan.idle_runs(numbers_of(plan, rank)), itemsize)]
        key = repr((mine, regions))
        if key not in known:
            known[key] = place_slots(mine, regions).own_nbytes
        own.append(known[key])
    return own

"""Bytes that every rank will hold, by what they are for: the figures that `buffers.storage`, the optimizer and the
exchanger come to once they run, without running them.

What is not counted is what the model needs for itself, its activations, and what a communication library allocates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub
from typing import NamedTuple, TypeAlias

from layerwise.config.rules import Muon
from layerwise.dtypes import DType
from layerwise.layout.buckets import BucketPlan, BufferPlan
from layerwise.layout.cost import newton_schulz_workspace
from layerwise.layout.exchange import received_numel
from layerwise.layout.plan import Plan
from layerwise.layout.quantizing import kept_nbytes
from layerwise.layout.schedule import CommSchedule, Phase
from layerwise.layout.slots import passage_nbytes, place_slots
from layerwise.layout.storage import GRAD_SLOTS, STAGING_SLOTS
from layerwise.layout.work import WorkPlan, spread
from layerwise.planner.rules import Rules, wire_dtypes_for

_FP32 = DType.FP32.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    params: int
    """Replicas, padding included, and frozen params. Of a bucket with params that are kept as codes: those, in all directions
    that products need, and the others alone."""
    grads: int
    """Full gradients (or the slots they are leased from; the params' own, where others reduce them), shards apart from them,
    and the fp32 copies that updates are computed in where gradients are narrower."""
    masters: int
    """Nothing where params are fp32: their own shard is the master."""
    state: int
    """Momenta and second moments."""
    slots: int
    """Staging: the ring of the exchange and the slots in which gathers land that become codes, where no gradient is there to
    be lent, which both stay until they are freed; and at the worst moment what a reduction receives or the matrices of one
    cohort and what became of them."""
    workspace: int
    """What Newton-Schulz needs for itself at that moment, on kernels of our own: a GPU's."""
    passing: int
    """Of the slots, what is there at that moment and not between steps."""

    @property
    def total(self) -> int:
        """At the worst moment of a step."""
        return self.params + self.grads + self.masters + self.state + self.slots + self.workspace

    @property
    def at_rest(self) -> int:
        """Between steps, once the first was taken."""
        return self.total - self.workspace - self.passing

    def to_json(self) -> dict[str, int]:
        return {
            "params": self.params,
            "grads": self.grads,
            "masters": self.masters,
            "state": self.state,
            "slots": self.slots,
            "workspace": self.workspace,
            "total": self.total,
            "at_rest": self.at_rest,
        }


def memory_by_rank(plan: Plan, schedule: CommSchedule, rules: Rules) -> list[Memory]:
    """What each rank of the dense domain holds, at its most, in a step of an optimizer with these rules.

    Ranks of a smaller domain are taken to be arranged as `planner.timing.sent_by_rank` says.
    """
    return [_memory(held) for held in _held_by_rank(plan, schedule, rules)]


def worst_memory(plan: Plan, schedule: CommSchedule, rules: Rules) -> Memory:
    """What the rank holds that holds most."""
    return _memory(max(_held_by_rank(plan, schedule, rules), key=_total))


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


_Held: TypeAlias = tuple[int, int, int, int, int, int, int]
"""The fields of a `Memory`, in order: thousands of ranks have one, and most are only compared."""


def _memory(held: _Held) -> Memory:
    params, grads, masters, state, slots, workspace, passing = held
    return Memory(
        params=params, grads=grads, masters=masters, state=state, slots=slots, workspace=workspace, passing=passing
    )


def _total(held: _Held) -> int:
    return sum(held[:-1])  # what passes is a part of the slots


def _held_by_rank(plan: Plan, schedule: CommSchedule, rules: Rules) -> Iterator[_Held]:
    """What every rank holds."""
    gather = plan.options.param_gather
    frozen = sum(kept_nbytes(param, gather) for param in plan.table if plan.routes[param.fqn].family == "frozen")
    params, full = frozen, 0
    masters, grads, state, reducing = ([0] * plan.world for _ in range(4))
    for buffer in plan.buffers:
        world = plan.world_by_domain[buffer.key.domain]
        held = spread(_shard_numels(buffer.buckets, world), plan.world)
        each = _bytes_per_held_element(plan, buffer)
        params += _replica_nbytes(plan, buffer)
        full += _full_grads(plan, buffer)
        masters = _plus(masters, held, 0 if buffer.key.dtype is DType.FP32 else _FP32)
        grads = _plus(grads, held, each)
        state = _plus(state, held, _FP32 * len(rules.of(buffer.key.family).state_names))
        reducing = _plus(reducing, spread(_reduction_staging(plan, buffer), plan.world))
    own = [0] * plan.world
    for held, (of_params, of_grads, of_masters, of_state) in _own_by_numels(plan, rules):
        own = _plus(own, held, of_params)
        grads = _plus(grads, held, of_grads)
        masters = _plus(masters, held, of_masters)
        state = _plus(state, held, of_state)
    batches, at_work = [0] * plan.world, [0] * plan.world
    passages: list[list[list[int]]] = []
    if isinstance(rules.matrix, Muon):
        dtypes = wire_dtypes_for(plan, rules)
        for work in plan.works:
            sizes = [dtypes[work.domain, cohort].itemsize for cohort in range(work.num_cohorts)]
            homes = _homes_of(work, rules.matrix, sizes)
            state = _plus(state, spread(homes.state, plan.world), _FP32)
            # One domain after the other.
            batches = list(map(max, batches, spread(homes.batches, plan.world)))
            at_work = list(map(max, at_work, spread(homes.at_work, plan.world)))
            passages.append([spread(passage, plan.world) for passage in _passages(plan, work, schedule, sizes)])
    grads = [full + apart for apart in grads]
    staged = list(map(max, reducing, batches))
    landing = _landing_slots(plan)
    ring = _exchange_slots(plan, passages)
    slots = [come_and_go + stays + landing for come_and_go, stays in zip(staged, ring, strict=True)]
    workspace = map(sub, map(max, staged, at_work), staged)
    return zip([params + mine for mine in own], grads, masters, state, slots, workspace, staged, strict=True)


def _plus(totals: Sequence[int], more: Sequence[int], times: int = 1) -> list[int]:
    return list(map(add, totals, (value * times for value in more))) if times else list(totals)


def _own_by_numels(plan: Plan, rules: Rules) -> Iterator[tuple[list[int], tuple[int, int, int, int]]]:
    """Of params in memory of their own, those together that are cut alike: elements per rank, and for each of them bytes of
    params, gradients, masters and state. There are hundreds of params, and thousands of ranks."""
    found: dict[int, tuple[tuple[int, ...], list[int]]] = {}  # those that are cut alike share one tuple
    for shard in plan.own:
        (param,) = map(plan.table.find, shard.fqns)
        numels = shard.shard_numels()
        _, sums = found.setdefault(id(numels), (numels, [0, 0, 0, 0]))
        # A gradient has the dtype of its param, and is worked on in fp32: where it is, if it is that already.
        is_fp32 = param.dtype is DType.FP32
        states = len(rules.of(plan.routes[param.fqn].family).state_names)
        more = (
            param.dtype.itemsize,
            _FP32 + (0 if is_fp32 else param.dtype.itemsize),
            0 if is_fp32 else _FP32,
            _FP32 * states,
        )
        sums[:] = map(add, sums, more)
    for numels, (params, grads, masters, state) in found.values():
        yield spread(numels, plan.world), (params, grads, masters, state)


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


def _replica_nbytes(plan: Plan, buffer: BufferPlan) -> int:
    """What every rank keeps of a buffer for forward to read."""
    itemsize = buffer.key.dtype.itemsize
    kept = 0
    for bucket in buffer.buckets:
        if not bucket.is_staged:
            kept += bucket.numel * itemsize
            continue
        kept += sum(kept_nbytes(plan.table.find(placement.fqn), "quantized") for placement in bucket.placements)
    return kept


def _landing_slots(plan: Plan) -> int:
    """Slots for gathers of buckets that become codes and have no idle gradient to land in. They are alike, so that any
    bucket may have any of them."""
    staged = [bucket for bucket in plan.buckets if bucket.is_staged]
    in_slots = [bucket for bucket in staged if _lends_no_gradient(plan, plan.buffers[bucket.buffer])]
    if not in_slots:
        return 0
    return min(STAGING_SLOTS, len(in_slots)) * max(bucket.numel for bucket in staged) * DType.BF16.itemsize


def _lends_no_gradient(plan: Plan, buffer: BufferPlan) -> bool:
    return not buffer.has_grads or plan.leases_grads(buffer)


def _is_ordered(buffer: BufferPlan) -> bool:
    return buffer.buckets[0].reducer == "ordered"


def _full_grads(plan: Plan, buffer: BufferPlan) -> int:
    """Memory in which backward accumulates."""
    if not buffer.has_grads:
        return buffer.param_numel * buffer.key.dtype.itemsize
    if plan.leases_grads(buffer):
        slots = min(GRAD_SLOTS, len(buffer.buckets))
        return slots * max(bucket.numel for bucket in buffer.buckets) * plan.grad_dtype.itemsize
    return buffer.numel * plan.grad_dtype.itemsize


def _bytes_per_held_element(plan: Plan, buffer: BufferPlan) -> int:
    """Bytes of a shard of the reduced gradient and of its fp32 copy, where they do not lie in the full gradient."""
    if not buffer.has_grads:
        return _FP32
    # An ordered sum is taken in fp32 and stays that.
    shard = DType.FP32 if _is_ordered(buffer) else plan.grad_dtype
    apart = plan.leases_grads(buffer) or shard is not plan.grad_dtype
    return (shard.itemsize if apart else 0) + (0 if shard is DType.FP32 else _FP32)


# -- what comes and goes -----------------------------------------------------------------------------


def _reduction_staging(plan: Plan, buffer: BufferPlan, leased: int = GRAD_SLOTS) -> list[int]:
    """Bytes in flight per rank when most is, and no more than so many `leased` gradients. A collective reduces in place; an
    ordered one receives every rank's part of the shard before it adds them up."""
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
    return [world * bucket.shard_numel(rank) * plan.grad_dtype.itemsize for rank in range(world)]


class _Homes(NamedTuple):
    """What the matrices mean for the ranks that are home to them, in elements, per rank."""

    batches: list[int]
    """The matrices of one cohort and, of the largest batch, what becomes of it: at the worst moment of a step."""
    at_work: list[int]
    """The same with what Newton-Schulz needs for itself, on kernels of our own."""
    state: list[int]
    """Numbers of state that lives with them."""


def _homes_of(work: WorkPlan, rule: Muon, itemsizes: Sequence[int]) -> _Homes:
    """In bytes, but for the state."""
    numels: dict[tuple[int, int, int, int], int] = {}
    everyone = work.world  # in place of a rank, for what every rank is home to
    state = [0] * (work.world + 1)
    has_state = bool(rule.home_state(1, 1))
    for matrix, _, homes, cohort in work.items:
        rows, cols = matrix.rows, matrix.cols
        for home in homes if len(homes) < everyone else (everyone,):
            key = cohort, home, rows, cols
            numels[key] = numels.get(key, 0) + rows * cols
            if has_state:
                state[home] += sum(map(math.prod, rule.home_state(*matrix.logical_shape).values()))
    totals: dict[tuple[int, int], int] = {}
    for (cohort, home, _, _), numel in numels.items():
        totals[cohort, home] = totals.get((cohort, home), 0) + numel
    batches, at_work = [0] * (work.world + 1), [0] * (work.world + 1)
    for (cohort, home, rows, cols), numel in numels.items():
        total = totals[cohort, home] + (totals.get((cohort, everyone), 0) if home < everyone else 0)
        batches[home] = max(batches[home], (total + numel) * itemsizes[cohort])
        needed = newton_schulz_workspace(numel // (rows * cols), rows, cols, "auto", rule.steps)
        at_work[home] = max(at_work[home], (total + needed) * itemsizes[cohort])  # what becomes of it lies in its place
    return _Homes(
        [max(numel, batches[everyone]) for numel in batches[:everyone]],
        [max(numel, at_work[everyone]) for numel in at_work[:everyone]],
        [numel + state[everyone] for numel in state[:everyone]],
    )


def _passages(plan: Plan, work: WorkPlan, schedule: CommSchedule, sizes: Sequence[int]) -> list[Sequence[int]]:
    """Bytes of a slot for each cohort of a domain that moves, per rank: whichever way takes more."""
    found: list[Sequence[int]] = []
    # In buffers, what arrives is what goes back. Copies elsewhere all get it back, and one of them sends it.
    received = received_numel(work, {shard.index: shard for shard in plan.own}) if plan.own else {}
    for cohort, itemsize in enumerate(sizes):
        ways = [schedule.find(phase, f"{work.domain} cohort {cohort}") for phase in _WAYS]
        if not any(ways):
            continue
        there, back = (op.sent if op is not None else (0,) * work.world for op in ways)
        arriving, returning = received.get(cohort, (back, there))
        found.append(
            [
                max(
                    passage_nbytes(sent * itemsize, arrived * itemsize),
                    passage_nbytes(sent_back * itemsize, returned * itemsize),
                )
                for sent, arrived, sent_back, returned in zip(there, arriving, back, returning, strict=True)
            ]
        )
    return found


_WAYS: tuple[Phase, Phase] = ("exchange", "return")


def _exchange_slots(plan: Plan, passages: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Bytes of exchange slots on each rank. `passages` has the bytes of every passage by domain, cohort and rank."""
    known: dict[str, int] = {}
    nbytes_by_rank = []
    for rank in range(plan.world):
        mine = [[passage[rank] for passage in domain] for domain in passages]
        key = repr(mine)
        if key not in known:
            known[key] = place_slots(mine).nbytes
        nbytes_by_rank.append(known[key])
    return nbytes_by_rank

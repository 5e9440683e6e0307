"""Gathers that run on under the next forward: waited for, kept alive, marked, and seen by whoever reads a weight."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import layerwise
from layerwise.comm.collectives import Communicator, _name
from layerwise.comm.handles import Handle
from layerwise.engine.engine import Engine
from layerwise.engine.exchanger import Cohort, Passage
from layerwise.engine.publisher import Publisher
from layerwise.engine.update import Update
from layerwise.layout import slots as layout_slots
from layerwise.layout.schedule import CommOp
from layerwise.memory.replicas import Replica, ReplicaState
from layerwise.memory.slots import Slots
from layerwise.memory.staged import StagedReplica
from layerwise.memory.stale import StaleGuard
from layerwise.parallel import data_parallel
from tests import quantizing, seams, worlds
from tests.arrangements import Arrangement
from tests.ranks import raised
from tests.regressions.cases import (
    Case,
    Mistake,
    arranged,
    both_ways,
    compared,
    differ_between_ranks,
    in_place_of,
)
from tests.regressions.publishing import SHARDED, every_bucket, published_early
from tests.regressions.transports import LateWork, late_gathers, lending_all_to_alls
from tests.worlds import Hyper, Net, anywhere, net_loss, rules

# ------------------------------------------------------------------------------------------------ two runs side by side


class Run:
    """A small real network in training, every matrix in a bucket of its own, so that each is cut and something travels.
    With `overlap_param_gather` left on, what it has for weights must be what its twin without has."""

    def __init__(
        self, rank: int, build: Callable[[], Any] = Net, *, bucket_mib: float = 0.0001, **options: Any
    ) -> None:
        self.rank = rank
        torch.manual_seed(11)
        self.module = build()
        self.model = seams.data_parallel(self.module, bucket_mib=bucket_mib, **options)
        self.optimizer = layerwise.Optimizer(self.model, **rules(Hyper()))
        self.publisher = self.model.engine.publisher
        self.replicas = self.model.engine.storage.replicas

    def learn(self, step: int) -> None:
        """One forward and one backward."""
        net_loss(self.model, self.rank, step).backward()

    def train(self, step: int) -> None:
        self.learn(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {fqn: param.detach().clone() for fqn, param in self.module.named_parameters()}

    def unmarked(self) -> list[str]:
        return [f"{replica.plan.label} is not marked fresh" for replica in self.replicas if not _is_fresh(replica)]

    def in_flight(self) -> int:
        return sum(replica.state is ReplicaState.IN_FLIGHT for replica in self.replicas)


def _is_fresh(replica: Replica) -> bool:
    return replica.state is ReplicaState.FRESH


def _unlike(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> list[str]:
    """Names of tensors that differ."""
    names = [name for name in expected if not torch.equal(found[name], expected[name])]
    return [f"{what}: weights of {name} differ" for name in names]


def _side_by_side(
    rank: int,
    act: Callable[[Run, int], list[str]],
    *,
    steps: int = 2,
    layouts: Sequence[str] = ("flat",),
    **options: Any,
) -> list[str]:
    """Train with and without overlapped gathers, over a network from which nothing arrives before it is waited for;
    `act` does something to the overlapped run after every step, and then its weights must be those of the other."""
    for layout in layouts:
        twin = Run(rank, layout=layout, overlap_param_gather=False, **options)
        run = Run(rank, layout=layout, **options)
        for step in range(steps):
            twin.train(step)
            with late_gathers():
                run.train(step)
                found = act(run, step)
                found += _unlike(run.weights(), twin.weights(), f"rank {rank} step {step} {layout}")
            if anywhere(found):
                return found
    return []


# ------------------------------------------------------------------------------------------------ waiting


def every_part_is_waited_for(rank: int, world: int) -> list[str]:
    """Several gathers went into one coalescing context, whose handle was complete before the parts were copied to where
    they belong: garbage in the weights, NaN in the second iteration.

    Here a bucket's gather is one handle that waits for all of its works, and nothing is coalesced. Tested over a network
    from which nothing arrives before its own work was waited for, with gathers of several broadcasts each.
    """
    shapes = [(4, 4), (5, 3), (7, 5), (6, 9), (3, 3)]
    found: list[str] = []
    with late_gathers():
        for options in ({}, {"prefetch": 1}):
            case = worlds.Case(shapes=shapes, layout="compact", options=options, steps=2)
            found = found or compared(rank, world, case)
    return found


def _waits_for(chosen: Callable[[tuple[Any, ...]], Sequence[Any]]) -> Any:
    """Handles that wait only for some of their works."""

    def partly(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wait(self: Handle) -> Tensor:
            if self.label.startswith("publish"):
                self._works = tuple(chosen(self._works))
            return real(self)

        return wait

    return in_place_of(Handle, "wait", partly)


def waits_for_the_last(rank: int) -> Any:
    return _waits_for(lambda works: works[-1:])


def waits_for_nothing(rank: int) -> Any:
    return _waits_for(lambda works: ())


def one_wait_per_bucket(rank: int, world: int) -> list[str]:
    """A rank waited for every param that it did not own, one by one, at places that depended on what it owned: ranks
    came to wait for each other.

    Here a bucket has one handle, which is waited for once, and the sequence of waits is the same on all ranks.
    """
    waits: list[str] = []

    def noting(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wait(self: Handle) -> Tensor:
            waits.append(self.label)
            return real(self)

        return wait

    def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
        labels = [label for label in waits if label.startswith("publish")]
        waits.clear()
        often = [f"{label} was waited for {times} times" for label, times in Counter(labels).items() if times != 1]
        found = [] if len(labels) >= len(model.plan.buckets) else ["in the scene not all buckets were waited for"]
        return found + often + differ_between_ranks("waits", {"in order": labels})

    with in_place_of(Handle, "wait", noting):
        case = worlds.Case(shapes=[(4, 4), (5, 3), (7, 5), (6, 9)], layout="compact", bucket_mib=2e-4, steps=2)
        return both_ways(rank, world, [case], also)


def waits_one_by_one(rank: int) -> Any:
    def broadcasts(self: Communicator, op: CommOp, full: Tensor, pieces: Sequence[tuple[int, Tensor]]) -> Handle:
        parts = [
            (
                source,
                Handle(_name(op), piece, (piece,), (dist.broadcast(piece, source, group=self.group, async_op=True),)),
            )
            for source, piece in pieces
        ]
        return Handle(_name(op), full, (full,), [part for source, part in parts if source != self.rank])  # type: ignore[misc]

    return mock.patch.object(Communicator, "_broadcasts", broadcasts)


# ------------------------------------------------------------------------------------------------ memory


def sources_stay(rank: int, world: int) -> list[str]:
    """The source of an asynchronous collective was collected as garbage while it was in flight, and its memory used for
    something else.

    Here a handle owns its tensors until it was waited for. Gathers read and write the replicas themselves, which stay;
    so this is tested where sources are made for the occasion: gradients that come late, and pieces of matrices on their
    way.
    """
    with lending_all_to_alls() as complaints:

        def also(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> list[str]:
            kinds = optimizer.stats.bytes_by_collective
            return complaints + ([] if kinds.get("all_to_all") else ["the scene has no all-to-all"])

        case = worlds.Case(layout="flat", cohort_numel=64, options={"reducer": "ordered"}, steps=2)
        return _late_gradients_stay(rank, complaints) or compared(rank, world, case, also)


def _late_gradients_stay(rank: int, complaints: list[str]) -> list[str]:
    """Reduce gradients that nothing but the handle keeps alive."""
    run = Run(rank, reducer="ordered")
    for replica, reduction in zip(run.replicas, run.model.engine.reducer._reductions, strict=True):
        reduction.start(torch.ones(replica.plan.numel), torch.empty_like(replica.grad_shard)).wait()
    return complaints


def handles_keep_nothing(rank: int) -> Any:
    def forgetful(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: Handle, label: str, result: Tensor, keep_alive: Any = (), works: Any = ()) -> None:
            real(self, label, result, (), works)

        return init

    return in_place_of(Handle, "__init__", forgetful)


def two_passages_in_one_place(rank: int) -> Any:
    """Places are planned as if one passage were alive at a time."""
    return mock.patch.object(layout_slots, "_ALIVE", 1)


@contextmanager
def slots_are_given_back_early(rank: int) -> Iterator[None]:
    def early(real: Callable[..., Passage]) -> Callable[..., Passage]:
        def move(self: Cohort, *what: Any) -> Passage:
            passage = real(self, *what)
            passage.release()
            return Passage(passage.handle, None)

        return move

    with two_passages_in_one_place(rank), in_place_of(Cohort, "_move", early):
        yield


def staging_is_let_go(rank: int, world: int) -> list[str]:
    """Staging memory of overlapped gathers stayed with the allocator. The process that wrote checkpoints had no room on
    the device, no checkpoint was ever complete, and every restart began from the same old one.

    Here gathers need no staging memory, that of the exchange is planned before anything is allocated, and
    `optimizer.free_buffers()` lets go of it, also with gathers under way. Counted by what is alive in the process.
    """
    found: list[str] = []
    gc.freeze()  # what there was before is not counted
    for options in ({}, {"shard_grads": True}):
        twin, run = (Run(rank, layout="flat", overlap_param_gather=on, **options) for on in (False, True))
        alive = _alive_nbytes()
        for step in range(4):
            twin.train(step)
            run.train(step)
            twin.optimizer.free_buffers()
            if step == 1:
                most = _alive_nbytes()
            if step == 3 and _alive_nbytes() > most:
                found.append(f"rank {rank}: {_alive_nbytes() - most} bytes more after two more steps")
            if step % 2:
                run.optimizer.free_buffers()
        if not run.optimizer.stepper.update.slots.plan.nbytes:
            found.append("the scene has no staging memory")
        if (left := _alive_nbytes() - alive) > 0:
            found.append(f"rank {rank}: {left} bytes are still held after free_buffers()")
        found += _unlike(run.weights(), twin.weights(), f"rank {rank} {options}")
        if anywhere(found):
            return found
    return []


def _alive_nbytes() -> int:
    """Bytes of all tensors that somebody holds."""
    storages = [found.untyped_storage() for found in gc.get_objects() if isinstance(found, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def slots_stay(rank: int) -> Any:
    return mock.patch.object(Slots, "free")


def staging_grows(rank: int) -> Any:
    def growing(real: Callable[..., Any]) -> Callable[..., Any]:
        def open_(self: Slots) -> Any:
            self.plan = self.plan._replace(nbytes=self.plan.nbytes + 64)
            return real(self)

        return open_

    return in_place_of(Slots, "open", growing)


class Halves(nn.Module):
    """Two layers in one bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.second = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def gradients_are_left_alone(rank: int, world: int) -> list[str]:
    """Params were received in the idle gradient buffer, which was not zeroed again: the next accumulation began with
    weights.

    Here params arrive where they are read, and a bucket's first gradient replaces what was there. Tested where both are
    alive at once: new masters are loaded between backward and `step()`, so gathers run while reduced gradients wait.
    Gathers of params that are kept as codes land in the memory of idle gradients: not of those that are needed, and it is
    zero afterwards.
    """
    return _gathers_beside_gradients(rank) or _gathers_in_idle_gradients(rank)


def _gathers_in_idle_gradients(rank: int) -> list[str]:
    for layout in ("flat", "padded"):
        model, optimizer = quantizing.prepare(quantizing.Way(layout))
        staged = [replica for replica in model.engine.storage.replicas if isinstance(replica, StagedReplica)]
        for step in range(2):
            tokens = quantizing.tokens_of(rank, step, 0)
            model(tokens[:, :-1]).float().square().mean().backward()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict(part=True)))
            before = [_copy_of(replica.grad) for replica in staged]
            model.ensure()
            found = [
                f"rank {rank} step {step} {layout}: the needed gradient of {replica.plan.label} was lent to a gather"
                for replica, was in zip(staged, before, strict=True)
                if not torch.equal(was, _copy_of(replica.grad))
            ]
            optimizer.step()
            optimizer.zero_grad()
            lent = [replica for replica in staged if replica.is_lent]
            if not lent:
                found.append("in the scene no gradient is lent to a gather")
            landed = [replica.landing for replica in lent]
            model.ensure()
            if any(memory.any() for memory in landed):
                found.append(f"rank {rank} step {step} {layout}: lent gradients are not zero again")
            if anywhere(found):
                return found
    return []


def _gathers_beside_gradients(rank: int) -> list[str]:
    for layout in SHARDED:
        twin, run = (Run(rank, Halves, layout=layout, overlap_param_gather=on) for on in (False, True))
        for step in range(3):
            found: list[str] = []
            with late_gathers():
                for one in (twin, run):
                    one.learn(step)
                    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict(part=True)))
                    before = [_copy_of(replica.grad) for replica in one.replicas]
                    one.model.ensure()
                    after = [_copy_of(replica.grad) for replica in one.replicas]
                    found += [
                        f"rank {rank} step {step} {layout}: the gradient memory of {replica.plan.label} was written by a gather"
                        for replica, was, now in zip(one.replicas, before, after, strict=True)
                        if not torch.equal(was, now)
                    ]
                    one.optimizer.step()
                    one.optimizer.zero_grad()
            found += _unlike(run.weights(), twin.weights(), f"rank {rank} step {step} {layout}")
            if anywhere(found):
                return found
    return []


def _copy_of(grad: Tensor | None) -> Tensor:
    return torch.empty(0) if grad is None else grad.clone()


def through_gradients(rank: int) -> Any:
    """Params are received in the gradient buffer, and copied out when they are there."""

    def staged(real: Callable[..., Handle]) -> Callable[..., Handle]:
        def start(self: Publisher, replica: Replica, message: Tensor, op: CommOp) -> Handle:
            weights, staging = replica.weights, replica.grad
            if staging is None or not self.overlap:
                return real(self, replica, message, op)
            staging.copy_(weights)
            replica.weights = staging
            try:
                handle = real(self, replica, message, op)
            finally:
                replica.weights = weights
            return handle.followed_by(lambda: weights.copy_(staging), weights)

        return start

    return in_place_of(Publisher, "_start", staged)


def lent_gradients_stay_dirty(rank: int) -> Any:
    def dirty(real: Callable[..., None]) -> Callable[..., None]:
        def settle(self: StagedReplica) -> None:
            landed, is_lent = self.landing, self.is_lent
            values = landed.clone()
            real(self)
            if is_lent:
                landed.copy_(values)

        return settle

    return in_place_of(StagedReplica, "settle", dirty)


def needed_gradients_are_lent(rank: int) -> Any:
    def careless(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def message(self: StagedReplica) -> Tensor:
            self.holds_gradient = False
            return real(self)

        return message

    return in_place_of(StagedReplica, "message", careless)


# ------------------------------------------------------------------------------------------------ under autograd


def gathers_know_no_autograd(rank: int, world: int) -> list[str]:
    """A gather that was started from forward, with autograd on, flattened params that require gradients and wrote into
    the result in place: an error, or a graph through the weights of two steps.

    Here all of it is under `no_grad`, wherever it is called from, and writes to replicas, of which no graph knows.
    """
    modes: list[bool] = []

    def noting(real: Callable[..., Handle]) -> Callable[..., Handle]:
        def start(self: Publisher, replica: Replica, message: Tensor, op: CommOp) -> Handle:
            modes.append(torch.is_grad_enabled())
            return real(self, replica, message, op)

        return start

    def act(run: Run, step: int) -> list[str]:
        found = [f"rank {rank} step {step}: a gather was started with autograd on"] if any(modes) else []
        replicas = [replica.weights for replica in run.replicas]
        found += (
            [f"rank {rank} step {step}: a replica is part of a graph"] if any(t.requires_grad for t in replicas) else []
        )
        left = sum(not _is_fresh(replica) for replica in run.replicas)
        if not left:
            found.append("in the scene nothing is left to forward")
        run.module(torch.ones(1, 6)).sum()  # with autograd
        return found

    with in_place_of(Publisher, "_start", noting):
        return _side_by_side(rank, act, steps=3, prefetch=1)


def with_autograd(rank: int) -> Any:
    """`no_grad` is forgotten."""
    return mock.patch.multiple(
        Publisher,
        ensure=inspect.unwrap(Publisher.ensure),
        _launch_to=inspect.unwrap(Publisher._launch_to),
    )


@contextmanager
def through_params(rank: int) -> Iterator[None]:
    """New weights are written to the params, not to the replicas below them."""

    def written(real: Callable[..., None]) -> Callable[..., None]:
        def land(self: Publisher, replica: Replica) -> None:
            real(self, replica)
            for placement in replica.plan.placements:
                param = self._storage.params[placement.fqn]
                param.copy_(self._storage.view_in(replica.weights, placement.fqn).clone())

        return land

    with with_autograd(rank), in_place_of(Publisher, "_land", written):
        yield


# ------------------------------------------------------------------------------------------------ forced syncs


def forced_with_gathers_pending(rank: int, world: int) -> list[str]:
    """A forced sync found a gather in flight, waited for it, and returned without copying what had arrived: stale
    weights everywhere, and the new ones in the gradient buffer.

    Here there is one way to bring a bucket up to date, forced or not: launch what was not, wait, mark. Tested with
    gathers in flight, with some of them, and with none launched.
    """

    def act(run: Run, step: int) -> list[str]:
        if step == 1:
            run.module.first.weight.sum()  # some are in flight, one is fresh
        found = ["in the scene nothing is pending"] if not run.unmarked() else []
        run.model.ensure()
        return found + [f"rank {rank} step {step}: {text}" for text in run.unmarked()]

    found: list[str] = []
    for options in ({}, {"prefetch": 0}):
        found = found or _side_by_side(rank, act, steps=3, layouts=("flat", "compact"), **options)
    return found


def _forced(instead: Callable[[Publisher], None]) -> Any:
    """Another `ensure_all` for overlapped gathers."""

    def made(real: Callable[..., None]) -> Callable[..., None]:
        def ensure_all(self: Publisher) -> None:
            if self.overlap:
                self.launch_all()
                instead(self)
            else:
                real(self)

        return ensure_all

    return in_place_of(Publisher, "ensure_all", made)


def waits_and_does_not_mark(rank: int) -> Any:
    def instead(publisher: Publisher) -> None:
        while publisher._flights:
            publisher._flights.popitem()[1].wait()

    return _forced(instead)


def marks_and_does_not_wait(rank: int) -> Any:
    return _forced(_mark_all)


def _mark_all(publisher: Publisher) -> None:
    for replica in publisher._storage.replicas:
        if not _is_fresh(replica):
            _mark(publisher, replica)


def _mark(publisher: Publisher, replica: Replica) -> None:
    """A bucket as if it had been waited for."""
    replica.land()
    publisher._guards[replica.plan.index].disarm()


def waits_and_does_not_copy(rank: int) -> Any:
    def instead(publisher: Publisher) -> None:
        with mock.patch.object(LateWork, "arrive"):
            while publisher._flights:
                publisher._flights.popitem()[1].wait()
        _mark_all(publisher)

    return _forced(instead)


def freed_with_gathers_pending(rank: int, world: int) -> list[str]:
    """`free_overlap_buffers` found gathers in flight, waited for them, and dropped what had arrived before it was copied
    to the params.

    Here gathers arrive in the weights themselves, and freeing does not touch them.
    """

    def act(run: Run, step: int) -> list[str]:
        found = ["in the scene nothing is pending"] if not run.unmarked() else []
        run.optimizer.free_buffers()
        return found

    found: list[str] = []
    for options in ({}, {"prefetch": 1}):
        found = found or _side_by_side(rank, act, steps=2, layouts=("flat", "compact"), **options)
    return found


def freeing_drops_what_arrives(rank: int) -> Any:
    def dropping(real: Callable[..., None]) -> Callable[..., None]:
        def free_buffers(self: Engine) -> None:
            for flight in self.publisher._flights.values():
                for work in flight._works:
                    work._work.wait()  # type: ignore[attr-defined]
            self.publisher._flights.clear()
            real(self)

        return free_buffers

    return in_place_of(Engine, "free_buffers", dropping)


def forced_and_freed(rank: int, world: int) -> list[str]:
    """R12 and R13 as they were live: before a checkpoint all params were synced by force and the buffers freed, in one
    order or the other, with gathers in flight.

    Here both are safe at any time, in any order and twice. Tested with dense and expert params, in two chunks.
    """
    orders = {
        "forced, then freed": ("flat", (_force, _free)),
        "freed, then forced": ("compact", (_free, _force, _free)),
    }
    found: list[str] = []
    for order, (layout, calls) in orders.items():
        arrangement = Arrangement(chunks=2, layouts=(layout,), steps=2, bucket_mib=0.004)
        with late_gathers(), in_place_of(layerwise.Optimizer, "step", partial(_stepping_and, calls)):
            found += [f"{order}: {text}" for text in arranged(rank, world, arrangement)]
    return found


def _force(engine: Engine) -> None:
    engine.publisher.ensure_all()


def _free(engine: Engine) -> None:
    engine.free_buffers()


def _stepping_and(calls: Sequence[Callable[[Engine], None]], real: Callable[..., None]) -> Callable[..., None]:
    """`step()`, and right after it these calls."""

    def step(self: layerwise.Optimizer) -> None:
        real(self)
        for call in calls:
            call(self.engine)

    return step


# ------------------------------------------------------------------------------------------------ whoever reads


def every_reader_sees_new_weights(rank: int, world: int) -> list[str]:
    """The forced gather before an evaluation left out what has to be done after a gather: forward read what was there.

    Here every way to a weight ends in `ensure`. Tested after every step, each time with all gathers pending: evaluation,
    inference mode, `state_dict()`, a copy of the module, a reference from before, `functional_call`, a saved file.
    """

    def evaluated(run: Run) -> dict[str, Tensor]:
        run.model.eval()
        with torch.no_grad():
            out = run.model(torch.ones(2, 6))
        run.model.train()
        return {"evaluation": out}

    def inferred(run: Run) -> dict[str, Tensor]:
        with torch.inference_mode():
            return {"inference": run.model(torch.ones(2, 6)).clone()}

    def called(run: Run) -> dict[str, Tensor]:
        with torch.no_grad():
            return {
                "functional call": functional_call(run.module, dict(run.module.named_parameters()), torch.ones(2, 6))
            }

    def saved(run: Run) -> dict[str, Tensor]:
        file = io.BytesIO()
        torch.save(run.module.state_dict(), file)
        file.seek(0)
        return dict(torch.load(file))

    ways: dict[str, Callable[[Run], dict[str, Tensor]]] = {
        "evaluation": evaluated,
        "inference mode": inferred,
        "state_dict()": lambda run: run.module.state_dict(),
        "a copy": lambda run: dict(copy.deepcopy(run.module).state_dict()),
        "a reference": lambda run: {"first": kept[id(run)].detach()},
        "functional_call()": called,
        "a saved file": saved,
    }
    twin, run = (Run(rank, overlap_param_gather=on, layout="flat") for on in (False, True))
    kept = {id(one): one.module.first.weight for one in (twin, run)}
    for step, (way, read) in enumerate(ways.items()):
        twin.train(step)
        with late_gathers():
            run.train(step)
            found = [] if run.in_flight() == len(run.replicas) else ["in the scene some gathers are not pending"]
            found += _unlike(read(run), read(twin), f"rank {rank}: {way}")
            run.model.ensure()
        if anywhere(found):
            return found
    return []


def evaluation_skips_the_landing(rank: int) -> Any:
    def skipping(real: Callable[..., None]) -> Callable[..., None]:
        def ensure(self: Publisher, replica: Replica) -> None:
            if torch.is_grad_enabled() or _is_fresh(replica):
                real(self, replica)
            else:
                _mark(self, replica)

        return ensure

    return in_place_of(Publisher, "ensure", skipping)


def only_forward_asks(rank: int) -> Any:
    return mock.patch.object(StaleGuard, "arm")


# ------------------------------------------------------------------------------------------------ who publishes, and when


class Chained(torch.optim.Optimizer):
    """A user's optimizer that steps another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([nn.Parameter(torch.zeros(1))], {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step() if closure is None else self.inner.step(closure)


def stepped_from_outside(rank: int, world: int) -> list[str]:
    """Params were sent in the `step()` of the outermost optimizer only: nested in another one, whose `step()` called the
    inner methods, nothing was sent.

    Here there is nothing to nest: one optimizer steps all rules, and new masters are published by what made them. Tested
    with an optimizer of the user's own around it, with a learning rate scheduler, and with a closure.
    """

    def chained(run: Run, step: int) -> None:
        run.learn(step)
        Chained(Chained(run.optimizer)).step()

    def scheduled(run: Run, step: int) -> None:
        scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _: 1.0)
        run.learn(step)
        run.optimizer.step()
        scheduler.step()

    def closed(run: Run, step: int) -> None:
        def closure() -> Tensor:
            run.optimizer.zero_grad()
            loss = net_loss(run.model, rank, step)
            loss.backward()
            return loss

        Chained(run.optimizer).step(closure)

    for way in (chained, scheduled, closed):
        for overlap in (True, False):
            twin = Run(rank, overlap_param_gather=False, layout="padded")
            run = Run(rank, overlap_param_gather=overlap, layout="padded")
            for step in range(2):
                twin.train(step)
                way(run, step)
                name = f"rank {rank}: {way.__name__}, {'overlapped' if overlap else 'in step()'}"
                if anywhere(found := _unlike(run.weights(), twin.weights(), name)):
                    return found
    return []


def outermost_only(rank: int) -> Any:
    def nested(real: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Publisher) -> None:
            frame = sys._getframe()
            while frame := frame.f_back:  # type: ignore[assignment]
                if isinstance(frame.f_locals.get("self"), Chained):
                    return
            real(self)

        return begin

    return in_place_of(Publisher, "begin", nested)


def both_domains_then_publish(rank: int, world: int) -> list[str]:
    """The optimizer of dense params and that of experts shared the chunks of a pipeline. The first one to finish synced
    all of a chunk, and what it synced of the other's was from before its step.

    Here there is one step for all domains and one publication after it.
    """
    arrangement = Arrangement(ep=2, chunks=2, layouts=("flat",), steps=2, bucket_mib=0.004)
    return both_ways(rank, world, [arrangement])


def dense_before_experts(rank: int) -> Any:
    def is_experts(update: Update, cohorts: Sequence[Any], *rest: Any) -> bool:
        return any(cohort._work_plan.domain == "expert" for cohort in cohorts)

    return published_early(every_bucket, "_walk", is_experts)


def one_setting(rank: int, world: int) -> list[str]:
    """The optimizer had a copy of the flag for overlapped gathers, and the model acted on its own. Where they differed,
    gathers were started and never finished.

    Here the model alone has the setting, and it is compared across ranks before anything is built. Tested: an optimizer
    has no such argument; ranks that differ are told; the setting is what happens.
    """
    found = [
        f"Optimizer has an argument {name!r}"
        for name in inspect.signature(layerwise.Optimizer).parameters
        if any(word in name for word in ("overlap", "gather", "prefetch"))
    ]
    for name, values in {
        "overlap_param_gather": (False, True),
    }.items():
        options: dict[str, Any] = {name: values[rank]}
        error = raised(lambda options=options: seams.data_parallel(Net(), **options))
        if not ("PlanMismatchError" in error and name in error):
            found.append(f"rank {rank}: ranks with different {name}: {error}")
    if anywhere(found):
        return found
    for overlap in (True, False):
        run = Run(rank, overlap_param_gather=overlap)
        run.train(0)
        if overlap and not run.unmarked():
            found.append(f"rank {rank}: with overlap nothing was left to forward")
        if not overlap:
            found += [f"rank {rank}: without overlap {text} after step()" for text in run.unmarked()]
        run.model.ensure()
    return found


@contextmanager
def ranks_are_not_compared(rank: int) -> Iterator[None]:
    left = tuple(name for name in data_parallel._SAME_EVERYWHERE if name != "overlap_param_gather")
    with mock.patch.object(data_parallel, "_SAME_EVERYWHERE", left):
        yield


def _acting_on_a_copy(value: bool) -> Any:
    """`begin` goes by a copy of the setting, which somebody changed."""

    def made(real: Callable[..., None]) -> Callable[..., None]:
        def begin(self: Publisher) -> None:
            before, self.overlap = self.overlap, value
            real(self)
            self.overlap = before

        return begin

    return in_place_of(Publisher, "begin", made)


def copy_says_overlapped(rank: int) -> Any:
    return _acting_on_a_copy(True)


def copy_says_in_step(rank: int) -> Any:
    return _acting_on_a_copy(False)


class Spare(Net):
    """A network of which a part is not run in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(8, 8)
        self.uses_spare = True

    def _block(self, x: Tensor) -> Tensor:
        return super()._block(self.spare(x) if self.uses_spare else x)


def gathers_without_overlapped_reductions(rank: int, world: int) -> list[str]:
    """Overlapped gathers relied on overlapped reductions, and the check that says so was left out for one optimizer.

    Here neither needs the other: `step()` brings up to date what no module has read before masters move again. Tested
    with gradients that are reduced in `step()`, and a module that is not run in every step.
    """

    found: list[str] = []
    for options in ({}, {"prefetch": 0}, {"overlap_param_gather": "by chunk"}):
        common = {"overlap_grad_reduce": False, "bucket_mib": 1e-5}  # every param in a bucket of its own
        twin, run = Run(rank, Spare, overlap_param_gather=False, **common), Run(rank, Spare, **common, **options)
        for step in range(4):
            for one in (twin, run):
                one.module.uses_spare = step % 2 == 0
                one.train(step)
            if not run.unmarked():
                found.append(f"rank {rank} {options}: nothing is left to forward")
        found += _unlike(run.weights(), twin.weights(), f"rank {rank} {options}")
        if anywhere(found):
            break
    return found


@contextmanager
def unread_is_left_behind(rank: int) -> Iterator[None]:
    with only_forward_asks(rank), _forced(lambda publisher: None):
        yield


def off_without_reductions(rank: int) -> Any:
    def made(real: Callable[..., None]) -> Callable[..., None]:
        def init(self: Publisher, *given: Any, overlap: bool, **more: Any) -> None:
            real(self, *given, overlap=False, **more)

        return init

    return in_place_of(Publisher, "__init__", made)


CASES = (
    Case(
        name="R1",
        title="every part of a gather is waited for",
        world=3,
        check=every_part_is_waited_for,
        mistakes=(
            Mistake(
                what="only the last of several broadcasts is waited for",
                put_in=waits_for_the_last,
                seen_as="replica of layer",
            ),
            Mistake(what="nothing is waited for", put_in=waits_for_nothing, seen_as="replica of layer"),
        ),
    ),
    Case(
        name="R2",
        title="the source of a collective stays until it is waited for",
        world=2,
        check=sources_stay,
        mistakes=(
            Mistake(
                what="a handle keeps nothing alive",
                put_in=handles_keep_nothing,
                seen_as="the source of an all-to-all was freed while it was in flight",
            ),
            Mistake(
                what="two passages that are under way are given one place",
                put_in=two_passages_in_one_place,
                seen_as="StateError: .* wants a slot that .* has not given back",
            ),
            Mistake(
                what="a slot is given back before its passage was waited for",
                put_in=slots_are_given_back_early,
                seen_as="the source of an all-to-all was overwritten while it was in flight",
            ),
        ),
    ),
    Case(
        name="R3",
        title="staging memory is bounded, and let go of",
        world=2,
        check=staging_is_let_go,
        mistakes=(
            Mistake(
                what="freeing keeps the slots",
                put_in=slots_stay,
                seen_as="bytes are still held after",
            ),
            Mistake(
                what="staging memory grows with every step",
                put_in=staging_grows,
                seen_as="bytes more after two more steps",
            ),
        ),
    ),
    Case(
        name="R6",
        title="a bucket is waited for once, on every rank alike",
        world=3,
        check=one_wait_per_bucket,
        mistakes=(
            Mistake(
                what="a rank waits for every part that it does not own",
                put_in=waits_one_by_one,
                seen_as=("overlapped: .*waits differ between ranks", r"in step\(\): .*waits differ between ranks"),
            ),
        ),
    ),
    Case(
        name="R7",
        title="overlapped gathers without overlapped reductions",
        world=2,
        check=gathers_without_overlapped_reductions,
        mistakes=(
            Mistake(
                what="what no module has read is left behind",
                put_in=unread_is_left_behind,
                seen_as="cannot become stale: its replica is in flight",
            ),
            Mistake(
                what="gathers overlap only where reductions do",
                put_in=off_without_reductions,
                seen_as="nothing is left to forward",
            ),
        ),
    ),
    Case(
        name="R8",
        title="a gather leaves gradients alone",
        world=2,
        check=gradients_are_left_alone,
        mistakes=(
            Mistake(
                what="params are received in the gradient buffer",
                put_in=through_gradients,
                seen_as=("was written by a gather", "weights of .* differ"),
            ),
            Mistake(
                what="lent gradients are not zeroed again",
                put_in=lent_gradients_stay_dirty,
                seen_as="lent gradients are not zero again",
            ),
            Mistake(
                what="gradients that are needed are lent too",
                put_in=needed_gradients_are_lent,
                seen_as="was lent to a gather",
            ),
        ),
    ),
    Case(
        name="R9",
        title="gathers that forward starts, with autograd on",
        world=2,
        check=gathers_know_no_autograd,
        mistakes=(
            Mistake(
                what="a gather is started with autograd on",
                put_in=with_autograd,
                seen_as="a gather was started with autograd on",
            ),
            Mistake(
                what="new weights are written through the params",
                put_in=through_params,
                seen_as="a leaf Variable that requires grad",
            ),
        ),
    ),
    Case(
        name="R12",
        title="a forced sync with gathers pending",
        world=2,
        check=forced_with_gathers_pending,
        mistakes=(
            Mistake(
                what="a forced sync waits and does not copy what arrived",
                put_in=waits_and_does_not_copy,
                seen_as="weights of .* differ",
            ),
            Mistake(
                what="a forced sync waits and does not mark",
                put_in=waits_and_does_not_mark,
                seen_as="is not marked fresh",
            ),
            Mistake(
                what="a forced sync marks and does not wait",
                put_in=marks_and_does_not_wait,
                seen_as="weights of .* differ",
            ),
        ),
    ),
    Case(
        name="R13",
        title="buffers are freed with gathers pending",
        world=2,
        check=freed_with_gathers_pending,
        mistakes=(
            Mistake(
                what="freeing drops what arrives",
                put_in=freeing_drops_what_arrives,
                seen_as="weights of .* differ",
            ),
        ),
    ),
    Case(
        name="D10",
        title="a forced sync and freed buffers, with gathers pending",
        world=2,
        check=forced_and_freed,
        mistakes=(
            Mistake(
                what="a forced sync does not wait for gathers in flight",
                put_in=marks_and_does_not_wait,
                seen_as=("forced, then freed: .*replica of", "freed, then forced: .*replica of"),
            ),
            Mistake(
                what="freeing forgets gathers in flight",
                put_in=freeing_drops_what_arrives,
                seen_as="freed, then forced: .*replica of",
            ),
        ),
    ),
    Case(
        name="R17",
        title="step() from within another optimizer's",
        world=2,
        check=stepped_from_outside,
        mistakes=(
            Mistake(
                what="only the outermost step() publishes",
                put_in=outermost_only,
                seen_as="chained, overlapped: weights of .* differ",
            ),
        ),
    ),
    Case(
        name="R42",
        title="whoever reads a weight after a step",
        world=2,
        check=every_reader_sees_new_weights,
        mistakes=(
            Mistake(
                what="an evaluation does not wait for what it reads",
                put_in=evaluation_skips_the_landing,
                seen_as="evaluation: weights of evaluation differ",
            ),
            Mistake(
                what="only forward brings weights up to date",
                put_in=only_forward_asks,
                seen_as=r"state_dict\(\): weights of .* differ",
            ),
        ),
    ),
    Case(
        name="R43",
        title="dense and expert domains are published together",
        world=4,
        check=both_domains_then_publish,
        mistakes=(
            Mistake(
                what="all buckets are published before the experts have stepped",
                put_in=dense_before_experts,
                seen_as=(r"overlapped: .*replica of .*experts", r"in step\(\): .*replica of .*experts"),
            ),
        ),
    ),
    Case(
        name="R44",
        title="one setting for overlapped gathers",
        world=2,
        check=one_setting,
        mistakes=(
            Mistake(
                what="ranks are not compared",
                put_in=ranks_are_not_compared,
                seen_as="ranks with different overlap_param_gather: nothing was raised",
            ),
            Mistake(
                what="step() goes by a copy that says overlapped",
                put_in=copy_says_overlapped,
                seen_as="without overlap bucket .* is not marked fresh after",
            ),
            Mistake(
                what="step() goes by a copy that says not overlapped",
                put_in=copy_says_in_step,
                seen_as="with overlap nothing was left to forward",
            ),
        ),
    ),
)

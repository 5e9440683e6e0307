"""What was planned is what a run allocates and sends: every category of memory, and every collective, on every rank."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise import quant
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.comm.leaving import take_back
from layerwise.engine.exchanger import Cohort
from layerwise.engine.update import Update
from layerwise.kernels.stored import stored_of
from layerwise.planner.memory import Memory, memory_by_rank
from layerwise.planner.rules import Rules, schedule_for
from layerwise.planner.timing import numbers_of, sent_by_rank
from tests.foreign import with_mx_weights
from tests.marks import sampled
from tests.ranks import run_ranks
from tests.worlds import MIXED, Zoo, cohorts_of, deliver, gradient, layout_named

LAYOUTS = ("flat", "padded", "compact", "replicated")
MATRIX: dict[str, Any] = {
    "muon": layerwise.Muon(lr=0.1, steps=1),
    "muon fp32": layerwise.Muon(lr=0.1, steps=1, ns_dtype="fp32"),
    "normuon": layerwise.NorMuon(lr=0.1, steps=1),
    "adamuon": layerwise.AdaMuon(lr=0.1, steps=1),
    "adamw": layerwise.AdamW(lr=0.1),
}
OTHER: dict[str, Any] = {"adamw": layerwise.AdamW(lr=0.1), "lion": layerwise.Lion(lr=0.1)}


@dataclass(frozen=True)
class Setup:
    """One run."""

    layout: str = "flat"
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    reducer: str = "collective"
    shard_grads: bool = False
    matrix: str = "muon"
    other: str = "adamw"
    cohort_numel: int = 200
    """Few enough for several cohorts on the ranks of a test."""
    recipe: str = ""
    """How weights are kept, where that is not in their dtype."""
    skip: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    """Params that are frozen once they were quantised."""
    param_gather: str = "quantized"
    bucket_mib: float = 0.001
    sabotage: str = ""
    """What the run does that no plan says."""

    def is_refused(self, world: int) -> bool:
        """What cannot be combined, written down by hand."""
        if world == 1:
            return False
        if self.reducer != "collective" and self.layout == "replicated":
            return True
        return self.shard_grads and self.reducer == "collective" and self.layout in ("compact", "replicated")


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the memory behind tensors, by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def memory_of(param: Tensor) -> list[Tensor]:
    """What a param is made of: itself, or codes and the values that they were made of."""
    stored = stored_of(param)
    if stored is None:
        return [param]
    return [*stored.codes, *([] if stored.given is None else [stored.given])]


def counted(model: layerwise.DataParallel, optimizer: layerwise.Optimizer, slots: int, passing: int) -> Memory:
    """What this rank really holds, with so many bytes of exchange slots, of which some pass. A category has what no category before it has: some memory is two things at once."""
    shards, replicas = model.engine.storage.shards, model.engine.storage.replicas
    home_state = [tensor for tensors in optimizer.stepper.update._home_state.values() for tensor in tensors.values()]
    frozen = [tensor for param in model.parameters() if not param.requires_grad for tensor in memory_of(param)]
    rings = [replica.ring for replica in replicas if replica.ring is not None]
    held: list[Iterable[Tensor]] = [
        [
            *(tensor for replica in replicas for tensor in replica.held),
            *(shard.weight for shard in shards if shard.weight is not None),
            *frozen,
        ],
        [
            *(replica.grad for replica in replicas if replica.grad is not None),
            *(replica.grad_shard for replica in replicas),
            *(shard.update for shard in shards),
            *(tensor for ring in rings for tensor in ring.tensors),
        ],
        [shard.master for shard in shards],
        [*(tensor for shard in shards for tensor in shard.state.values()), *home_state],
    ]
    seen: dict[int, int] = {}
    totals = []
    for tensors in held:
        found = {address: nbytes for address, nbytes in storages(tensors).items() if address not in seen}
        totals.append(sum(found.values()))
        seen.update(found)
    params, grads, masters, state = totals
    staging = sum(storages(tensor for replica in replicas for tensor in replica.staging).values())
    aside = sum(tensor.untyped_storage().nbytes() for tensor in (*frozen, *home_state))
    if model.engine.storage.nbytes() + aside != sum(totals) + staging:
        raise AssertionError(f"storage says {model.engine.storage.nbytes()} + {aside}, counted {totals} + {staging}")
    # What Newton-Schulz needs for itself is that of a GPU's kernels: benchmarks/step_memory.py measures it.
    return Memory(
        params=params, grads=grads, masters=masters, state=state, slots=slots + staging, workspace=0, passing=passing
    )


class Watch:
    """Knows of tensors that come and go, and how many bytes of them were alive at once.

    gloo's own thread lets go of a tensor some microseconds after it was waited for, so what exceeds the limit is looked at
    again before it counts, for a second or two in all.
    """

    def __init__(self, own: dict[int, int], limit: int) -> None:
        self._own = own
        self._limit = limit
        self._looks = 1500  # a millisecond each
        self._alive: list[tuple[weakref.ref[Tensor], int, int]] = []
        """Tensors, with the addresses and bytes of their memory: a collective has aliases of what it was given."""
        self.peak = 0

    def see(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self._own:
                self._alive.append((weakref.ref(tensor), memory.data_ptr(), memory.nbytes()))
        while self._sum() > max(self._limit, self.peak) and self._looks > 0:
            self._looks -= 1
            time.sleep(0.001)
            take_back()
        self.peak = max(self.peak, self._sum())

    def _sum(self) -> int:
        self._alive = [found for found in self._alive if found[0]() is not None]
        return sum({address: nbytes for _, address, nbytes in self._alive}.values())


@contextmanager
def watched(model: layerwise.DataParallel, limit: int) -> Iterator[Watch]:
    """See everything that is sent or received by an all-to-all, the batches of matrices, and what becomes of them."""
    replicas = model.engine.storage.replicas
    own = [replica.grad for replica in replicas if replica.grad is not None]
    watch = Watch(storages(own), limit)
    all_to_all, unpack, direction = Communicator.all_to_all, Cohort.unpack, Update._direction

    def seen_all_to_all(self: Any, op: Any, send: Tensor, receive: Tensor, *splits: Any) -> Handle:
        rings = [replica.ring for replica in replicas if replica.ring is not None]
        leased = storages(tensor for ring in rings for tensor in ring.tensors)
        if op.phase in ("exchange", "return"):  # in slots, which are counted as they are
            return all_to_all(self, op, send, receive, *splits)
        handle = all_to_all(self, op, send, receive, *splits)
        seen = (send, receive, *handle._keep_alive)
        watch.see(*(t for t in seen if t.untyped_storage().data_ptr() not in leased))
        return handle

    # A wire as fast as backward: a bucket's reduction is over when the next bucket of its buffer has filled.
    buffer_of = {f"of {replica.plan.label}": replica.plan.buffer for replica in replicas}
    newest: dict[int, str] = {}
    check = Communicator._check

    def noted(self: Any, name: str, *args: Any, **named: Any) -> None:
        if name.startswith("reduce "):
            newest[buffer_of[name[name.index("of ") :]]] = name
        check(self, name, *args, **named)

    def seen_unpack(self: Any, *args: Any) -> list[Tensor]:
        tensors = unpack(self, *args)
        watch.see(*tensors)
        return tensors

    def seen_direction(self: Any, *args: Any) -> Tensor:
        tensor = direction(self, *args)
        watch.see(tensor)
        return tensor

    with ExitStack() as stack:
        for owner, name, function in (
            (Communicator, "all_to_all", seen_all_to_all),
            (Cohort, "unpack", seen_unpack),
            (Update, "_direction", seen_direction),
            (Handle, "is_ready", property(lambda handle: handle.label not in newest.values())),
            (Communicator, "_check", noted),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield watch


def enlarge(model: layerwise.DataParallel, what: str) -> None:
    """Hold more than any plan says."""
    shard, replica = model.engine.storage.shards[0], model.engine.storage.replicas[0]
    match what:
        case "params":
            replica.weights = replica.weights.repeat(2)
        case "grads":
            shard.update = shard.update.repeat(2)
        case "masters":
            shard.master = shard.master.repeat(2)
        case "state":
            shard.state["more"] = torch.zeros_like(shard.master)


@contextmanager
def sabotaged(optimizer: layerwise.Optimizer, what: str) -> Iterator[None]:
    """Keep or send more than any plan says while it runs."""
    with ExitStack() as stack:
        match what:
            case "slots":  # matrices are not dropped when they have been orthogonalised
                kept: list[Any] = []
                unpack = Cohort.unpack

                def hoarding(self: Any, *args: Any) -> list[Tensor]:
                    tensors = unpack(self, *args)
                    kept.extend(tensors)
                    return tensors

                stack.enter_context(mock.patch.object(Cohort, "unpack", hoarding))
            case "ring":  # a slot is larger than any passage
                slots = optimizer.stepper.update.slots
                slots.plan = slots.plan._replace(nbytes=slots.plan.nbytes + 64)
            case "bytes":
                average = Update.average

                def wordy(self: Any, *args: Any) -> None:
                    optimizer.engine.everyone._count("all_reduce", 4)
                    average(self, *args)

                stack.enter_context(mock.patch.object(Update, "average", wordy))
        yield


def landing_nbytes(model: layerwise.DataParallel) -> int:
    """Bytes of the slots in which gathers land that become codes, once a step has been taken. As many as two buckets need
    whose gradients are released, each as long as the longest of all that are kept so; written down by hand."""
    staged = [replica for replica in model.engine.storage.replicas if replica.plan.is_staged]
    released = [replica for replica in staged if replica.ring is not None]
    return min(2, len(released)) * 2 * max((replica.plan.numel for replica in staged), default=0)


def differences(
    rank: int, setup: Setup, model: layerwise.DataParallel, rules: Rules, optimizer: layerwise.Optimizer
) -> list[str]:
    """Two steps on this rank: what it holds and sends that was not planned."""
    plan = model.plan
    schedule = schedule_for(plan, rules)
    planned = memory_by_rank(plan, schedule, rules)[rank]
    numbers = numbers_of(plan, rank)
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    found: list[str] = []
    if numbers != {domain: model.engine.storage.ranks[domain] for domain in plan.world_by_domain}:
        found.append(f"numbers {model.engine.storage.ranks}, planned {numbers}")
    if sum(schedule.bytes_by_collective(numbers).values()) != sent_by_rank(schedule.ops, plan.world)[rank]:
        found.append("bytes: two ways to add up the schedule")
    if optimizer.schedule != schedule:
        found.append("the optimizer has another schedule than was planned")
    slots = optimizer.stepper.update.slots
    come_and_go = planned.slots - slots.plan.nbytes
    with sabotaged(optimizer, setup.sabotage), watched(model, come_and_go - landing_nbytes(model)) as watch:
        for step in range(2):
            grads = {fqn: gradient(fqn, shape, rank, step, 0) for fqn, shape in shapes.items()}
            deliver(model, grads, sync=True)
            optimizer.step()
            expected = schedule.bytes_by_collective(numbers)
            if dict(optimizer.stats.bytes_by_collective) != expected:
                found.append(f"bytes: sent {dict(optimizer.stats.bytes_by_collective)}, planned {expected}")
    enlarge(model, setup.sabotage)
    really = counted(model, optimizer, watch.peak + slots.nbytes, watch.peak).to_json()
    for name, nbytes in planned.to_json().items():
        # With leases and sums of ours, each buffer has so much in flight at some time, but not all of them at the same.
        is_bound = name == "slots" and setup.shard_grads and setup.reducer != "collective"
        fits = really[name] == nbytes or (is_bound and really[name] < nbytes)
        if name not in ("total", "workspace") and not fits:
            found.append(f"{name}: holds {really[name]}, planned {nbytes}")
    model.ensure()
    optimizer.free_buffers()
    if any(replica.staging for replica in model.engine.storage.replicas):
        found.append("slots: some in which gathers land were not freed")
    if slots.nbytes or any(
        ring.tensors for ring in {replica.ring for replica in model.engine.storage.replicas} if ring
    ):
        found.append("slots: some were not freed")
    return [f"rank {rank} {setup}: {text}" for text in found]


def quantized(setup: Setup, module: nn.Module) -> nn.Module:
    if setup.recipe == "torchao":
        made = quant.adopt(module, with_mx_weights(module, skip=("head.weight", *setup.skip), swizzled=True))
    else:
        made = layerwise.quantize(module, setup.recipe, skip=setup.skip) if setup.recipe else module
    for fqn in setup.frozen:
        made.get_parameter(fqn).requires_grad_(False)
    return made


def build(setup: Setup, module: nn.Module, **more: Any) -> tuple[layerwise.DataParallel, Rules, layerwise.Optimizer]:
    with cohorts_of(setup.cohort_numel):
        model = layerwise.DataParallel(
            quantized(setup, module.to(setup.dtype)),
            layout=layout_named(setup.layout),
            grad_dtype=setup.grad_dtype,
            reducer=setup.reducer,  # type: ignore[arg-type]
            shard_grads=setup.shard_grads,
            param_gather=setup.param_gather,  # type: ignore[arg-type]
            bucket_mib=setup.bucket_mib,
            **more,
        )
    rules = Rules(matrix=MATRIX[setup.matrix], other=OTHER[setup.other])
    return model, rules, layerwise.Optimizer(model, matrix=rules.matrix, other=rules.other)


def run_all(rank: int, world: int, setups: list[Setup]) -> list[str]:
    found = []
    for setup in setups:
        torch.manual_seed(5)
        model, rules, optimizer = build(setup, Zoo())
        found += differences(rank, setup, model, rules, optimizer)
    return found


def setups_of(layout: str, world: int) -> list[Setup]:
    """Everything that changes memory, with everything it can be combined with."""
    dtypes = (torch.float32, torch.bfloat16)
    everything = [
        Setup(layout=layout, dtype=dtype, grad_dtype=grad_dtype, reducer=reducer, shard_grads=shard_grads)
        for dtype, grad_dtype, reducer, shard_grads in product(dtypes, dtypes, ("collective", "ordered"), (False, True))
    ]
    base = Setup(layout=layout, dtype=torch.bfloat16)
    everything += [replace(base, matrix=matrix) for matrix in MATRIX if matrix != "muon"]
    everything += [
        replace(base, other="lion", matrix="normuon"),
        replace(base, cohort_numel=10**6),
        replace(base, cohort_numel=1),
    ]
    return [setup for setup in everything if not setup.is_refused(world)]


@pytest.mark.broad
@pytest.mark.parametrize("world", sampled([1, 2, 3], 1, 3))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_are_the_bytes_of_a_run(layout: str, world: int) -> None:
    setups = setups_of(layout, world)
    if world != 2:  # all of them on two ranks, and a share of them elsewhere
        setups = setups[world % 2 :: 3]
    assert [text for found in run_ranks(world, run_all, setups) for text in found] == []


@pytest.mark.parametrize(
    "sabotage", sampled(["params", "grads", "masters", "state", "slots", "ring", "bytes"], "grads", "state", "bytes")
)
def test_a_run_that_holds_or_sends_more_is_caught(sabotage: str) -> None:
    """The control: each category is really looked at."""
    setup = Setup(dtype=torch.bfloat16, grad_dtype=torch.bfloat16, sabotage=sabotage)
    category = "slots" if sabotage == "ring" else sabotage
    for found in run_ranks(2, run_all, [setup]):
        assert any(f"{category}: " in text for text in found)
        assert all(f"{category}: " in text or "at_rest: " in text for text in found)
        assert any("at_rest: " in text for text in found) is (sabotage not in ("slots", "bytes"))


# -- experts ---------------------------------------------------------------------------------------


class Sparse(nn.Module):
    """Dense layers around a stack of experts with a bias, in a domain of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.dense = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))
        self.experts = nn.Parameter(torch.ones(3, 10, 8))
        self.expert_bias = nn.Parameter(torch.ones(3, 10))

    def param_domains(self) -> dict[str, str]:
        return {"experts": "expert", "expert_bias": "expert"}


def run_experts(rank: int, world: int, shape: tuple[int, int], setups: list[Setup]) -> list[str]:
    found = []
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep"))
    for setup in setups:
        model, rules, optimizer = build(setup, Sparse(), mesh=mesh)
        if model.plan.world_by_domain["expert"] != shape[0]:
            raise AssertionError(f"the expert domain has {model.plan.world_by_domain['expert']} ranks")
        found += differences(rank, setup, model, rules, optimizer)
    return found


@pytest.mark.parametrize("shape", [pytest.param((2, 2), marks=pytest.mark.slow), (1, 3)])
def test_planned_bytes_of_experts_are_those_of_a_run(shape: tuple[int, int]) -> None:
    setups = [Setup(layout=layout, dtype=torch.bfloat16, matrix="normuon") for layout in (*LAYOUTS, *MIXED)]
    setups += [Setup(reducer="ordered", layout=layout, shard_grads=True) for layout in ("flat", "padded", "compact")]
    found: list[list[str]] = run_ranks(shape[0] * shape[1], run_experts, shape, setups)
    assert [text for texts in found for text in texts] == []


# -- weights that are kept as codes ----------------------------------------------------------------


class Blocks(nn.Module):
    """Layers and a stack whose sizes blocks of a recipe divide, beside what no recipe keeps."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, unit)
        self.up = nn.Linear(unit, 2 * unit)
        self.down = nn.Linear(2 * unit, unit, bias=False)
        self.experts = nn.Parameter(torch.zeros(2, unit, unit))
        self.norm = nn.LayerNorm(unit)
        self.head = nn.Linear(unit, 11, bias=False)


UNITS = {"mxfp8": 32, "blockwise": 128, "torchao": 32}


def run_recipes(rank: int, world: int, setups: list[Setup]) -> list[str]:
    found = []
    for setup in setups:
        torch.manual_seed(5)
        model, rules, optimizer = build(setup, Blocks(UNITS[setup.recipe]))
        staged = [replica for replica in model.engine.storage.replicas if replica.plan.is_staged]
        if bool(staged) != (setup.param_gather == "quantized"):
            raise AssertionError(f"{setup} has {len(staged)} buckets with codes")
        kinds = {bool(placement.recipe) for replica in staged for placement in replica.plan.placements}
        if setup.skip and kinds != {False, True}:
            raise AssertionError(f"{setup} has no bucket with codes and other params")
        found += differences(rank, setup, model, rules, optimizer)
    return found


def recipes_of(layout: str, world: int) -> list[Setup]:
    """Every recipe, with full gradients and without, each weight in a bucket of its own and all of them in one."""
    wide = {"bucket_mib": 64.0, "skip": ("down.weight",)}
    everything = [
        Setup(layout=layout, dtype=torch.bfloat16, recipe=recipe, shard_grads=shard_grads, **buckets)
        for recipe, shard_grads, buckets in product(UNITS, (False, True), ({}, {"bucket_mib": 64.0}, wide))
    ]
    base = Setup(layout=layout, dtype=torch.bfloat16, recipe="mxfp8")
    everything += [
        replace(base, param_gather="bf16"),
        replace(base, frozen=("up.weight", "norm.weight")),
        replace(base, frozen=("up.weight",), param_gather="bf16"),
        replace(base, frozen=("up.weight",), recipe="torchao"),
        replace(base, grad_dtype=torch.bfloat16),
        replace(base, reducer="ordered", shard_grads=True),
    ]
    return [setup for setup in everything if not setup.is_refused(world)]


@pytest.mark.parametrize("world", sampled([1, 2, 3], 1))
@pytest.mark.parametrize("layout", sampled(["flat", "padded", "compact", "replicated"], "flat", "compact"))
def test_planned_bytes_of_codes_are_those_of_a_run(layout: str, world: int) -> None:
    found: list[list[str]] = run_ranks(world, run_recipes, recipes_of(layout, world))
    assert [text for texts in found for text in texts] == []

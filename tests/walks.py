"""Walks: sequences of actions on a model of this rank, with all that a user could see of it noted down, and a transport that brings nothing early.

A walk with overlapped gathers must show what the same walk shows where nothing overlaps. Gradients are made multiples of a power of two, so that sums over
ranks are exact in any order, and layouts can be compared.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import layerwise
from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.errors import NonFiniteError, PlanMismatchError, StateError
from layerwise.memory.replicas import ReplicaState
from tests import seams
from tests.reference.oracle import Hyper
from tests.worlds import hash_of, hash_tensors, layout_named, rules

WIDTH, VOCABULARY = 8, 11
Action = tuple[str, int]
"""What happens next, and the number that its data and its choices come from."""


# ------------------------------------------------------------------------------------------------ models


class Part(nn.Module):
    """A piece of a network that reads its weights in many ways: by calling modules, one of them twice and one only now and then, through a function that is
    handed another module's weight, and as a param of its own."""

    def __init__(self, *, is_first: bool, is_last: bool, has_experts: bool, checkpointing: bool) -> None:
        super().__init__()
        self.is_first, self.is_last, self.has_experts, self.checkpointing = (
            is_first,
            is_last,
            has_experts,
            checkpointing,
        )
        if is_first:
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH, bias=False)
        self.rare = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.lent = nn.Linear(WIDTH, WIDTH, bias=False)
        if has_experts:
            self.experts = nn.Parameter(torch.empty(2, WIDTH, 6).normal_(std=0.3))
        if is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            if is_first:
                self.head.weight = self.embed.weight

    def param_domains(self) -> dict[str, str]:
        return {"experts": "expert"} if self.has_experts else {}

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        for _ in range(2):
            x = checkpoint(self._block, x, use_reentrant=False) if self.checkpointing else self._block(x)
        if rare:
            x = x + self.rare(x)
        x = self.norm(x)
        x = x + functional.linear(x, self.lent.weight)
        if self.has_experts:
            x = x + sum(torch.tanh(x @ self.experts[expert]) @ self.experts[expert].T for expert in range(2))
        return self.head(x) if self.is_last else x

    def _block(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is spread over ranks, and when its weights are gathered."""

    world: int = 2
    layout: str = "flat"
    overlap: bool = True
    prefetch: int | None = None
    aligned: bool = False
    reducer: str = "collective"
    shard_grads: bool = False
    grad_overlap: bool = True
    checked: bool = False
    compared: bool = False
    dtype: torch.dtype = torch.float32
    pp: int = 1
    ep: int = 1
    chunks: int = 1
    matrix: str = "muon"
    checkpointing: bool = False
    shuffled: bool = False
    """Modules are registered in another order than they run in."""
    nonfinite: str = "skip"
    bucket_mib: float | None = 0.0003
    late: bool = False
    """A replica holds NaN from when its gather is launched until that was waited for."""

    @property
    def lazy(self) -> bool:
        """Whether a gather waits for all ranks to come near: then they must read the same."""
        return self.prefetch is not None or self.aligned

    def without_overlap(self) -> Way:
        """The same, but replicas are up to date when `step()` returns."""
        return replace(self, overlap=False, late=False)

    def plain(self) -> Way:
        """What it is compared with: no shards to gather, where that makes no other bits."""
        return replace(
            self.without_overlap(),
            layout="replicated",
            reducer="collective",
            shard_grads=False,
            grad_overlap=False,
            checked=False,
        )

    def build(self, rank: int) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
        """A model with the same weights on all ranks of a stage, and experts of each place's own."""
        stage = rank // (self.world // self.pp)
        torch.manual_seed(5 + stage)
        last = self.pp * self.chunks - 1
        parts = [
            Part(
                is_first=number == 0,
                is_last=number == last,
                has_experts=self.ep > 1,
                checkpointing=self.checkpointing,
            ).to(self.dtype)
            for number in range(stage, self.pp * self.chunks, self.pp)
        ]
        if self.shuffled:
            for part in parts:
                part._modules = dict(reversed(part._modules.items()))
        shape = (self.pp, self.world // self.pp // self.ep, self.ep)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep")) if self.pp > 1 or self.ep > 1 else None
        model = seams.data_parallel(
            parts if self.chunks > 1 else parts[0],
            mesh=mesh,
            layout=layout_named(self.layout),
            reducer=self.reducer,  # type: ignore[arg-type]
            shard_grads=self.shard_grads,
            overlap_grad_reduce=self.grad_overlap,
            overlap_param_gather="by chunk" if self.overlap and self.aligned else self.overlap,
            prefetch=self.prefetch,
            check_collectives=self.checked,
            bucket_mib=self.bucket_mib,
        )
        for param in model.parameters():
            # Multiples of 2^-10.
            param.register_hook(lambda grad: (grad * 1024).round() / 1024)
        hyper = Hyper(matrix=self.matrix, ns_dtype=torch.float32, weight_decay=0.1, clip=1.0)
        optimizer = layerwise.Optimizer(model, **rules(hyper, nonfinite=self.nonfinite), check_replicas=self.compared)
        return model, optimizer


# ------------------------------------------------------------------------------------------------ a walk


@dataclass(frozen=True)
class Seen:
    """What one action showed: words, or parts of tensors by name as (start, stop, values)."""

    action: str
    words: str = ""
    parts: dict[str, tuple[int, int, Tensor]] | None = None


class Walk:
    """Carries out actions on one rank, and notes all that a user could see."""

    def __init__(self, rank: int, way: Way, pause: Callable[[], None] = lambda: None) -> None:
        self.rank, self.way, self._pause = rank, way, pause
        self.seen: list[Seen] = []
        self.met: Counter[str] = Counter()
        """How often something happened without which a comparison would say nothing."""
        self._saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
        self._begin()

    def _begin(self) -> None:
        self.model, self.optimizer = self.way.build(self.rank)
        self._kept = dict(self.model.engine.storage.params)  # references from before any step
        self._chunks = self.model.engine.chunks

    def take(self, actions: Sequence[Action]) -> None:
        for name, number in actions:
            self._pause()
            getattr(self, "_" + name.replace(" ", "_"))(number)

    def _note(self, action: str, words: object = "", parts: dict[str, tuple[int, int, Tensor]] | None = None) -> None:
        self.seen.append(Seen(action, str(words), parts))

    def _is_alone(self, number: int) -> bool:
        return self.rank == number % self.way.world

    def _loss(self, number: int, *, rare: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(hash_of(f"data {self.rank} {number}"))
        x = torch.randint(VOCABULARY, (2, 5), generator=generator)
        losses = []
        for part in self._chunks:
            if not part.is_first and self.way.pp > 1:
                # Another stage's output in a real pipeline, which does not matter here.
                x = torch.randn(2, 5, WIDTH, generator=generator).to(self.way.dtype)
            x = (self.model if len(self._chunks) == 1 else part)(x, rare)
            losses.append(x.float().square().mean())
        loss = sum(losses) if self.way.pp > 1 else losses[-1]
        self._note("loss", loss.item().hex())
        return loss

    def _weights(self) -> str:
        self.met["reads of stale weights"] += any(
            replica.state is not ReplicaState.FRESH for replica in self.model.engine.storage.replicas
        )
        return hash_tensors(self._kept[fqn] for fqn in sorted(self._kept))

    # -- training

    def _forward(self, number: int) -> None:
        self._loss(number)

    def _backward(self, number: int) -> None:
        self._loss(number, rare=number % 3 == 0).backward()

    def _accumulate(self, number: int) -> None:
        with self.model.no_sync():
            self._loss(number).backward()

    def _other_modules(self, number: int) -> None:
        """Ranks run different modules, where they may."""
        self._loss(number, rare=self.way.lazy or self._is_alone(number)).backward()

    def _idle_and_step(self, number: int) -> None:
        if self._is_alone(number):
            self._loss(number).backward()
        self._step(number)

    def _idle_block(self, number: int) -> None:
        with self.model.no_sync():
            if self._is_alone(number) and not self.way.lazy:
                self._loss(number).backward()

    def _step(self, number: int) -> None:
        try:
            self.optimizer.step()
        except NonFiniteError as error:
            self._note("step", f"NonFiniteError: {error}")
        stats, storage = self.optimizer.stats, self.model.engine.storage
        states = Counter(replica.state for replica in storage.replicas)
        self.met["buckets stale after a step"] += states[ReplicaState.STALE]
        self.met["buckets in flight after a step"] += states[ReplicaState.IN_FLIGHT]
        self.met["skipped steps" if stats.skipped else "steps"] += 1
        held = {}
        for shard in storage.shards:
            for span in shard.spans:
                for name, tensor in {"master": shard.master, **shard.state}.items():
                    held[f"{name} of {span.fqn}"] = (span.start, span.stop, tensor[span.part].clone())
        self._note("step", replace(stats, bytes_by_collective={}), held)

    def _step_twice(self, number: int) -> None:
        self._step(number)
        self._step(number)

    def _overflow_and_step(self, number: int) -> None:
        """One rank's gradients are infinite."""
        (self._loss(number) * (float("inf") if self._is_alone(number) else 1.0)).backward()
        self._step(number)

    def _zero_grad(self, number: int) -> None:
        (self.optimizer if number % 2 else self.model).zero_grad()

    def _scheduler(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.75

    # -- failures

    def _fail(self, number: int, *, backward: bool, on: bool = True) -> None:
        """A forward that raises in the middle, or a backward."""

        def burst(_: object) -> None:
            raise FloatingPointError("injected")

        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            if backward:
                output.register_hook(burst)
            else:
                burst(None)

        part = self._chunks[number % len(self._chunks)]
        handle = (part.up if backward else part.norm).register_forward_hook(hook) if on else None
        try:
            self._loss(number).backward()
        except FloatingPointError:
            self.met["failures"] += 1
        finally:
            if handle is not None:
                handle.remove()

    def _raise_in_forward(self, number: int) -> None:
        self._fail(number, backward=False)
        self.optimizer.zero_grad()

    def _raise_in_backward(self, number: int) -> None:
        self._fail(number, backward=True)
        self.optimizer.zero_grad()

    def _raise_in_block(self, number: int) -> None:
        with self.model.no_sync():
            self._fail(number, backward=number % 2 == 0)
        self.optimizer.zero_grad()

    def _raise_alone_and_step(self, number: int) -> None:
        self._fail(number, backward=False, on=self._is_alone(number))
        self._step(number)

    def _late_backward(self, number: int) -> None:
        """Of a loss from before a step: weights have moved since, unless that was skipped."""
        loss = self._loss(number)
        self._step(number)
        try:
            loss.backward()
            self._note("late backward", f"skipped {self.optimizer.stats.skipped}")
        except RuntimeError as error:
            self._note("late backward", "modified by an inplace operation" in str(error))
        self.optimizer.zero_grad()

    def _refused(self, action: str, use: Callable[[], object]) -> None:
        """A wrong use that has an error with a name on every rank."""
        try:
            use()
        except (PlanMismatchError, StateError, ValueError) as error:
            self._note(action, type(error).__name__)
            self.met["named errors"] += 1
        else:
            raise AssertionError(f"{action} was not refused")

    def _other_settings_and_step(self, number: int) -> None:
        groups = self.optimizer.param_groups
        before = [group["lr"] for group in groups]
        if self._is_alone(number):
            groups[-1]["lr"] *= 0.5
        self._refused("other settings and step", self.optimizer.step)
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr

    def _load_nothing(self, number: int) -> None:
        """One rank has lost its file."""
        state = {} if self._is_alone(number) else self.optimizer.state_dict(part=True)
        self._refused("load nothing", lambda: self.optimizer.load_state_dict(state))

    def _edit_alone_and_step(self, number: int) -> None:
        """For models that compare replicas; there is no way on from here."""
        if self._is_alone(number):
            with torch.no_grad():
                self._kept[sorted(self._kept)[number % len(self._kept)]].add_(1.0)
        self._refused("edit alone and step", self.optimizer.step)

    # -- readers

    def _eval(self, number: int) -> None:
        self.model.eval()
        with torch.no_grad():
            self._loss(number, rare=number % 2 == 0)
        self.model.train()

    def _ensure(self, number: int) -> None:
        self.model.ensure()
        self._note("ensure", {replica.state for replica in self.model.engine.storage.replicas})

    def _hash(self, number: int) -> None:
        self._note("hash", self._weights())

    def _read(self, number: int) -> None:
        """One weight by a reference that was kept, by one rank alone where it may."""
        fqn = sorted(self._kept)[number % len(self._kept)]
        if self.way.lazy or self._is_alone(number):
            replica = self.model.engine.storage.replicas[self.model.plan.bucket_of[fqn]]
            self.met["reads of stale weights"] += replica.state is not ReplicaState.FRESH
            self._note("read", hash_tensors([self._kept[fqn]]))
        else:
            self._note("read")

    def _foreach(self, number: int) -> None:
        fqns = sorted(self._kept)
        self._note("foreach", hash_tensors(torch._foreach_mul([self._kept[fqn] for fqn in fqns], 2.0)))

    def _copy(self, number: int) -> None:
        copied = [copy.deepcopy(chunk) for chunk in self._chunks]
        kinds = {type(param).__name__ for chunk in copied for param in chunk.parameters()}
        self._note(
            "copy", [kinds, hash_tensors(param for chunk in copied for _, param in sorted(chunk.named_parameters()))]
        )

    def _save(self, number: int) -> None:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        file = io.BytesIO()
        torch.save(self.optimizer.state_dict(part=True), file)
        file.seek(0)
        self._saved = weights, torch.load(file, weights_only=True)
        self._note("save", hash_tensors(weights[name] for name in sorted(weights)))

    def _free(self, number: int) -> None:
        self.optimizer.free_buffers()

    def _metric(self, number: int) -> None:
        total = torch.full((5,), float(self.rank + 1))
        dist.all_reduce(total)
        self._note("metric", total.tolist())

    # -- writers

    def _load(self, number: int) -> None:
        if self._saved is None:
            return
        weights, state = self._saved
        if number % 2:
            self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(copy.deepcopy(state))
        if number % 4 < 2:
            self.model.load_state_dict(weights)

    def _resume(self, number: int) -> None:
        """Fresh objects go on from what was saved; gathers of the old ones may still be under way."""
        if self._saved is not None:
            self.optimizer.zero_grad()
            self._begin()
            self._load(number)

    def _edit(self, number: int) -> None:
        with torch.no_grad():
            for fqn in sorted(self._kept)[number % 2 :: 2]:
                self._kept[fqn].mul_(0.5)

    def _edit_behind(self, number: int) -> None:
        for param in self._kept.values():
            param.data.mul_(0.5)
        self.optimizer.pull_from_replicas()


def difference(found: Sequence[Seen], expected: Sequence[Seen]) -> str:
    """The first thing that a walk showed and the other did not."""
    for at, (one, other) in enumerate(zip(found, expected, strict=False)):
        if (one.action, one.words) != (other.action, other.words):
            return f"thing {at}: {one.action} {one.words} against {other.action} {other.words}"
        for name, (start, stop, values) in (one.parts or {}).items():
            first, _, whole = (other.parts or {})[name]
            if not torch.equal(values, whole[start - first : stop - first]):
                return f"thing {at}: {one.action}, {name} from {start} to {stop}"
    return "" if len(found) == len(expected) else f"{len(found)} things were seen against {len(expected)}"


# ------------------------------------------------------------------------------------------------ a transport of our own


class Arrival:
    """A gather whose result comes when it is waited for, and not before."""

    def __init__(self, inner: Handle, full: Tensor, scratch: Tensor, theirs: Tensor) -> None:
        self._inner, self._full, self._scratch, self._theirs = inner, full, scratch, theirs

    def wait(self) -> None:
        self._inner.wait()
        self._full[self._theirs] = self._scratch[self._theirs]

    def is_completed(self) -> bool:
        return False


def _others_in(full: Tensor, mine: Sequence[slice]) -> Tensor:
    theirs = torch.ones(full.numel(), dtype=torch.bool)
    for part in mine:
        theirs[part] = False
    return theirs


def _arriving_late(start: Callable[[Tensor], Handle], full: Tensor, mine: Sequence[slice]) -> Handle:
    """A gather into memory of its own, while what others send is NaN where it will be read."""
    scratch, theirs = full.clone(), _others_in(full, mine)
    inner = start(scratch)
    full[theirs] = torch.nan
    return Handle(inner.label, full, (full, scratch), (Arrival(inner, full, scratch, theirs),))


@contextmanager
def transport(*, late: bool, pause: Callable[[], None] = lambda: None, drop: int | None = None) -> Iterator[None]:
    """Collectives that pause, gathers that bring nothing before they are waited for, and one of them, with `drop`, that nobody waits for."""
    gather, uneven = Communicator.all_gather, Communicator.uneven_all_gather
    waited, landed = Handle.wait, Arrival.wait
    waits = iter(range(10**9))

    def all_gather(self: Communicator, op: Any, shard: Tensor, full: Tensor) -> Handle:
        pause()
        offset = int(shard.storage_offset() - full.storage_offset())
        mine = slice(offset, offset + shard.numel())
        if not late or self.world == 1:
            return gather(self, op, shard, full)
        return _arriving_late(lambda scratch: gather(self, op, scratch[mine], scratch), full, [mine])

    def uneven_all_gather(self: Communicator, op: Any, full: Tensor, numels: Sequence[int]) -> Handle:
        pause()
        before = sum(numels[: self.rank])
        if not late or self.world == 1:
            return uneven(self, op, full, numels)
        mine = [slice(before, before + numels[self.rank])]
        return _arriving_late(lambda scratch: uneven(self, op, scratch, numels), full, mine)

    def wait(self: Handle) -> Tensor:
        pause()
        return waited(self)

    def wait_arrival(self: Arrival) -> None:
        if next(waits) != drop:
            landed(self)

    with ExitStack() as patches:
        for owner, name, new in (
            (Communicator, "all_gather", all_gather),
            (Communicator, "uneven_all_gather", uneven_all_gather),
            (Handle, "wait", wait),
            (Arrival, "wait", wait_arrival),
        ):
            patches.enter_context(mock.patch.object(owner, name, new))
        yield

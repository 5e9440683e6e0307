"""The engine: one plan, its memory and its communication, shared by the module wrapper that feeds it gradients and the
optimizer that steps it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from layerwise.comm.collectives import Communicator
from layerwise.comm.contract import Contract
from layerwise.comm.errands import Errands
from layerwise.comm.groups import (
    Domain,
    Groups,
    ProcessGroup,
    any_rank,
    check_reach,
    derive_together,
    device_of,
    tie_groups,
)
from layerwise.comm.leaving import wait_for_backends
from layerwise.comm.machines import on_one_machine
from layerwise.comm.roster import Roster, check_alike, cuts_of_ties
from layerwise.comm.sharded import is_sharded, local_of, reshard
from layerwise.engine.calls import Calls
from layerwise.engine.count import StepCount
from layerwise.engine.gradients import CopiedGradients, Gradients, OwnGradients
from layerwise.engine.publisher import Publisher
from layerwise.engine.reducer import GradReducer
from layerwise.engine.settings import Settings
from layerwise.engine.traffic import Traffic
from layerwise.errors import PlanMismatchError, StateError, listed, warn
from layerwise.layout.meshes import Placed, copied_on
from layerwise.layout.options import DEFAULT_OPTIONS, Options
from layerwise.layout.plan import Plan, make_plan
from layerwise.layout.shards import Ranks
from layerwise.memory.copies import Copies
from layerwise.memory.hooked import claim, hook, is_claimed, unhook
from layerwise.memory.places import is_channels_last, warn_of_views
from layerwise.memory.storage import Storage, one_device
from layerwise.models.table import are_apart, domains_by_prefix, named_buffers, named_params, param_table
from layerwise.models.tree import ModuleTree
from layerwise.routing.geometry import Box
from layerwise.routing.rules import suspicion
from layerwise.routing.spec import DENSE, EXPERT


def plan_for(
    chunks: Sequence[nn.Module],
    options: Options = DEFAULT_OPTIONS,
    *,
    world: int,
    worlds: Mapping[str, int] | None = None,
    ranks: int | None = None,
    ties: Mapping[str, str] | None = None,
    stages_by_tie: Mapping[str, int] | None = None,
    vocabularies: Collection[tuple[int, int]] = (),
    others_train: bool = False,
    placed: Mapping[str, Placed] | None = None,
) -> Plan:
    """The plan of live modules (also on the meta device). `ties` names the copies here of weights that other pipeline
    stages hold too, `vocabularies` are shapes of embeddings there. Where `others_train` something there may be nothing to
    train here. `placed` says how params are cut that somebody else has cut."""
    table = param_table(*chunks, vocabularies=vocabularies, ties=ties or {})
    if not others_train and not any(param.trainable for param in table):
        raise ValueError(
            f"{type(chunks[0]).__name__} has no trainable param: there is nothing to optimise. Unfreeze some of it first."
        )
    return make_plan(
        table, options, world=world, worlds=worlds, ranks=ranks, stages_by_tie=stages_by_tie, placed=placed
    )


def refuse_sharded(params: Mapping[str, nn.Parameter]) -> None:
    """Raise if somebody else has cut a param into DTensors already."""
    for fqn, param in params.items():
        if is_sharded(param):
            raise TypeError(
                f"param {fqn!r} is a DTensor, cut by fully_shard() or parallelize_module(): expected a plain tensor. A sharded model "
                "needs no wrapper: pass it to layerwise.Optimizer as it is. Or pass layerwise.DataParallel the module as it was "
                "before, which shards gradients and optimizer state itself."
            )


def _refuse_claimed(params: Mapping[str, nn.Parameter], groups: Groups) -> None:
    """Raise if a param lies in somebody else's buffers already, or not all of them on one device that ranks can reach."""
    if any(map(is_claimed, params.values())):
        gc.collect()  # a wrapper that nobody has any more may be waiting for that, in a cycle with a scheduler
    for fqn, param in params.items():
        if is_claimed(param):
            raise StateError(
                f"param {fqn!r} lies in the buffers of a DataParallel or of an Optimizer already: updates go there. Wrap a model "
                "once and pass the wrapped model on; a DistributedDataParallel has one Optimizer. To begin anew, call unwrap() of "
                "the DataParallel that has it, or drop that and its optimizer."
            )
    trainables = {fqn: param for fqn, param in params.items() if param.requires_grad}
    if trainables:
        check_reach(groups, one_device(trainables))


class Steps(Protocol):
    """What the engine's other users need of its optimizer."""

    def clip_next_step(self, max_norm: float) -> Tensor: ...

    def free_step_memory(self) -> None: ...


def _undo_all(undo: list[Callable[[], object]]) -> None:
    while undo:
        undo.pop()()


class Engine:
    """Plan, storage, reducer and publisher of one model on one rank."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        groups: Groups,
        settings: Settings,
        placed: Mapping[str, Placed] | None = None,
    ) -> None:
        """`placed`: how params are cut that somebody else has cut; None where nobody may have."""
        self.chunks = tuple(chunks)
        self._placed = placed
        self.groups = groups
        self.settings = settings
        params = dict(named_params(*self.chunks))
        self._tree = ModuleTree(self.chunks)
        self._frozen = {fqn: param for fqn, param in params.items() if not param.requires_grad}
        trainables = {fqn: param for fqn, param in params.items() if param.requires_grad}
        self.roster = Roster.of(groups, self.chunks, trainables, self._frozen, settings.ties, settings.options.rules)
        self.plan = derive_together(
            groups,
            "plans",
            lambda: self._plan(params),
            lambda plan: {**plan.to_json(), "constants": self._describe_constants()},
        )
        check_alike(groups, self.roster, "is stored", cuts_of_ties(self.plan))
        self.traffic = Traffic()
        self.count = StepCount()
        self.calls = Calls()
        self.errands = Errands(groups)
        self.everyone = Communicator(groups.training, self._contract(groups.control), self.traffic.in_step, groups.made)
        self._on_one_machine = on_one_machine(groups)
        self.communicators = {name: self._communicator(domain) for name, domain in groups.domains.items()}
        ties = tie_groups(groups, self.roster.stages_by_tie)
        self._ties = {name: self._communicator(domain) for name, domain in ties.items()}
        for shard in self.plan.shards:
            if shard.world != self.communicators[shard.domain].world:
                raise PlanMismatchError(
                    f"{shard.label} is laid out for {shard.world} ranks, domain {shard.domain!r} has "
                    f"{self.communicators[shard.domain].world}: shards would have no owner."
                )
        ranks = {name: domain.rank for name, domain in groups.domains.items()}
        self.storage = Storage(self.plan, trainables, ranks, self._other_device(), None if placed is None else local_of)
        self.copies = Copies(self.storage.device)
        # Comparing a collective across ranks waits for all of them, and a peer may reduce a bucket only in its step().
        overlap = settings.overlap_grad_reduce and "collectives" not in groups.checks
        self.publisher = Publisher(
            self.storage,
            {name: own.counting_in(self.traffic.gathered) for name, own in self.communicators.items()},
            overlap=bool(settings.overlap_param_gather),
            prefetch=settings.prefetch,
            by_chunk=settings.overlap_param_gather == "by chunk",
        )
        self.gradients: Gradients
        if self.plan.options.memory == "params":
            self.gradients = OwnGradients(self.storage)
        elif self.plan.options.gradients == "params":
            self.gradients = CopiedGradients(self.storage)
            for param in self.storage.params.values():
                claim(param, self.gradients)
        else:
            self.gradients = GradReducer(
                self.storage,
                self.communicators,
                self._ties,
                overlap=overlap,
                before=self.publisher.launch_all,
                ensure=self.publisher.ensure,
            )
            for fqn, param in self.storage.params.items():
                hook(fqn, param, self.gradients)
        self._optimizer: Callable[[], Steps | None] = lambda: None
        self.is_released = False
        self._undo: list[Callable[[], object]] = []
        # A wrapper that nobody has any more leaves no hook behind. What its params hold stays: gathers that are under way
        # arrive, and whoever reads a param waits for them.
        weakref.finalize(self, _undo_all, self._undo).atexit = False

    @property
    def reducer(self) -> GradReducer:
        """Who takes gradients from backward to buckets, where the plan has any."""
        if not isinstance(self.gradients, GradReducer):
            raise StateError("gradients of this model stay in the params' own .grad: there are no buckets to fill.")
        return self.gradients

    @property
    def optimizer(self) -> Steps | None:
        """Who steps this engine, if anybody does."""
        return self._optimizer()

    def attach(self, optimizer: Steps) -> None:
        """This one steps the engine from now on, for as long as somebody else holds it."""
        self._optimizer = weakref.ref(optimizer)

    def when_released(self, undo: Callable[[], object]) -> None:
        """Call this when the module is to be as it was before. It must not hold the engine."""
        self._undo.append(undo)

    @torch.no_grad()
    def release(self) -> None:
        """Weights up to date in memory of their own, and no hook: the engine is of no use any more."""
        self.finish_errands()
        self.publisher.ensure_all()
        self.gradients.when_dropped = lambda: None  # no reduction comes after this
        self.gradients.forget()
        if self.storage.keep_values():  # who trains it next begins with them
            self.publisher.begin()
            self.publisher.ensure_all()
        _undo_all(self._undo)
        unhook(self.storage.params.values())
        self.storage.release()
        self.groups.made.destroy()
        self.is_released = True

    def check_bound(self) -> None:
        """Raise if the module was taken back."""
        if self.is_released:
            raise StateError("the model was unwrapped: its module is as it was. Wrap the module anew to train it.")

    def make_ready(self) -> None:
        """Have params where they are trained, before something is written into them. Every rank calls it."""
        self.check_bound()
        self.everyone.check_alive("loading")
        reshard(self.chunks)
        self.publisher.launch_all()  # another rank may be in a forward that reads more than this one's did
        self.storage.take_back()

    def settle_gradients(self) -> None:
        """Have no reduction under way: ranks may have launched different ones by now, and something else is about to be sent over
        the same groups. Every rank calls it."""
        if any_rank(self.groups, self.gradients.is_under_way):
            self.gradients.settle()

    def finish_errands(self) -> None:
        """Wait for what is still done beside training; raise, on every rank, what nobody was told of."""
        if not self.errands.is_idle:
            derive_together(self.groups, "checkpoints", self.errands.finish, lambda _: {})

    def _plan(self, params: Mapping[str, nn.Parameter]) -> Plan:
        if self._placed is None:
            refuse_sharded(params)
        _refuse_claimed(params, self.groups)
        plan = plan_for(
            self.chunks,
            replace(self.settings.options, rules_elsewhere=self.roster.rules),
            world=self.groups.domains[DENSE].world,
            worlds={name: domain.world for name, domain in self.groups.domains.items()},
            ranks=self.groups.world,
            ties=self.settings.ties,
            stages_by_tie={tie: len(stages) for tie, stages in self.roster.stages_by_tie.items()},
            vocabularies=self.roster.vocabularies,
            others_train=any(self.roster.fqns),
            placed=self._placed,
        )
        # In here, because a warning may be an error, and one on one rank must be one on all.
        reordered = [fqn for fqn, param in params.items() if param.requires_grad and is_channels_last(param)]
        if reordered and self.groups.rank == 0:
            warn(
                f"channels_last is lost for {listed(reordered)}: a step works on weights in the order of their indices. Give the "
                "model channels_last inputs, x.to(memory_format=torch.channels_last): a convolution computes in the format of its "
                "input, and torch reorders the weight for it.",
            )
        if plan.options.memory != "params":
            warn_of_views(params, dict(named_buffers(*self.chunks)), aloud=self.groups.domains[DENSE].rank == 0)
        doubt = suspicion(plan.routes, plan.table)
        if doubt is not None and self.groups.rank == 0:
            warn(doubt)
        if self.groups.domains[EXPERT].world < plan.world and not self.roster.has_experts and self.groups.rank == 0:
            warn(
                "the mesh has a dim 'ep', but no module names expert params in param_domains(): all params are averaged "
                "over all ranks of a stage.",
            )
        return plan

    def _contract(self, control: ProcessGroup | None) -> Contract | None:
        return Contract(control) if "collectives" in self.groups.checks and control is not None else None

    def _communicator(self, domain: Domain) -> Communicator:
        contract, made = self._contract(domain.control), self.groups.made
        return Communicator(domain.group, contract, self.traffic.in_step, made, on_one_machine=self._on_one_machine)

    def _constants(self) -> dict[str, Tensor]:
        """What the model reads beside its trainable params: frozen ones and buffers."""
        return {**self._frozen, **dict(named_buffers(*self.chunks))}

    @cached_property
    def domain_of(self) -> Callable[[str], str]:
        """Which domain a param or a buffer belongs to."""
        return domains_by_prefix(*self.chunks)

    def saved_constants(self) -> dict[str, Tensor]:
        """What belongs to the model's state and is not trained."""
        return {**self._frozen, **dict(named_buffers(*self.chunks, persistent=True))}

    def constants_here(self) -> Iterator[tuple[str, Tensor, Box, Ranks]]:
        """The same one by one: its name, itself, this rank's box of it, and who has the same."""
        for name, tensor in self.saved_constants().items():
            domain = self.groups.domains[self.domain_of(name)]
            placed = (self._placed or {}).get(name, copied_on(domain.world))
            boxes = placed.boxes(tuple(tensor.shape), domain.world)
            mine = boxes[domain.rank]
            yield name, tensor, mine, tuple(rank for rank, box in enumerate(boxes) if box == mine)

    def model_place(self) -> list[list[int]]:
        """Where this rank sits in the dims of meshes that cut params for good."""
        ranks, placed = self.storage.ranks, self._placed or {}
        found = {one.inner_place(ranks[self.domain_of(name)]) for name, one in placed.items()}
        return sorted(map(list, found - {()}))

    def _other_device(self) -> torch.device:
        """Where a stage that trains nothing has what it has to say of it."""
        constants = self._constants().values()
        return next((tensor.device for tensor in constants if tensor.device.type != "meta"), device_of(self.groups))

    def _describe_constants(self) -> dict[str, list[object]]:
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in self._constants().items()}

    @torch.no_grad()
    def spread_from_first(self) -> None:
        """Make every rank start from the weights and buffers of its domain's first rank, as DistributedDataParallel
        does, and copies of a tied weight from its first stage."""
        for replica in self.storage.replicas:
            self.communicators[replica.plan.domain].broadcast(replica.landing, label=replica.plan.label)
        # By name: copies of different ties may lie in another order on another stage.
        for replica in sorted(self.storage.replicas, key=lambda replica: replica.plan.tie):
            if replica.plan.tie:
                self._ties[replica.plan.tie].broadcast(replica.landing, label=f"tie {replica.plan.tie!r}")
            replica.shard.begin_from(replica.landing[replica.plan.shard_part(self.storage.ranks[replica.plan.domain])])
            replica.settle()
        for name, tensor in self._constants().items():
            if tensor.numel():
                whole = tensor.detach().contiguous()
                # As bytes: buffers may have dtypes that a backend cannot send.
                self.communicators[self.domain_of(name)].broadcast(whole.view(-1).view(torch.uint8), label=f"{name!r}")
                tensor.detach().copy_(whole)

    def check_trainables(self) -> None:
        """Raise if the model's trainable params are not those its buffers were laid out for."""
        if self._tree.is_unchanged():
            return
        if self._placed is not None:
            reshard(self.chunks)
        for fqn, param in named_params(*self.chunks):
            mine = self.storage.params.get(fqn)
            if mine is param and not param.requires_grad:
                raise StateError(
                    f"param {fqn!r} was frozen after construction: expected requires_grad=True, as it was when its buffers "
                    "were laid out. Freeze params before wrapping the model, or give the param lr 0 with a route rule."
                )
            if mine is not param and param.requires_grad and fqn not in are_apart(*self.chunks) & self._frozen.keys():
                was = "unfrozen" if fqn in self._frozen else "replaced" if mine is not None else "added"
                raise StateError(
                    f"param {fqn!r} was {was} after construction: it has no place in the buffers and would never be updated. "
                    "Build the model whole and set requires_grad before wrapping it."
                )
        self._tree.renew()  # what was changed does not matter here

    def free_buffers(self) -> None:
        """Let go of all staging memory, also of what the allocator keeps for later: another process may need it."""
        if self.optimizer is not None:
            self.optimizer.free_step_memory()
        for replica in self.storage.replicas:
            if replica.ring is not None:
                replica.ring.free()
            replica.free_staging()
        self.copies.free()
        wait_for_backends(patience_s=1.0)  # microseconds, unless the machine is busy
        if self.storage.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def pull_from_replicas(self) -> None:
        """Take the weights that forward reads as the truth, after the user changed them."""
        self.publisher.ensure_all()
        self.storage.pull_all()

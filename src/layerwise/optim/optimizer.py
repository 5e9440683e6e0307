"""Optimizer: a torch.optim.Optimizer that steps the engine's shards with whole-matrix and element-wise rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from layerwise.comm.groups import ProcessGroup, agree, any_rank, derive_together
from layerwise.comm.roster import check_alike
from layerwise.comm.sharded import like
from layerwise.config.clipping import QKClip
from layerwise.config.gradients import GradientPolicy
from layerwise.config.habits import OF_OPTIMIZER, understands
from layerwise.config.rules import Rule
from layerwise.engine.algorithms import LiveOptions
from layerwise.engine.loss_scale import LossScale, checked_loss_scale
from layerwise.engine.norm_groups import assign_norm_groups
from layerwise.engine.param_groups import PLANNED, Arranged, all_in_words, live_rule, plan_groups, ties_in_words, uncut
from layerwise.engine.policy import StepPolicy
from layerwise.engine.qk_clip import plan_clipping
from layerwise.engine.step import Stepper
from layerwise.engine.step_plan import Live, StepPlan
from layerwise.engine.totals import StepStats
from layerwise.engine.update import AtHome
from layerwise.errors import StateError, warn
from layerwise.layout.options import check_switch
from layerwise.layout.plan import Plan
from layerwise.layout.schedule import CommSchedule
from layerwise.layout.wire import wire_dtypes
from layerwise.models.tracing import never_traced
from layerwise.optim.engines import Asked, Reduced, engine_of, refuse_unfit
from layerwise.optim.state import STEP, ExtraState, Own, after_hooks, export_state, extra_state_of, fit_state, is_whole
from layerwise.optim.torch_defaults import Defaults
from layerwise.optim.whole import Whole, check_consolidation, part_of, put_together, with_steps
from layerwise.routing.evidence import RulesArgument


@understands(OF_OPTIMIZER)
class Optimizer(torch.optim.Optimizer):
    """Steps a `DataParallel` model, a `DistributedDataParallel` one, a module that torch's `fully_shard` or
    `parallelize_module` has cut, or a plain one in a single process.

    `step()` consumes the gradients: the next backward starts from zero, whether or not `zero_grad()` was called. Left as they are,
    for `zero_grad()` to clear, are those of a `DistributedDataParallel` or with gradients="reduced", and `.grad`s if `step()` raises.

    Args:
        model: a `DataParallel`, a `DistributedDataParallel`, or an `nn.Module`, whose params may be DTensors.
        matrix: rule for the matrices, usually `Muon`.
        other: rule for everything else, `AdamW` or `Lion`.
        rules, strict: as in `DataParallel`, for a plain module; a wrapped one has its own.
        process_group: of a sharded module, all ranks that hold a part of it; None finds them on its meshes, with those of the
            other stages of its pipeline. Of a plain one with reduced gradients, the ranks that they are reduced over; None
            means all of them. For a model on some of the ranks it says that this is no stage of a larger one.
        gradients: "reduced" for a plain module on several ranks whose `.grad`s are the same on all of them by the time of
            `step()`, because it will be wrapped in a `DistributedDataParallel`, as trainers do, or reduced by hand. A
            `DistributedDataParallel` is known to be that.
        layout: where optimizer state lives, with reduced gradients: as in `DataParallel`. All but "replicated" shard it.
        check_replicas: compare a hash of all weights across ranks at every step, and of gradients that another wrapper has reduced;
            the first step always does. Slow, for debugging.
        clip_grad_norm: clip gradients (never updates) to this global norm; None does not clip.
        gradient_policy: a `GradientPolicy`: whose gradients are clipped by which norm, which steps are skipped, and what raises.
            None stands for its defaults.
        count_zeros: also count zero gradient elements.
        loss_scale: dynamic loss scaling for fp16; then call `scale_loss(loss).backward()`.
        qk_clip: scale down the query and key weights of attention heads whose logits were too large (MuonClip); modules
            say which rows belong to which head by a method `attention_heads()`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        matrix: Rule,
        other: Rule,
        rules: RulesArgument = None,
        strict: bool = False,
        process_group: ProcessGroup | None = None,
        gradients: Reduced | None = None,
        layout: str | Mapping[str, str] | None = None,
        check_replicas: bool = False,
        clip_grad_norm: float | None = None,
        gradient_policy: GradientPolicy | None = None,
        count_zeros: bool = False,
        loss_scale: LossScale | None = None,
        qk_clip: QKClip | None = None,
    ) -> None:
        asked = Asked(
            rules=rules,
            matrix=matrix,
            strict=strict,
            gradients=gradients,
            layout=layout,
            process_group=process_group,
        )
        self.engine = engine_of(model, asked)
        """Plan, memory and communication of the model."""
        plan = self.engine.plan
        self._is_sealed = False
        self._whole: Whole | None = None

        def plan_arguments() -> StepPlan:
            refuse_unfit(self.engine, asked)
            param_groups = plan_groups(plan, matrix=matrix, other=other)
            policy = StepPolicy(GradientPolicy() if gradient_policy is None else gradient_policy, clip_grad_norm)
            if self.engine.groups.rank == 0 and (idle := uncut(plan, param_groups)):
                warn(idle)
            return StepPlan(
                groups=param_groups,
                norm_group_of=assign_norm_groups(
                    plan,
                    policy.given.norm_groups or {},
                    {fqn for fqns in self.engine.roster.fqns for fqn in fqns},
                ),
                policy=policy,
                loss_scale=checked_loss_scale(loss_scale, plan),
                count_zeros=count_zeros,
                check_replicas=check_switch("check_replicas", check_replicas),
                watched=plan_clipping(self.engine, qk_clip),
            )

        groups = self.engine.groups
        planned = derive_together(groups, "optimizer arguments", plan_arguments, StepPlan.facts)
        # Clipping and skipping are decided by every rank for itself, from the same numbers: by the same rules too.
        agree(groups, "optimizer arguments", planned.common_facts(), across_stages=True)
        self._planned = planned
        self.given_rates = {group.name: group.rule.lr for group in planned.groups}
        """What every param group began with: a schedule may have changed it since."""
        super().__init__([group.as_param_group(self.engine.storage.params) for group in planned.groups], Defaults())
        self._is_sealed = True
        dtypes = {fqn: group.rule.wire_dtype for group in planned.groups for fqn in group.fqns}
        # Who takes the steps; checkpoints ask it what there is beside shards.
        self.stepper = Stepper(self.engine, planned, wire_dtypes(self.engine.plan.works, dtypes))
        self._arranged = Arranged.of(self.param_groups)
        check_alike(groups, self.engine.roster, "is updated", self._tie_settings())
        home_state = self.stepper.update.home_state_by_fqn()
        self._kept_at_home = sorted({name.partition(".")[0] for kept in home_state.values() for name in kept})
        for fqn, tensors in self.stepper.update.state_by_fqn().items():
            param = self.engine.storage.params[fqn]
            if plan.options.memory == "params":  # then state lies as its param does
                tensors = {
                    STEP: self.engine.count.as_tensor(fqn),
                    **{name: like(param, one) for name, one in tensors.items()},
                }
            self.state[param] = {**tensors, **home_state.get(fqn, {})}
        self._own = Own(self.state, self.engine.storage.params)
        self.engine.attach(self)

    @property
    def _is_wrapped(self) -> bool:
        """Whether gradients go to buckets, and not to the params' own `.grad`."""
        return self.engine.plan.options.reduces

    @property
    def plan(self) -> Plan:
        """What was decided: `.digest`, `.describe()`, `.route(fqn).reason`; that of the model, where it is wrapped."""
        return self.engine.plan

    @property
    def stats(self) -> StepStats:
        """What the last step saw and did. On a GPU the host may be far ahead of that, and waits for it here."""
        return self.stepper.stats

    @property
    def schedule(self) -> CommSchedule:
        """Every collective of one step, in order; `stats.bytes_by_collective` adds up to its bytes."""
        return self.stepper.schedule

    @never_traced
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the current loss scale; `step()` divides the gradients by it again."""
        if self.stepper.scaler is None:
            raise StateError(
                "scale_loss() was called without loss scaling: pass loss_scale=LossScale() to the Optimizer."
            )
        self.engine.gradients.said.is_scaled = True
        return loss * self.stepper.scaler.scale

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler` asks before it steps an optimizer: the one moment to tell its user that it finds no
        gradients here. Others ask too, to see whether they may clip, so it matters who does."""
        if self._is_wrapped and isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
            raise StateError(
                "GradScaler.step() was called with a layerwise.Optimizer: it unscales param.grad, and the gradients of a wrapped "
                "model are in its buffers. Pass loss_scale=layerwise.LossScale() to the Optimizer, call "
                "optimizer.scale_loss(loss).backward() and optimizer.step(), and leave GradScaler out (or enabled=False)."
            )
        return False

    @never_traced
    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Reduce what is left of the gradients, update masters, publish replicas. Returns the closure's loss, if there
        is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.engine.check_bound()
        self._whole = None
        # An update is what it is, also in the middle of a forward's autocast.
        with torch.autocast(self.engine.storage.device.type, enabled=False):
            self.stepper.step(self._live)
        return loss

    @never_traced
    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        """`DataParallel.clip_grad_norm_`: the norm of the gradients as they are, which the coming step is clipped by."""
        self.engine.check_bound()
        return torch.tensor(self.stepper.clip_next_step(max_norm, self._live), device=self.engine.storage.device)

    @never_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of a backward that failed half way. Call it on every rank, after all of them or
        none of them ran a synchronised backward: reductions that some have begun are finished first. Where one rank drops a
        backward that another steps, both raise."""
        self.engine.gradients.forget()
        self.engine.calls.has_zeroed = True
        super().zero_grad(set_to_none)

    def free_buffers(self) -> None:
        """Let go of all staging memory, to the last byte that other processes could use, as before a checkpoint is written.
        Gathers that are under way arrive all the same: they write into the weights themselves, or keep the slot that they
        have until they are codes. The next step takes staging memory again."""
        self.engine.free_buffers()

    def free_step_memory(self) -> None:
        """Let go of the memory of steps alone; `free_buffers()` calls it."""
        self.stepper.free()

    def pull_from_replicas(self) -> None:
        """Take the weights as they are as the truth, after code wrote them in a way that torch does not count (`param.data.copy_()`,
        `param.detach().copy_()`). `load_state_dict` and in-place changes under `torch.no_grad()` are noticed without it. Call it
        on every rank."""
        self.engine.check_bound()
        self.engine.pull_from_replicas()

    def add_param_group(self, param_group: dict[str, object]) -> None:
        if getattr(self, "_is_sealed", False):
            raise StateError(
                "params cannot be added after construction: they have no place in the buffers. Build the model whole, then wrap it."
            )
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, object]) -> Optimizer:
        raise TypeError("an Optimizer cannot be copied: its state lives in the model's buffers. Use state_dict().")

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("an Optimizer cannot be pickled: its state lives in the model's buffers. Use state_dict().")

    @never_traced
    def state_dict(self, *, part: bool = False) -> dict[str, object]:
        """The optimizer state in torch's format, with the spans it covers; no rank waits for another. Masters are those of the
        weights as they are: what the user wrote into them counts. Of state that is shared out over ranks (all but layout
        "replicated" and DTensors) this is a StateError, until `consolidate_state_dict(to=)`: then that rank gives the whole, others
        an empty state that no rank loads. With `part`, this rank's own shards, which the same rank of the same plan loads."""
        self.engine.check_bound()
        whole = not part and is_whole(self.engine, self._kept_at_home, self._whole is not None)
        self.stepper.settle()
        self.stepper.pull_changed()
        self._own.check(self.state)
        extra, packed = self._extra_state(), super().state_dict()
        if whole and self._whole is not None:
            self._whole.put_into(packed, extra, self.engine)
        return export_state(packed, extra)

    @never_traced
    def consolidate_state_dict(self, to: int = 0) -> None:
        """Put the state of all ranks together on one: until the next step its `state_dict()` is the whole, in host memory,
        and can be loaded on every rank of any number of them, in any layout. Collective: call it on every rank.
        `ZeroRedundancyOptimizer` of torch has the same, and trainers that know that one (Lightning) call it by themselves."""
        engine = self.engine
        engine.check_bound()
        check_consolidation(engine, to)
        self.bring_up_to_date()
        engine.settle_gradients()
        keep = to == engine.groups.rank
        whole = put_together(self._state_by_fqn, engine.storage, self._at_home, engine.everyone, keep=keep)
        self._whole = Whole(with_steps(whole, self._state_by_fqn) if keep else {}, to, engine.storage.changes)

    @never_traced
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take over a whole `state_dict()`, or the part of the same rank of the same plan. Checked whole before anything is
        written. Collective: call it on every rank."""
        self.engine.make_ready()
        fitting = derive_together(
            self.engine.groups,
            "state dicts",
            lambda: fit_state(self, self._my_part(state_dict), self._extra_state(), self.plan, tuple(PLANNED)),
            lambda found: {**{name: found.extra[name] for name in ("step", "loss_scale")}, "begun": found.begun},
        )
        with self.replacing_state(fitting.extra["step"], fitting.extra["loss_scale"], fitting.begun) as follow:
            fitting.write(self)
            follow()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @contextmanager
    def replacing_state(
        self, step: int, loss_scale: Mapping[str, float] | None, begun: Mapping[str, int]
    ) -> Iterator[Callable[[], None]]:
        """In here masters and state are written, on every rank. Once all masters are there, what this gives is called: then
        they are those of this step, and weights follow. `begun`: after which step state of some params began. An exception
        leaves an optimizer that refuses to go on."""
        engine, scaler = self.engine, self.stepper.scaler
        self.stepper.catch_up()
        agree(engine.groups, "states", {"step": step, "loss_scale": loss_scale}, across_stages=True)
        own = None if scaler is None else scaler.scale
        theirs = None if loss_scale is None else loss_scale["scale"]
        if None not in (own, theirs) and own != theirs and any_rank(engine.groups, engine.gradients.has_gradients):
            raise StateError(
                f"state was loaded between backward and step(): it has loss scale {theirs:g}, gradients have {own:g}. Call zero_grad() "
                "or step() first."
            )
        engine.settle_gradients()
        engine.publisher.ensure_all()

        def follow() -> None:
            self._whole = None
            engine.count.start(step, begun)
            self.stepper.update.arrange(engine.count.begun)
            for fqn, param in engine.storage.params.items():
                if STEP in self.state[param]:
                    self.state[param][STEP] = engine.count.as_tensor(fqn)
            if scaler is not None and loss_scale is not None:
                scaler.load_state_dict(dict(loss_scale))
            engine.publisher.begin()

        with self.stepper.moving_masters("loading"):
            yield follow

    @never_traced
    def bring_up_to_date(self) -> None:
        """Have weights and masters agree on every rank: what was written into weights counts, and what is on its way arrives.
        Call it on every rank."""
        self.engine.check_bound()
        self.stepper.settle()
        self.engine.publisher.ensure_all()
        self.stepper.pull_changed()

    @property
    def _state_by_fqn(self) -> dict[str, dict[str, Tensor]]:
        return {fqn: self.state[param] for fqn, param in self.engine.storage.params.items()}

    @property
    def _at_home(self) -> dict[tuple[str, str], AtHome]:
        return self.stepper.update.at_home()

    def _my_part(self, state_dict: dict[str, object]) -> Mapping[str, object]:
        self._own.check(self.state)
        theirs = after_hooks(self, state_dict)
        return part_of(theirs, self._state_by_fqn, self.engine.storage, self._at_home, self._extra_state())

    def _extra_state(self) -> ExtraState:
        return extra_state_of(self.engine, self.stepper.scaler)

    def _live(self) -> Live:
        """The options as they are now: a scheduler or the user may have put anything there."""
        problem: Exception | None = None
        options: list[LiveOptions] = []
        try:
            self._arranged.check(self.param_groups)
            self._own.check(self.state)
            options = [live_rule(index, group).options() for index, group in enumerate(self.param_groups)]
        except Exception as error:
            problem = error
        return Live(options, lambda: all_in_words(self.param_groups), self._tie_settings(), problem)

    def _tie_settings(self) -> dict[str, dict[str, str]]:
        mine, norm_groups = self.engine.groups.stage, self._planned.norm_group_of
        return ties_in_words(self.param_groups, self.engine.roster.copies, mine, norm_groups)

"""Optimizer: a torch.optim.Optimizer that steps the engine's shards with whole-matrix and element-wise rules."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from layerwise.comm.groups import (
    agree,
    agree_despite,
    alone,
    any_rank,
    check_still_alone,
    default_world,
    derive_together,
)
from layerwise.comm.roster import check_alike
from layerwise.config.clipping import QKClip
from layerwise.config.rules import Rule, plain_option
from layerwise.dtypes import DType
from layerwise.engine.engine import Engine, Settings, refuse_sharded
from layerwise.engine.param_groups import GroupPlan, live_rule, plan_groups
from layerwise.engine.policy import ClipScope, GradientPolicy, OnNonFinite
from layerwise.engine.qk_clip import NOTHING_CLIPPED, Clipped, Clipper, Watched, plan_clipping
from layerwise.engine.reductions import predivisor
from layerwise.engine.stats import Seen, StatsPass, StepStats, Totals, assign_norm_groups
from layerwise.engine.update import Update
from layerwise.errors import NonFiniteError, PlanMismatchError, StateError, listed, warn
from layerwise.kernels.hashing import hash_bits
from layerwise.layout.schedule import CommSchedule
from layerwise.memory.storage import refuse_sparse
from layerwise.models.table import named_params
from layerwise.models.tracing import never_traced
from layerwise.optim.loss_scale import LossScale, LossScaler, checked_loss_scale
from layerwise.optim.skips import Skips
from layerwise.optim.state import ExtraState, describe_spans, export_state, fit_state
from layerwise.routing.rules import RouteRule
from layerwise.routing.spec import DENSE


class Planned(NamedTuple):
    """What the arguments come to, before anything is built; the same on every rank."""

    groups: tuple[GroupPlan, ...]
    norm_group_of: dict[str, str]
    norm_group_names: tuple[str, ...]
    policy: GradientPolicy
    loss_scale: LossScale | None
    count_zeros: bool
    watched: Watched | None

    def common_facts(self) -> dict[str, object]:
        """What ranks of all pipeline stages must have in common."""
        return {
            "norm groups": list(self.norm_group_names),
            "policy": asdict(self.policy),
            "loss scale": asdict(self.loss_scale) if self.loss_scale is not None else None,
            "count zeros": self.count_zeros,
            "qk_clip": repr(self.watched.clip) if self.watched is not None else None,
        }

    def facts(self) -> dict[str, object]:
        """The arguments as data, so that a difference between ranks can be named."""
        groups = [
            {"label": f"param group {index}", "rule": group.rule.kind, **group.rule.options(), "fqns": list(group.fqns)}
            for index, group in enumerate(self.groups)
        ]
        watched = self.watched.facts() if self.watched is not None else None
        return {**self.common_facts(), "groups": groups, "norm groups": self.norm_group_of, "watched": watched}


class Optimizer(torch.optim.Optimizer):
    """Steps a `DataParallel` model, or a plain module in a single process.

    `step()` consumes the gradients: the next backward starts from zero, whether or not `zero_grad()` was called.

    Args:
        model: a `DataParallel`, or a plain `nn.Module`.
        matrix: rule for the matrices, usually `Muon`.
        other: rule for everything else, `AdamW` or `Lion`.
        rules: routing rules for a plain module; a wrapped one has its own.
        strict: strict routing for a plain module, as in `DataParallel`.
        clip_grad_norm: clip gradients (never updates) to this global norm; None does not clip.
        clip: whose gradients: "all", "other-only" (the norm and the clipping leave matrices out) or "none".
        norm_groups: named groups of params (name -> glob) that are clipped by a norm of their own.
        nonfinite: what to do when a reduced gradient holds inf or NaN: "skip" the step, "raise" on every rank, or
            "ignore".
        skip_above: skip a step whose gradient norm is larger.
        count_zeros: also count zero gradient elements.
        loss_scale: dynamic loss scaling for fp16; then call `scale_loss(loss).backward()`.
        qk_clip: scale down the query and key weights of attention heads whose logits were too large (MuonClip); modules
            say which rows belong to which head by a method `attention_heads()`.
        strict_grads: raise, on every rank, when a param got no gradient somewhere, instead of counting it as zero.
        max_skipped: raise, on every rank, when more steps than this are skipped in a row; None goes on for ever. The first
            skipped step is warned of, and the tenth in a row.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        matrix: Rule,
        other: Rule,
        rules: Sequence[RouteRule] | None = None,
        strict: bool = False,
        clip_grad_norm: float | None = None,
        clip: ClipScope = "all",
        norm_groups: Mapping[str, str] | None = None,
        nonfinite: OnNonFinite = "skip",
        skip_above: float | None = None,
        count_zeros: bool = False,
        loss_scale: LossScale | None = None,
        qk_clip: QKClip | None = None,
        strict_grads: bool = False,
        max_skipped: int | None = None,
    ) -> None:
        self._plain = not _is_wrapped(model)
        self._engine = _engine_of(model, rules, strict)
        plan = self._engine.plan
        self._has_checked_replicas = False
        # What sums are still to be divided by to be averages.
        self._ranks_left = plan.world / predivisor(plan.grad_dtype, plan.world)
        self._changed: set[str] = set()
        self._step_count = 0
        self._live: list[dict[str, object]] = []  # options of the step that is being taken, by param group
        self._is_half_way = False
        self._has_said_part = False
        self.stats = StepStats()

        def plan_arguments() -> Planned:
            self._refuse(rules, strict)
            return Planned(
                groups=plan_groups(plan, matrix=matrix, other=other),
                norm_group_of=assign_norm_groups(
                    plan,
                    {} if norm_groups is None else norm_groups,
                    {fqn for fqns in self._engine.roster.fqns for fqn in fqns},
                ),
                norm_group_names=tuple(norm_groups or ()),
                policy=GradientPolicy(
                    clip_grad_norm=clip_grad_norm,
                    clip=clip,
                    nonfinite=nonfinite,
                    skip_above=skip_above,
                    strict_grads=strict_grads,
                    max_skipped=max_skipped,
                ),
                loss_scale=checked_loss_scale(loss_scale, plan),
                count_zeros=count_zeros,
                watched=plan_clipping(self._engine, qk_clip),
            )

        planned = derive_together(self._engine.groups, "optimizer arguments", plan_arguments, Planned.facts)
        # Clipping and skipping are decided by every rank for itself, from the same numbers: by the same rules too.
        agree(self._engine.groups, "optimizer arguments", planned.common_facts(), across_stages=True)
        self._groups, self._policy, self._norm_group_of = planned.groups, planned.policy, planned.norm_group_of
        self._skips = Skips(planned.policy.max_skipped)
        self._scaler = LossScaler(planned.loss_scale) if planned.loss_scale is not None else None
        self._stats_pass = StatsPass(self._engine, planned.norm_group_of, planned.norm_group_names, zeros=count_zeros)
        self._clipper = Clipper(self._engine, planned.watched) if planned.watched is not None else None
        self._exchange = matrix.is_matrix_rule
        self._wire_dtypes = _wire_dtypes(self._engine, self._groups)
        self._sealed = False
        super().__init__([group.as_param_group(self._engine.storage.params) for group in self._groups], {})
        self._sealed = True
        self._update = Update(
            self._engine, self._groups, planned.norm_group_of, self.schedule, self._wire_dtypes, self._exchange
        )
        self._planned_ns_dtypes = self._ns_dtypes()
        check_alike(self._engine.groups, self._engine.roster, "is updated", self._tie_settings())
        for fqn, tensors in self._update.state_by_fqn().items():
            self.state[self._engine.storage.params[fqn]] = tensors
        self._engine.optimizer = weakref.ref(self)

    def _refuse(self, rules: object, strict: bool) -> None:
        """Raise for what a wrapped model does not take."""
        if not self._plain and (rules is not None or strict):
            raise ValueError(
                "rules or strict were passed to the Optimizer of a wrapped model: pass them to DataParallel, which lays it out."
            )
        self._engine.check_bound()
        if self._engine.optimizer() is not None:
            gc.collect()  # one that nobody has any more may be waiting for that, in a cycle with a scheduler
        if self._engine.optimizer() is not None:
            raise StateError(
                "the model has an optimizer already: its state lives in the model's buffers, so there can be one. Reuse it, or "
                "drop it (and schedulers that hold it) first."
            )

    @cached_property
    def schedule(self) -> CommSchedule:
        """Every collective of one step, in order; `stats.bytes_by_collective` adds up to its bytes."""
        return self._engine.plan.schedule(
            stats_numel=self._stats_pass.numel,
            wire_dtypes=self._wire_dtypes,
            exchange=self._exchange,
            logits_numel=self._clipper.numel if self._clipper is not None else 0,
        )

    @never_traced
    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the current loss scale; `step()` divides the gradients by it again."""
        if self._scaler is None:
            raise StateError(
                "scale_loss() was called without loss scaling: pass loss_scale=LossScale() to the Optimizer."
            )
        self._engine.reducer.loss_was_scaled = True
        return loss * self._scaler.scale

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `torch.amp.GradScaler` asks before it steps an optimizer: the one moment to tell its user that it finds no
        gradients here. Others ask too, to see whether they may clip, so it matters who does."""
        if not self._plain and isinstance(sys._getframe(1).f_locals.get("self"), torch.amp.GradScaler):
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
        # An update is what it is, also in the middle of a forward's autocast.
        with torch.autocast(self._engine.storage.device.type, enabled=False):
            self._take_step()
        return loss

    def _take_step(self) -> None:
        self._engine.check_bound()
        if self._plain:
            self._collect_gradients()
        try:
            self._finish(self._measure())
        finally:
            self._engine.reducer.forget()
            self._engine.sent_nbytes.clear()
            if self._clipper is not None:
                self._clipper.reset()

    def _measure(self) -> Totals:
        """Finish the reductions and take the statistics; raises on every rank if any of them has a problem."""
        # Nobody may have read some weights since the last step. They are gathered now: masters are about to move.
        self._engine.publisher.ensure_all()
        self._changed |= self._engine.storage.pull_changed_params()
        problem = self._preflight()
        divisor = self._ranks_left * (self._scaler.scale if self._scaler is not None else 1.0)
        totals = self._reduce(problem, divisor)
        self._check_agreement(totals, problem)
        return totals

    @never_traced
    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        """`DataParallel.clip_grad_norm_`: the norm of the gradients as they are, which the coming step is clipped by. What
        is asked for is a setting of that step, the same on every rank, and goes with the gradients."""
        self._engine.check_bound()
        if self._policy.clip == "none":
            raise ValueError("clip_grad_norm_() was called with clip='none': expected a scope to clip. Leave clip out.")
        replace(self._policy, clip_grad_norm=max_norm)  # raises for what is no bound
        self._engine.reducer.clip_norm = max_norm
        totals = self._measure()
        return torch.tensor(self._policy.clipped_norm(totals), device=self._engine.storage.device)

    @property
    def _policy_now(self) -> GradientPolicy:
        """The policy of the coming step: clipping twice is clipping to the smaller norm."""
        bounds = [bound for bound in (self._policy.clip_grad_norm, self._engine.reducer.clip_norm) if bound is not None]
        return replace(self._policy, clip_grad_norm=min(bounds, default=None))

    def _reduce(self, problem: Exception | None, divisor: float) -> Totals:
        """Finish the reductions and take the statistics; again for buckets that were reduced too early on any rank."""
        reducer = self._engine.reducer
        is_unscaled = self._scaler is not None and reducer.has_gradients and not reducer.loss_was_scaled
        missing = reducer.finish()
        if not self._has_checked_replicas or self._engine.settings.check_replicas:
            # A bad start must not be spread: from now on shards of all ranks are one model.
            self._engine.check_replicas()
            self._has_checked_replicas = True
        seen = Seen(
            missing=missing,
            late=reducer.late,
            settings=repr([self._settings(), problem]),
            tie_settings={tie: repr(settings) for tie, settings in self._tie_settings().items()},
            has_problem=problem is not None,
            is_scaled=reducer.loss_was_scaled,
            is_unscaled=is_unscaled,
        )
        totals = self._stats_pass.reduce(seen, divisor)
        if totals.late:
            reducer.reduce_again(self._here(totals.late))
            totals = self._stats_pass.reduce(replace(seen, late=reducer.late), divisor)
        return totals

    def _tie_settings(self) -> dict[str, dict[str, str]]:
        """What all copies of a tied weight must have in common: where it differed they would drift apart."""
        mine = self._engine.groups.stage
        here = {tie: copies[mine] for tie, copies in self._engine.roster.copies.items() if mine in copies}
        group_of = {fqn: group for group in self.param_groups for fqn in group["fqns"]} if here else {}
        return {tie: {**_in_words(group_of[fqn]), "norm group": self._norm_group_of[fqn]} for tie, fqn in here.items()}

    def _here(self, late: Collection[tuple[int, str]]) -> set[str]:
        """Late params of this stage, and copies here of a tied weight that was late elsewhere."""
        roster, mine = self._engine.roster, self._engine.groups.stage
        found = {fqn for stage, fqn in late if stage == mine}
        for copies in roster.copies.values():
            if mine in copies and any((stage, fqn) in late for stage, fqn in copies.items()):
                found.add(copies[mine])
        return found

    @never_traced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of a backward that failed half way. Call it on every rank, after all of them or
        none of them ran a synchronised backward: reductions that some have begun are finished first."""
        self._engine.reducer.forget()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        if getattr(self, "_sealed", False):
            raise StateError(
                "params cannot be added after construction: they have no place in the buffers. Build the model whole, then wrap it."
            )
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, object]) -> Optimizer:
        raise TypeError("an Optimizer cannot be copied: its state lives in the model's buffers. Use state_dict().")

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("an Optimizer cannot be pickled: its state lives in the model's buffers. Use state_dict().")

    @never_traced
    def state_dict(self) -> dict[str, object]:
        """This rank's shards of the optimizer state, in torch's format, with the spans they cover. Masters are those of the
        weights as they are: what the user wrote into them counts."""
        self._engine.check_bound()
        self._refuse_half_way()
        if not self._has_said_part and any(bucket.num_shards > 1 for bucket in self._engine.plan.buckets):
            self._has_said_part = True
            groups = self._engine.groups
            warn(
                f"state_dict() of the optimizer has the part of it that rank {groups.rank} of {groups.world} owns, not the whole: "
                "save it on every rank, in a file of its own, and load that on the same rank.",
            )
        self._changed |= self._engine.storage.pull_changed_params()
        return export_state(super().state_dict(), self._extra_state())

    @never_traced
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take over a `state_dict()` of the same rank of the same plan. Checked whole before anything is written. Call
        it on every rank."""
        self._engine.check_bound()
        self._engine.publisher.launch_all()  # another rank may be in a forward that reads more than this one's did
        fitting = derive_together(
            self._engine.groups,
            "state dicts",
            lambda: fit_state(self, state_dict, self._extra_state(), fixed=("ns_dtype",)),
            lambda found: {"step": found.extra["step"], "loss_scale": found.extra["loss_scale"]},
        )
        common = {"step": fitting.extra["step"], "loss_scale": fitting.extra["loss_scale"]}
        agree(self._engine.groups, "state dicts", common, across_stages=True)
        if any_rank(self._engine.groups, self._engine.reducer.has_gradients):
            loaded = fitting.extra["loss_scale"]
            if self._scaler is not None and loaded is not None and loaded["scale"] != self._scaler.scale:
                raise StateError(
                    f"load_state_dict() between backward and step() brings loss scale {loaded['scale']:g}, gradients have "
                    f"{self._scaler.scale:g}. Call zero_grad() or step() first."
                )
            # Ranks may have reduced different buckets by now, and are about to gather weights over the same groups.
            self._engine.reducer.settle()
        self._engine.publisher.ensure_all()
        fitting.write(self)
        self._step_count = fitting.extra["step"]
        self._engine.reducer.step_number = self._step_count
        if self._scaler is not None and fitting.extra["loss_scale"] is not None:
            self._scaler.load_state_dict(fitting.extra["loss_scale"])
        for bucket in self._engine.storage.buckets:
            bucket.advance()
        self._engine.publisher.begin()

    def _extra_state(self) -> ExtraState:
        return {
            "step": self._step_count,
            "plan": self._engine.plan.digest,
            "spans": describe_spans(self._engine.storage),
            "loss_scale": self._scaler.state_dict() if self._scaler is not None else None,
            "place": self._engine.groups.place,
            "rank": self._engine.groups.rank,
        }

    def _settings(self) -> dict[str, object]:
        """What all ranks must have in common at a step."""
        return {
            "step": self._step_count,
            "loss_scale": self._scaler.scale if self._scaler is not None else None,
            "policy": repr(self._policy_now),
            "weights changed from outside": self._changed_hashes(),
            "groups": [
                {"label": f"param group {index}", **_in_words(group)} for index, group in enumerate(self.param_groups)
            ],
        }

    def _changed_hashes(self) -> dict[str, list[int] | None]:
        """What was written into weights since the last step: the same on every rank, or shards would mix. Ranks hold
        different experts under one name, so of those only the name."""
        params, plan = self._engine.storage.params, self._engine.plan
        return {
            fqn: hash_bits(params[fqn].detach().reshape(-1)).tolist() if plan.domain_of(fqn) == DENSE else None
            for fqn in sorted(self._changed)
        }

    def _preflight(self) -> Exception | None:
        """What this rank alone can see to be wrong. It is raised after the stats, when all ranks know: one that raised
        before would leave the others waiting in a collective."""
        try:
            self._refuse_half_way()
            self._engine.check_trainables()
            self._engine.storage.check_aliases()
            self._check_options()
            self._engine.reducer.check_wanted()
            if not self._plain:
                self._engine.storage.check_no_grads()
            if self._clipper is not None:
                self._clipper.check(self._engine.reducer.arrived)
        except Exception as error:
            return error
        return None

    def _check_options(self) -> None:
        """Live options must still make a rule: a scheduler or the user may have put anything there."""
        self._live = [live_rule(index, group).options() for index, group in enumerate(self.param_groups)]
        if self._ns_dtypes() != self._planned_ns_dtypes:
            raise StateError(
                "ns_dtype was changed after construction: the exchange was planned with another dtype. Build a new Optimizer."
            )

    def _ns_dtypes(self) -> list[object]:
        return [group.get("ns_dtype") for group in self.param_groups]

    def _collect_gradients(self) -> None:
        """A plain module has no hooks: its gradients are taken from where torch leaves them."""
        self._engine.reducer.reset()
        for fqn, param in self._engine.storage.params.items():
            if param.grad is not None:
                refuse_sparse(fqn, param.grad)
                self._engine.reducer.write(fqn, param.grad, sync=False)
                param.grad = None

    def _check_agreement(self, totals: Totals, problem: Exception | None) -> None:
        """Raise on every rank if any of them has a problem or other settings, or if a gradient that must be there is
        not."""
        world = self._engine.plan.world
        if not totals.consistent or totals.problems:
            groups = self._engine.groups
            agree_despite(groups, "optimizer settings", problem, self._settings())
            check_alike(groups, self._engine.roster, "is updated", self._tie_settings())
            raise PlanMismatchError(
                "ranks called step() with different optimizer settings, which have changed back since."
            )
        # A pipeline's loss is scaled where it is known, on the last stage; others have gradients of it.
        some = any(totals.scaled)
        for stage, (scaled, unscaled) in enumerate(zip(totals.scaled, totals.unscaled, strict=True)):
            if unscaled and (scaled or not some):
                where = f" on {unscaled} ranks" + (f" of stage {stage}" if len(totals.scaled) > 1 else "")
                raise StateError(
                    f"step() with loss_scale set, but the loss was not scaled{where}: call "
                    "optimizer.scale_loss(loss).backward()."
                )
        if self._policy.strict_grads and totals.missing:
            names = [f"{fqn} ({count} of {world} ranks)" for fqn, count in totals.missing.items()]
            raise StateError(
                f"no gradient for {listed(names)}: strict_grads=True expects one for every trainable param. "
                "Freeze what is unused."
            )

    def _finish(self, totals: Totals) -> None:
        """Decide from reduced values, act, and record."""
        self._changed.clear()
        divisor = totals.divisor
        coefficients = self._policy_now.clip_coefficients(totals, self._stats_pass.names)
        reason = self._policy.skip_reason(totals)
        if self._scaler is not None:
            self._scaler.update(overflow=bool(totals.nonfinite))
        clipped = NOTHING_CLIPPED
        if not reason:
            self._engine.publisher.learn_order(self._engine.groups)
            clipped = self._move_masters(divisor, coefficients)
            self._engine.sent_nbytes.update(self._engine.publisher.due_nbytes)
        self.stats = replace(
            _stats_from(totals, coefficients),
            step=self._step_count,
            skipped=bool(reason),
            skip_reason=reason,
            loss_scale=divisor / self._ranks_left,
            max_logit=clipped.max_logit,
            clipped_heads=clipped.heads,
            nonfinite_logits=clipped.nonfinite,
            unseen_logits=clipped.unseen,
            bytes_by_collective=dict(self._engine.sent_nbytes),
            products=self._update.products(self.param_groups),
        )
        if totals.nonfinite and self._policy.nonfinite == "raise":
            raise NonFiniteError(
                f"gradients of {listed(totals.nonfinite)} hold inf or NaN; the step was not taken and nothing was changed."
            )
        self._skips.note(
            self._step_count + 1,
            reason,
            overflow=self._scaler is not None and bool(totals.nonfinite),
            aloud=self._engine.groups.rank == 0,
        )

    def _move_masters(self, divisor: float, coefficients: Mapping[str, float]) -> Clipped:
        """Update, clip, publish. An exception in here (no memory, an interrupt) leaves some masters new and some old, not the
        same ones on every rank, and is remembered."""
        self._is_half_way = True
        self._step_count += 1
        self._engine.reducer.step_number = self._step_count
        self._update.apply(self._live, divisor, coefficients, self._step_count)
        clipped = self._clipper.apply() if self._clipper is not None else NOTHING_CLIPPED
        self._engine.publisher.begin()
        self._is_half_way = False
        return clipped

    def _refuse_half_way(self) -> None:
        if self._is_half_way:
            raise StateError(
                f"step {self._step_count} ended half way, by an exception: some masters are new and some old, and ranks may differ "
                "in which. Build the model and the optimizer anew and load a checkpoint."
            )


def _stats_from(totals: Totals, coefficients: Mapping[str, float]) -> StepStats:
    return StepStats(
        grad_norm=totals.norm("matrix", "other"),
        norms={name: totals.norm(name) for name in totals.square_sums},
        clip_coefficients=coefficients,
        num_zeros=totals.num_zeros,
        nonfinite=totals.nonfinite,
        missing=totals.missing,
    )


def _in_words(group: Mapping[str, object]) -> dict[str, str]:
    """The options of a live param group. Its name is no option: a tied weight may be under another rule elsewhere."""
    return {
        name: repr(plain_option(value))
        for name, value in sorted(group.items())
        if name not in ("params", "fqns", "name")
    }


def _is_wrapped(model: object) -> bool:
    return isinstance(getattr(model, "engine", None), Engine)


def _engine_of(model: nn.Module, rules: Sequence[RouteRule] | None, strict: bool) -> Engine:
    """The engine of a wrapped model, or a new one for a plain module in a single process."""
    engine = getattr(model, "engine", None)
    if isinstance(engine, Engine):
        check_still_alone(engine.groups)
        return engine
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "model is a DistributedDataParallel, which averages gradients and keeps every weight and all optimizer state on every "
            "rank. Pass layerwise.DataParallel(module) in its place, made from the module that it wraps (model.module)."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a DataParallel or an nn.Module, got {type(model).__name__}. Pass the model, not its parameters()."
        )
    refuse_sharded(dict(named_params(model)))
    if default_world() > 1:
        raise ValueError(
            f"model is a plain {type(model).__name__} on {default_world()} ranks: nobody would average its gradients. "
            "Wrap it: layerwise.DataParallel(module)."
        )
    settings = Settings(layout="flat", rules=rules, strict=strict, overlap_grad_reduce=False)
    return Engine((model,), alone(), settings, hooked=False)


def _wire_dtypes(engine: Engine, groups: tuple[GroupPlan, ...]) -> dict[tuple[str, int], DType]:
    """How each cohort travels: in fp32 as soon as one of its matrices needs that, else in bf16."""
    rule_of = {fqn: group.rule for group in groups for fqn in group.fqns}
    found: dict[tuple[str, int], DType] = {}
    for work in engine.plan.works:
        for item in work.items:
            dtype = getattr(rule_of[item.matrix.fqn], "wire_dtype", DType.BF16)
            if dtype is DType.FP32 or (work.domain, item.cohort) not in found:
                found[work.domain, item.cohort] = dtype
    return found

"""One step: the phases of the design, in order, and what is decided between them from reduced values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

from layerwise.comm.groups import agree_despite
from layerwise.comm.roster import check_alike
from layerwise.dtypes import DType
from layerwise.engine.copies import check_copies, check_gradients
from layerwise.engine.engine import Engine
from layerwise.engine.gradients import Divisors
from layerwise.engine.loss_scale import LossScaler
from layerwise.engine.policy import GradientPolicy
from layerwise.engine.qk_clip import NOTHING_CLIPPED, Clipped, Clipper
from layerwise.engine.skips import Skips
from layerwise.engine.stats import Seen, StatsPass, StepStats, Totals
from layerwise.engine.step_plan import Live, StepPlan
from layerwise.engine.update import Update
from layerwise.errors import NonFiniteError, PlanMismatchError, StateError, listed
from layerwise.kernels.hashing import hash_bits
from layerwise.layout.schedule import CommSchedule
from layerwise.routing.spec import DENSE


def _weakly(stepper: Stepper) -> Callable[[], None]:
    """Have a stepper asked for as long as somebody holds it."""
    own = weakref.ref(stepper)

    def ask() -> None:
        found = own()
        if found is not None:
            found.agree_to_drop()

    return ask


class Stepper:
    """Steps the shards of an engine by the rules of an optimizer."""

    def __init__(self, engine: Engine, plan: StepPlan, wire_dtypes: Mapping[tuple[str, int], DType]) -> None:
        self._engine = engine
        self._plan = plan
        self._wire_dtypes = wire_dtypes
        self._policy = plan.policy
        self._skips = Skips(plan.policy.max_skipped)
        self.scaler = LossScaler(plan.loss_scale) if plan.loss_scale is not None else None
        self._stats_pass = StatsPass(engine, plan.norm_group_of, plan.norm_group_names, zeros=plan.count_zeros)
        self._clipper = Clipper(engine, plan.watched) if plan.watched is not None else None
        self.update = Update(
            engine, plan.groups, plan.norm_group_of, self.schedule, wire_dtypes, exchange=plan.has_matrix_rule
        )
        self.stats = StepStats()
        self._changed: set[str] = set()
        self._has_checked_replicas = False
        self._has_checked_gradients = False
        self._half_way = ""
        engine.count.steps = 0  # an optimizer before this one may have counted
        self._is_stepping = False
        engine.gradients.when_dropped = _weakly(self)

    @cached_property
    def schedule(self) -> CommSchedule:
        """Every collective of one step, in order."""
        return self._engine.plan.schedule(
            stats_numel=self._stats_pass.numel,
            wire_dtypes=self._wire_dtypes,
            exchange=self._plan.has_matrix_rule,
            logits_numel=self._clipper.numel if self._clipper is not None else 0,
        )

    def step(self, ask: Callable[[], Live]) -> None:
        """All phases, or none: a step that is skipped changes nothing. `ask` is for the options as they are."""
        engine = self._engine
        self._is_stepping = True
        try:
            # 1. Reduce, and 2. Stats.
            totals, live = self.measure(ask)
            self._changed.clear()
            policy = self._policy_now
            coefficients = policy.clip_coefficients(totals, self._stats_pass.names)
            skip_reason = policy.skip_reason(totals)
            if self.scaler is not None:
                self.scaler.update(overflow=bool(totals.nonfinite))
            clipped = NOTHING_CLIPPED
            if not skip_reason:
                engine.publisher.order.learn(engine.groups)
                engine.count.steps += 1
                with self.moving_masters(f"step {engine.count.steps}"):
                    self.update.average(totals.divisors, coefficients)
                    # 3. Momentum.
                    self.update.momentum(live.options, engine.count.steps)
                    # 4. Exchange, 5. Orthogonalise, 6. Return: cohort by cohort, one on its way while another is worked on.
                    self.update.orthogonalise(live.options, engine.count.steps)
                    if self._clipper is not None:
                        clipped = self._clipper.apply()
                    # 7. Publish. Gradients are used up: what they lie in may serve it.
                    engine.gradients.forget()
                    engine.publisher.begin()
            self._record(totals, coefficients, skip_reason, clipped, live)
        finally:
            self.forget()
            self._is_stepping = False

    def measure(self, ask: Callable[[], Live]) -> tuple[Totals, Live]:
        """Finish the reductions and take the statistics; raises on every rank if any of them has a problem.

        The pass over gradients is under way before anything else is looked at: a device has something to do meanwhile.
        """
        engine = self._engine
        # Nobody may have read some weights since the last step. They are gathered now: masters are about to move.
        engine.publisher.ensure_all()
        self._changed |= engine.storage.pull_changed_params()
        gradients = engine.gradients
        unfit = self._unfit_gradients()
        is_unscaled = self.scaler is not None and gradients.has_gradients and not gradients.said.is_scaled
        missing = gradients.finish()
        divisors = self._divisors()
        vector = self._stats_pass.begin(divisors)
        live = ask()
        problem = self._preflight(live) or unfit
        if not self._has_checked_replicas or engine.settings.check_replicas:
            # A bad start must not be spread: from now on shards of all ranks are one model.
            check_copies(engine.storage, engine.communicators, engine.groups)
            self._has_checked_replicas = True
        settings = self._settings(live)
        self._prepare()
        seen = Seen(
            missing=missing,
            late=gradients.late,
            joint=gradients.joint,
            settings=repr([settings, problem]),
            tie_settings={tie: repr(settings) for tie, settings in live.tie_settings.items()},
            has_problem=problem is not None,
            is_scaled=gradients.said.is_scaled,
            is_unscaled=is_unscaled,
        )
        totals = self._stats_pass.reduce(vector, seen, divisors)
        is_partial = gradients.are_reduced and bool(totals.disagreeing)  # then not all would take part
        if totals.late and totals.consistent and not is_partial:
            # Some rank had gradients after their reduction was launched: all reduce them now.
            gradients.reduce_again(self._here(totals.late))
            vector = self._stats_pass.begin(divisors)
            self._prepare()
            totals = self._stats_pass.reduce(vector, replace(seen, late=gradients.late), divisors)
        self._check_agreement(totals, problem, settings, live)
        if gradients.are_copies and not totals.nonfinite:
            if not self._has_checked_gradients or engine.settings.check_replicas:
                check_gradients(engine.storage.params, engine.everyone)
            self._has_checked_gradients = True
        return totals, live

    def clip_next_step(self, max_norm: float, ask: Callable[[], Live]) -> float:
        """The norm of the gradients as they are, which the coming step is clipped by. What is asked for is a setting of
        that step, the same on every rank, and goes with the gradients."""
        if self._policy.clip == "none":
            raise ValueError("clip_grad_norm_() was called with clip='none': expected a scope to clip. Leave clip out.")
        replace(self._policy, clip_grad_norm=max_norm)  # raises for what is no bound
        self._engine.gradients.said.clip_norm = max_norm
        totals, _ = self.measure(ask)
        return self._policy.clipped_norm(totals)

    def _prepare(self) -> None:
        """Outside of a step nobody may hold gradients that are the user's."""
        if self._is_stepping:
            self.update.prepare()

    def forget(self) -> None:
        """Gradients, and whatever was noted of them, are not wanted any more."""
        self.update.forget()
        self._engine.gradients.forget()
        self._engine.traffic.close()
        if self._clipper is not None:
            self._clipper.reset()

    def agree_to_drop(self) -> None:
        """Gradients whose reduction has begun were dropped, outside of a step. Raise, on every rank, unless all of them
        did so: where some step instead, reductions of different backwards would be paired from now on.

        Every reduction that has begun ends in one exchange of statistics, which says what becomes of it: a rank that drops
        it says so where the others send those of their step. It costs nothing where gradients were not on their way:
        after a step, before a backward, a second time. Pipeline stages reduce apart from each other, and may not all have
        come to their backward; there ranks that disagree wait for each other until one of them gives up.
        """
        groups = self._engine.groups
        if self._is_stepping or groups.world == 1 or len(groups.stages) > 1:
            return
        if self._stats_pass.meet("gradients were dropped"):
            return
        error = StateError(
            "zero_grad() dropped gradients that were being reduced, while other ranks went on with a step(): reductions of different "
            "backwards would be added up from here on. After a backward that failed on any rank, or ran on some only, all "
            "ranks have to call zero_grad(), and all of them must have begun that backward; or call step() on all of them."
        )
        agree_despite(groups, "optimizer settings", error, {})

    def pull_changed(self) -> None:
        """Masters follow what the user wrote into weights."""
        self._changed |= self._engine.storage.pull_changed_params()

    def free(self) -> None:
        """Let go of staging memory."""
        self.update.free()

    def refuse_half_way(self) -> None:
        """Raise if masters were left in between."""
        if self._half_way:
            raise StateError(
                f"{self._half_way} ended half way, by an exception: some masters are new and some old, and ranks may "
                "differ in which. Build the model and the optimizer anew and load a checkpoint."
            )

    @contextmanager
    def moving_masters(self, what: str) -> Iterator[None]:
        """An exception in here (no memory, an interrupt) leaves some masters new and some old, not the same ones on every
        rank, and is remembered."""
        self._half_way = what
        yield
        self._half_way = ""

    def _divisors(self) -> Divisors:
        scale = self.scaler.scale if self.scaler is not None else 1.0
        engine = self._engine
        return Divisors(
            scale,
            engine.gradients.common_divisor * scale,
            {shard.plan.index: engine.gradients.divisor_of(shard) * scale for shard in engine.storage.shards},
        )

    @property
    def _policy_now(self) -> GradientPolicy:
        """The policy of the coming step: clipping twice is clipping to the smaller norm."""
        asked = (self._policy.clip_grad_norm, self._engine.gradients.said.clip_norm)
        return replace(self._policy, clip_grad_norm=min((bound for bound in asked if bound is not None), default=None))

    def _preflight(self, live: Live) -> Exception | None:
        """What this rank alone can see to be wrong. It is raised after the stats, when all ranks know: one that raised
        before would leave the others waiting in a collective."""
        engine = self._engine
        try:
            self.refuse_half_way()
            engine.check_trainables()
            engine.storage.check_aliases()
        except Exception as error:
            return error
        return live.problem

    def _unfit_gradients(self) -> Exception | None:
        """The same of gradients, before any of them is used."""
        gradients = self._engine.gradients
        try:
            gradients.check()
            if self._clipper is not None:
                self._clipper.check(gradients.arrived)
        except Exception as error:
            return error
        return None

    def _settings(self, live: Live) -> dict[str, object]:
        """What all ranks must have in common at a step."""
        return {
            "step": self._engine.count.steps,
            "loss_scale": self.scaler.scale if self.scaler is not None else None,
            "policy": repr(self._policy_now),
            "weights changed from outside": self._changed_hashes(),
            **live.settings,
        }

    def _changed_hashes(self) -> dict[str, list[int] | None]:
        """What was written into weights since the last step: the same on every rank, or shards would mix. Ranks hold
        different experts under one name, so of those only the name; and of a weight that somebody else has cut each writes
        its own part, or none."""
        if not self._changed:
            return {}
        storage, plan = self._engine.storage, self._engine.plan
        cut = {fqn for shard in plan.own for fqn in shard.fqns if shard.world > 1}
        return {
            fqn: hash_bits(storage.held[fqn].detach().reshape(-1)).tolist() if plan.domain_of(fqn) == DENSE else None
            for fqn in sorted(self._changed - cut)
        }

    def _here(self, late: Collection[tuple[int, str]]) -> set[str]:
        """Late params of this stage, and copies here of a tied weight that was late elsewhere."""
        roster, mine = self._engine.roster, self._engine.groups.stage
        found = {fqn for stage, fqn in late if stage == mine}
        for copies in roster.copies.values():
            if mine in copies and any((stage, fqn) in late for stage, fqn in copies.items()):
                found.add(copies[mine])
        return found

    def _check_agreement(
        self, totals: Totals, problem: Exception | None, settings: Mapping[str, object], live: Live
    ) -> None:
        """Raise on every rank if any of them has a problem or other settings, or if a gradient that must be there is
        not."""
        groups = self._engine.groups
        if not totals.consistent or totals.problems:
            agree_despite(groups, "optimizer settings", problem, settings)
            check_alike(groups, self._engine.roster, "is updated", live.tie_settings)
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
        if self._engine.gradients.are_reduced and totals.disagreeing:
            names = [f"{fqn} (missing on {some} of {all_} ranks)" for fqn, (some, all_) in totals.disagreeing.items()]
            raise StateError(
                f"some ranks have a gradient and some have none: {listed(names)}. Whoever reduced gradients did so on all ranks that "
                "hold the same part of a param, so expected one on all of them or on none. Run the same modules on every rank, or use "
                "find_unused_parameters=True of DistributedDataParallel; zero_grad() on all ranks goes on from here."
            )
        if self._policy.strict_grads and totals.missing:
            world = self._engine.plan.world
            names = [f"{fqn} ({count} of {world} ranks)" for fqn, count in totals.missing.items()]
            raise StateError(
                f"no gradient for {listed(names)}: strict_grads=True expects one for every trainable param. "
                "Freeze what is unused."
            )

    def _record(
        self, totals: Totals, coefficients: Mapping[str, float], reason: str, clipped: Clipped, live: Live
    ) -> None:
        """What the step saw and did; raises where that was too much."""
        engine = self._engine
        self.stats = StepStats(
            grad_norm=totals.norm("matrix", "other"),
            norms={name: totals.norm(name) for name in totals.square_sums},
            clip_coefficients=coefficients,
            num_zeros=totals.num_zeros,
            nonfinite=totals.nonfinite,
            missing=totals.missing,
            step=engine.count.steps,
            skipped=bool(reason),
            skip_reason=reason,
            loss_scale=totals.divisors.scale,
            max_logit=clipped.max_logit,
            clipped_heads=clipped.heads,
            nonfinite_logits=clipped.nonfinite,
            unseen_logits=clipped.unseen,
            bytes_by_collective=engine.traffic.sent({} if reason else engine.publisher.due_nbytes),
            products=self.update.products(live.options),
        )
        if totals.nonfinite and self._policy.nonfinite == "raise":
            raise NonFiniteError(
                f"gradients of {listed(totals.nonfinite)} hold inf or NaN; the step was not taken and nothing was changed."
            )
        self._skips.note(
            engine.count.steps + 1,
            reason,
            overflow=self.scaler is not None and bool(totals.nonfinite),
            aloud=engine.groups.rank == 0,
        )

"""One step: the phases of the design, in order, and what is decided between them from reduced values.

[Note: A step need not wait for its statistics]
Whether a step is taken, and how its gradients are clipped, is a function of statistics that a device has long before a host
can read them: a host that waits for them has lost its lead, and the device then waits for the host, in forward too. Where
nobody else has to know before the step ends, the device makes the same decision from the same numbers, and whatever would
update something asks for it there. The host hears of it when somebody asks, and at the next step at the latest; until then
it takes the step for one that was taken. Elsewhere the host decides first, and launches nothing that is not to be done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.comm.groups import agree_despite
from layerwise.dtypes import DType
from layerwise.engine.algorithms import LiveOptions
from layerwise.engine.engine import Engine
from layerwise.engine.gradients import Divisors
from layerwise.engine.loss_scale import LossScaler
from layerwise.engine.measure import Begun, Measure
from layerwise.engine.policy import StepPolicy
from layerwise.engine.qk_clip import NOTHING_CLIPPED, Clipped, Clipper
from layerwise.engine.skips import Skips
from layerwise.engine.step_plan import Live, StepPlan
from layerwise.engine.totals import StepStats, Totals
from layerwise.engine.update import Update
from layerwise.errors import NonFiniteError, StateError
from layerwise.kernels.facts import has_own_kernels
from layerwise.kernels.verdicts import FIRST, Factor, Scale
from layerwise.layout.schedule import CommSchedule


def _weakly(stepper: Stepper, method: Callable[[Stepper], None]) -> Callable[[], None]:
    """Have a stepper asked for as long as somebody holds it."""
    own = weakref.ref(stepper)

    def ask() -> None:
        found = own()
        if found is not None:
            method(found)

    return ask


def _nothing() -> None:
    """What is prepared where no step follows."""


class _Left(NamedTuple):
    """A step that was launched before it was known what became of it."""

    totals: Callable[[], Totals]
    policy: StepPolicy
    options: Sequence[LiveOptions]
    bytes_by_collective: Mapping[str, int]


class Stepper:
    """Steps the shards of an engine by the rules of an optimizer."""

    def __init__(self, engine: Engine, plan: StepPlan, wire_dtypes: Mapping[tuple[str, int], DType]) -> None:
        self._engine = engine
        self._plan = plan
        self._wire_dtypes = wire_dtypes
        self._policy = plan.policy
        self._skips = Skips(plan.policy.given.max_skipped)
        self.scaler = LossScaler(plan.loss_scale) if plan.loss_scale is not None else None
        self._clipper = Clipper(engine, plan.watched) if plan.watched is not None else None
        self._measure = Measure(engine, plan, self.scaler, self._clipper)
        engine.count.start(0, {})  # an optimizer before this one may have counted
        self.update = Update(
            engine, plan.groups, plan.norm_group_of, self.schedule, wire_dtypes, exchange=plan.has_matrix_rule
        )
        self._stats = StepStats()
        self._left: _Left | None = None
        self._decides_later = self._may_decide_later()
        self._half_way = ""
        self._untold: list[Callable[[], None]] = []
        self._is_stepping = False
        engine.gradients.when_dropped = _weakly(self, Stepper.agree_to_drop)
        engine.count.look_back = _weakly(self, Stepper.look_back)

    @cached_property
    def schedule(self) -> CommSchedule:
        """Every collective of one step, in order."""
        return self._engine.plan.schedule(
            stats_numel=self._measure.numel,
            wire_dtypes=self._wire_dtypes,
            exchange=self._plan.has_matrix_rule,
            logits_numel=self._clipper.numel if self._clipper is not None else 0,
        )

    @property
    def stats(self) -> StepStats:
        """What the last step saw and did."""
        self.catch_up()
        return self._stats

    def step(self, ask: Callable[[], Live]) -> None:
        """All phases, or none: a step that is skipped changes nothing. `ask` is for the options as they are."""
        self._is_stepping = True
        calls, has_gradients = self._engine.calls, self._engine.gradients.has_gradients
        try:
            # 1. Reduce, and 2. Stats.
            measure, prepare = self._measure, partial(self.update.prepare, waits=not self._decides_later)
            begun = measure.begin(ask, self._refuse_half_way, prepare)
            if self._decides_later and measure.is_foreseen(begun) and not self._is_recorded:
                self._step_unseen(begun)
            else:
                self._step_seen(measure.agreed(begun, measure.reduce(begun)(), prepare), begun.live)
        except BaseException:
            self._forget(self._half_way == "" and self._engine.gradients.leave())
            calls.forget()
            raise
        else:
            self.forget()
            calls.stepped(has_gradients=has_gradients)
        finally:
            self._is_stepping = False
        self._tell()  # of the step before, now that nothing can come of it for this one

    def _step_seen(self, totals: Totals, live: Live) -> None:
        """What is left of a step, once it is known what came of its gradients."""
        self._measure.forget_changes()
        policy = self._measure.policy_now
        coefficients = policy.clip_coefficients(totals, self._measure.names)
        skip_reason = policy.skip_reason(totals)
        if self.scaler is not None:
            self.scaler.update(overflow=bool(totals.nonfinite))
        clipped = NOTHING_CLIPPED
        if not skip_reason:
            clipped = self._advance(totals.divisors, coefficients, None, live)
        sent = self._engine.traffic.sent({} if skip_reason else self._engine.publisher.due_nbytes)
        self._record(totals, coefficients, skip_reason, clipped, live.options, sent)
        if self._policy.given.nonfinite == "raise" and (unfit := policy.unfit(totals)):
            self._untold.clear()
            raise NonFiniteError(f"{unfit}; the step was not taken and nothing was changed.")

    def _step_unseen(self, begun: Begun) -> None:
        """The same before it is known: the device decides. See [Note: A step need not wait for its statistics]."""
        engine, measure = self._engine, self._measure
        measure.forget_changes()
        policy = measure.policy_now
        verdict = measure.decide(begun, policy)
        coefficients = {name: Factor(verdict, FIRST + place) for place, name in enumerate(measure.names)}
        totals = measure.reduce_alone(begun)
        self._advance(begun.divisors, coefficients, verdict, begun.live)
        sent = engine.traffic.sent(engine.publisher.due_nbytes)
        self._left = _Left(totals, policy, begun.live.options, sent)

    def look_back(self) -> None:
        """Know what became of the last step."""
        if self._left is None:
            return
        totals, (_, policy, options, sent) = self._left.totals(), self._left
        self._left = None  # not before there is something in its place: whoever waits may be interrupted
        reason = policy.skip_reason(totals)
        self._engine.count.steps -= bool(reason)
        coefficients = policy.clip_coefficients(totals, self._measure.names)
        self._record(totals, coefficients, reason, NOTHING_CLIPPED, options, sent)

    def catch_up(self) -> None:
        """Know what became of the last step, and tell."""
        self.look_back()
        self._tell()

    def _tell(self) -> None:
        """Warn of steps that were skipped, or raise where they are too many: once of each, in their order."""
        while self._untold:
            self._untold.pop(0)()

    @property
    def _is_recorded(self) -> bool:
        """Whether somebody records a CUDA graph: of a step it would repeat the rates and the number, so waiting is to fail."""
        return self._engine.storage.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _may_decide_later(self) -> bool:
        """Whether nobody has to know what became of a step before it ends: no other rank, no exception that was asked for, no
        scale of the next loss; and nothing is updated but by kernels that ask the verdict."""
        policy, engine = self._policy.given, self._engine
        is_asked = policy.nonfinite == "raise" or policy.max_skipped is not None
        is_bound = self.scaler is not None or self._clipper is not None or self.update.keeps_at_home
        is_alone = engine.groups.world == 1 and not engine.gradients.are_copies
        return is_alone and not is_asked and not is_bound and has_own_kernels(engine.storage.device)

    def _advance(
        self, divisors: Divisors, coefficients: Mapping[str, Scale], verdict: Tensor | None, live: Live
    ) -> Clipped:
        """Phases 3 to 7."""
        engine, clipped = self._engine, NOTHING_CLIPPED
        engine.publisher.order.learn(engine.groups)
        engine.count.steps += 1
        with self.moving_masters(f"step {engine.count.steps}"):
            self.update.average(divisors, coefficients, verdict)
            # 3. Momentum.
            self.update.momentum(live.options, engine.count.steps)
            # 4. Exchange, 5. Orthogonalise, 6. Return: cohort by cohort, one on its way while another is worked on.
            self.update.orthogonalise(live.options, engine.count.steps)
            if self._clipper is not None:
                clipped = self._clipper.apply()
            # 7. Publish. Gradients are used up: what they lie in may serve it.
            engine.gradients.forget()
            engine.publisher.begin()
        return clipped

    def clip_next_step(self, max_norm: float, ask: Callable[[], Live]) -> float:
        """The norm of the gradients as they are, which the coming step is clipped by. What is asked for is a setting of
        that step, the same on every rank, and goes with the gradients."""
        replace(self._policy, clip_grad_norm=max_norm)  # raises for what is no bound
        said = self._engine.gradients.said
        # Clipping twice is clipping to the smaller norm.
        said.clip_norm = max_norm if said.clip_norm is None else min(said.clip_norm, max_norm)
        measure = self._measure
        begun = measure.begin(ask, self._refuse_half_way, _nothing)  # nobody may hold gradients that are the user's
        totals = measure.agreed(begun, measure.reduce(begun)(), _nothing)
        return self._policy.clipped_norm(totals)

    def forget(self) -> None:
        """Gradients, and whatever was noted of them, are not wanted any more."""
        self._forget(False)

    def _forget(self, gradients_stay: bool) -> None:
        self.update.forget()
        if not gradients_stay:
            self._engine.gradients.forget()
        self._engine.traffic.close()
        if self._clipper is not None and not gradients_stay:
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
        if self._measure.meet("gradients were dropped"):
            return
        error = StateError(
            "zero_grad() dropped gradients that were being reduced, while other ranks went on with a step(): reductions of different "
            "backwards would be added up from here on. After a backward that failed on any rank, or ran on some only, all "
            "ranks have to call zero_grad(), and all of them must have begun that backward; or call step() on all of them."
        )
        agree_despite(groups, "optimizer settings", error, {})

    def pull_changed(self) -> None:
        """Masters follow what the user wrote into weights."""
        self._measure.pull_changed()

    def free(self) -> None:
        """Let go of staging memory."""
        self.update.free()

    def settle(self) -> None:
        """Know what became of the last step, and tell; raises if masters were left in between."""
        self._refuse_half_way()
        self.catch_up()

    def _refuse_half_way(self) -> None:
        """The same, and tell nothing: a step is about to be taken, whose statistics come where those of the last one are."""
        self.look_back()
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

    def _record(
        self,
        totals: Totals,
        coefficients: Mapping[str, float],
        reason: str,
        clipped: Clipped,
        options: Sequence[LiveOptions],
        bytes_by_collective: Mapping[str, int],
    ) -> None:
        """What the step saw and did."""
        engine = self._engine
        self._stats = StepStats(
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
            bytes_by_collective=bytes_by_collective,
            products=self.update.products(options),
        )
        overflow, aloud = self.scaler is not None and bool(totals.nonfinite), engine.groups.rank == 0
        self._untold.append(partial(self._skips.note, engine.count.steps + 1, reason, overflow=overflow, aloud=aloud))

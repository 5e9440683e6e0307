"""Phases 1 and 2 of a step: gradients are reduced and looked at, and ranks tell each other what they have seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from layerwise.comm.groups import agree_despite
from layerwise.comm.roster import check_alike
from layerwise.engine.copies import check_copies, check_gradients
from layerwise.engine.engine import Engine
from layerwise.engine.gradients import Divisors
from layerwise.engine.loss_scale import LossScaler
from layerwise.engine.policy import StepPolicy
from layerwise.engine.qk_clip import Clipper
from layerwise.engine.stats import StatsPass
from layerwise.engine.step_plan import Live, StepPlan
from layerwise.engine.totals import Seen, Totals
from layerwise.errors import PlanMismatchError, StateError, listed
from layerwise.kernels.hashing import hash_bits
from layerwise.routing.spec import DENSE


class Begun(NamedTuple):
    """A step whose pass over gradients is under way."""

    vector: Tensor
    seen: Seen
    divisors: Divisors
    live: Live
    problem: Exception | None
    settings: Mapping[str, object]


class Measure:
    """What a step has to know before it may be taken, from all ranks."""

    def __init__(self, engine: Engine, plan: StepPlan, scaler: LossScaler | None, clipper: Clipper | None) -> None:
        self._engine = engine
        self._policy = plan.policy
        self._checks_replicas = plan.check_replicas
        self._scaler = scaler
        self._clipper = clipper
        self._stats_pass = StatsPass(engine, plan.norm_group_of, plan.norm_group_names, zeros=plan.count_zeros)
        self._changed: set[str] = set()
        self._last_divisors: Divisors | None = None
        self._has_checked_replicas = False
        self._has_checked_gradients = False

    @property
    def names(self) -> list[str]:
        """The norm groups."""
        return self._stats_pass.names

    @property
    def numel(self) -> int:
        """How many numbers ranks tell each other."""
        return self._stats_pass.numel

    def begin(self, ask: Callable[[], Live], check: Callable[[], None], prepare: Callable[[], None]) -> Begun:
        """Finish the reductions, and look at all that ranks have to tell each other.

        The pass over gradients is under way before anything else is looked at: a device has something to do meanwhile. `check`
        raises if a step must not be taken here, `prepare` is called with gradients at their places.
        """
        engine = self._engine
        # Nobody may have read some weights since the last step. They are gathered now: masters are about to move.
        engine.publisher.ensure_all()
        gradients = engine.gradients
        unfit = self._unfit_gradients()
        is_unscaled = self._scaler is not None and gradients.has_gradients and not gradients.said.is_scaled
        is_odd = engine.plan.options.reduces and engine.calls.is_odd(has_gradients=gradients.has_gradients)
        missing = gradients.finish()
        divisors = self._divisors()
        vector = self._stats_pass.begin(divisors)
        self.pull_changed()
        live = ask()
        problem = self._preflight(live, check) or unfit
        if not self._has_checked_replicas or self._checks_replicas:
            # A bad start must not be spread: from now on shards of all ranks are one model.
            check_copies(engine.storage, engine.communicators, engine.groups)
            self._has_checked_replicas = True
        # A rank without others need not put into words what it would not compare.
        settings = self._settings(live) if engine.groups.world > 1 else {}
        prepare()
        seen = Seen(
            missing=missing,
            late=gradients.late,
            joint=gradients.joint,
            settings=repr([settings, problem]),
            tie_settings={tie: repr(settings) for tie, settings in live.tie_settings.items()},
            has_problem=problem is not None,
            is_scaled=gradients.said.is_scaled,
            is_unscaled=is_unscaled,
            is_odd=is_odd,
            has_zeroed=engine.calls.has_zeroed,
        )
        return Begun(vector, seen, divisors, live, problem, settings)

    def agreed(self, begun: Begun, totals: Totals, prepare: Callable[[], None]) -> Totals:
        """The statistics that count; raises on every rank if any of them has a problem."""
        engine, seen, divisors = self._engine, begun.seen, begun.divisors
        gradients = engine.gradients
        is_partial = gradients.are_reduced and bool(totals.disagreeing)  # then not all would take part
        if totals.late and totals.consistent and not is_partial:
            # Some rank had gradients after their reduction was launched: all reduce them now.
            gradients.reduce_again(self._here(totals.late))
            vector = self._stats_pass.begin(divisors)
            prepare()
            totals = self._stats_pass.reduce(vector, replace(seen, late=gradients.late), divisors)()
        self._check_agreement(totals, begun)
        if gradients.are_copies and not totals.nonfinite:
            if not self._has_checked_gradients or self._checks_replicas:
                check_gradients(engine.storage.params, engine.everyone)
            self._has_checked_gradients = True
        return totals

    def reduce(self, begun: Begun) -> Callable[[], Totals]:
        """Have ranks tell each other; what this gives waits for what comes back, and is to be called before the next step."""
        return self._stats_pass.reduce(begun.vector, begun.seen, begun.divisors)

    def reduce_alone(self, begun: Begun) -> Callable[[], Totals]:
        """The same of a step that was foreseen: there is nothing to tell."""
        return self._stats_pass.reduce_alone(begun.vector, begun.divisors)

    def decide(self, begun: Begun, policy: StepPolicy) -> Tensor:
        """What is to be done about the gradients, on the device."""
        return self._stats_pass.decide(begun.vector, policy.bounds(tuple(self.names), begun.divisors.common))

    def is_foreseen(self, begun: Begun) -> bool:
        """Whether nothing but what is in the gradients can keep a rank without others from taking this step."""
        seen = begun.seen
        return not (seen.missing or seen.late or seen.has_problem)

    def meet(self, settings: str) -> bool:
        """Whether all ranks are here with the same to say, and nothing else."""
        return self._stats_pass.meet(settings)

    def pull_changed(self) -> None:
        """Masters follow what the user wrote into weights."""
        self._changed |= self._engine.storage.pull_changed_params()

    def forget_changes(self) -> None:
        """Ranks have agreed on what was written into weights."""
        self._changed.clear()

    @property
    def policy_now(self) -> StepPolicy:
        """The policy of the coming step: clipping twice is clipping to the smaller norm."""
        asked = (self._policy.clip_grad_norm, self._engine.gradients.said.clip_norm)
        return replace(self._policy, clip_grad_norm=min((bound for bound in asked if bound is not None), default=None))

    def _divisors(self) -> Divisors:
        """They change with the loss scale and with nothing else."""
        scale = self._scaler.scale if self._scaler is not None else 1.0
        if self._last_divisors is None or self._last_divisors.scale != scale:
            gradients = self._engine.gradients
            self._last_divisors = Divisors(scale, gradients.common_divisor * scale, gradients.own_divisor * scale)
        return self._last_divisors

    def _preflight(self, live: Live, check: Callable[[], None]) -> Exception | None:
        """What this rank alone can see to be wrong. It is raised after the stats, when all ranks know: one that raised
        before would leave the others waiting in a collective."""
        engine = self._engine
        try:
            check()
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
            "loss_scale": self._scaler.scale if self._scaler is not None else None,
            "policy": self.policy_now.facts(),
            "weights changed from outside": self._changed_hashes(),
            **live.settings(),
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

    def _check_agreement(self, totals: Totals, begun: Begun) -> None:
        """Raise on every rank if any of them has a problem or other settings, or if a gradient that must be there is
        not."""
        groups = self._engine.groups
        if not totals.consistent or totals.problems:
            agree_despite(groups, "optimizer settings", begun.problem, begun.settings)
            check_alike(groups, self._engine.roster, "is updated", begun.live.tie_settings)
            raise PlanMismatchError(
                "ranks called step() with different optimizer settings, which have changed back since."
            )
        if totals.has_extra_step and not totals.nothing_arrived:
            twice = StateError(
                f"step() was called once too often on rank {groups.rank}: it came twice without the zero_grad() in between that other ranks "
                "called, and from here on gradients of this rank would be one step late. This step changed nothing. Call step() equally "
                "often on every rank; one without a batch calls zero_grad() and step() like the others."
            )
            agree_despite(groups, "calls of step()", twice if begun.seen.is_odd else None, {})
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
        if self._policy.given.strict_grads and totals.missing:
            world = self._engine.plan.world
            names = [f"{fqn} ({count} of {world} ranks)" for fqn, count in totals.missing.items()]
            raise StateError(
                f"no gradient for {listed(names)}: strict_grads=True expects one for every trainable param. "
                "Freeze what is unused."
            )

"""Phases 3 to 6 of a step: average, clip, momentum, exchange, orthogonalise, return, and the update of masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.comm.scopes import scope
from layerwise.dtypes import DType
from layerwise.engine.algorithms import ELEMENTWISE, MATRIX, LiveOptions, Runs, number, products_of
from layerwise.engine.bunches import bunches_of, parts_of, states_of
from layerwise.engine.engine import Engine
from layerwise.engine.exchanger import Batch, Cohort, OwnedRegion, Passage
from layerwise.engine.factors import Factors
from layerwise.engine.gradients import Divisors
from layerwise.engine.param_groups import GroupPlan
from layerwise.engine.runs import Run, runs_of
from layerwise.kernels.elementwise import couple_, look_at, scale_, subtract_scaled_
from layerwise.kernels.lists import Cuts, Kept, Tensors, Views
from layerwise.kernels.recorded import Recorder
from layerwise.kernels.verdicts import ONE, Factor, Scale
from layerwise.layout.schedule import CommSchedule, staggered
from layerwise.layout.spans import Span
from layerwise.memory.parts import UpdateParts


class _Direct(NamedTuple):
    """What of a cohort momentum leaves in its batches, of one param group."""

    group: int
    runs: list[Run]
    states: Mapping[str, list[Tensor]]
    into: Cuts
    """Where in the batches."""


class AtHome(NamedTuple):
    """Some state that lives with a matrix."""

    shape: tuple[int, ...]
    first: int
    """The first of the matrix's homes, which speaks for all."""
    matrix: str
    """The label of the matrix."""
    name: str


class Update:
    """Everything between reduced gradients and new masters, on this rank."""

    def __init__(
        self,
        engine: Engine,
        groups: Sequence[GroupPlan],
        norm_group_of: Mapping[str, str],
        schedule: CommSchedule,
        wire_dtypes: Mapping[tuple[str, int], DType],
        exchange: bool,
    ) -> None:
        self._shards = engine.storage.shards
        self._works = engine.plan.works if exchange else ()
        self._device = engine.storage.device
        self._groups = groups
        self._recorder = Recorder()
        self._group_of = {fqn: index for index, group in enumerate(groups) for fqn in group.fqns}
        self._allocate_state()
        self._norm_groups = [{norm_group_of[fqn] for fqn in group.fqns} for group in groups]
        """Of every param group: one, nearly always."""
        self._scales: list[Scale] = [1.0] * len(groups)
        self._verdict: Tensor | None = None
        self._keeps_updates = engine.storage.keeps_updates
        self._mixed = self._by_norm_group(norm_group_of)
        shard_by_index = {shard.plan.index: shard for shard in self._shards}
        self._cohorts = [
            [
                Cohort(
                    shard_by_index,
                    engine.communicators[work.domain],
                    schedule,
                    work,
                    cohort,
                    self._group_of,
                    wire_dtypes[work.domain, cohort],
                    stay=self._keeps_updates,
                )
                for cohort in range(work.num_cohorts)
            ]
            for work in self._works
        ]
        every = [cohort for cohorts in self._cohorts for cohort in cohorts]
        # Masters and state stay where they are; updates may be other tensors in every step.
        self._staying, self._returning = (
            {cohort: Kept(region.master for region in regions_of(cohort)) for cohort in every}
            for regions_of in (attrgetter("staying"), attrgetter("returning"))
        )
        """Masters of what stays where it is in each cohort, and of what comes back."""
        self._direct = {cohort: self._direct_of(cohort) for cohort in every}
        self.arrange(engine.count.begun)
        self._direct_parts = {
            cohort: [parts_of(direct.runs, stay=self._keeps_updates) for direct in found]
            for cohort, found in self._direct.items()
        }
        self._grads: list[Views] = []
        self._direct_grads: dict[Cohort, list[Views]] = {}
        self._staying_factors = {cohort: self._factors_of(cohort.staying) for cohort in every}
        self._returning_factors = {cohort: self._factors_of(cohort.returning) for cohort in every}
        travelling = [[cohort for cohort in cohorts if cohort.travels] for cohorts in self._cohorts]
        self.slots = engine.storage.slots([[cohort.passage_nbytes for cohort in cohorts] for cohorts in travelling])
        for cohorts, slots in zip(travelling, self.slots.plan.slots, strict=True):
            for cohort, slot in zip(cohorts, slots, strict=True):
                cohort.assign(self.slots, slot)
        self._home_state = {
            batch: {
                name: torch.zeros(len(batch.items), *shape, dtype=torch.float32, device=self._device)
                for name, shape in groups[batch.group].rule.home_state(*batch.logical_shape).items()
            }
            for cohorts in self._cohorts
            for cohort in cohorts
            for batch in cohort.batches
        }

    def _by_norm_group(self, norm_group_of: Mapping[str, str]) -> dict[str, UpdateParts]:
        """By norm group, the updates of param groups that are in several of them."""
        mixed = {fqn for fqn, index in self._group_of.items() if len(self._norm_groups[index]) > 1}
        names = sorted({norm_group_of[fqn] for fqn in mixed})
        others = len(names)
        number_of = {fqn: names.index(norm_group_of[fqn]) if fqn in mixed else others for fqn in self._group_of}
        runs = [run for shard in self._shards for run in runs_of(shard, number_of)]
        return {
            name: parts_of((run for run in runs if run.group == number), stay=self._keeps_updates)
            for number, name in enumerate(names)
            if any(run.group == number for run in runs)
        }

    def _direct_of(self, cohort: Cohort) -> list[_Direct]:
        runs = [
            Run(one.shard, self._group_of[one.matrix.fqn], offset, offset + one.region.numel)
            for one in cohort.direct
            for offset in (one.region.in_shard.offset,)
        ]
        found = []
        for group in sorted({run.group for run in runs}):
            places = [place for place, run in enumerate(runs) if run.group == group]
            own = [runs[place] for place in places]
            found.append(_Direct(group, own, states_of(self._groups[group].rule, own), cohort.directly(places)))
        return found

    def arrange(self, begun: Mapping[str, int]) -> None:
        """Have what is updated together lie together: again, when state of some params has begun anew."""
        direct = [run for found in self._direct.values() for one in found for run in one.runs]
        self._bunches = bunches_of(self._groups, self._shards, begun, direct, stay=self._keeps_updates)

    def prepare(self, *, waits: bool) -> None:
        """Take the gradients of this step. Where the host has to wait until it is known whether they count, look at them
        before: the device is at its pass over them, and will wait for the host afterwards."""
        self._grads = [bunch.parts.now() for bunch in self._bunches]
        self._direct_grads = {cohort: [parts.now() for parts in found] for cohort, found in self._direct_parts.items()}
        for grads in chain(self._grads, *self._direct_grads.values()) if waits else ():
            look_at(grads)

    def forget(self) -> None:
        """Gradients of this step are not wanted any more."""
        self._grads, self._direct_grads, self._verdict = [], {}, None

    def _factors_of(self, regions: Sequence[OwnedRegion]) -> Factors:
        return Factors((self._group_of[region.matrix.fqn], region.matrix.scaled_as) for region in regions)

    def _allocate_state(self) -> None:
        """All state, on every rank, before the first step: nothing that saves or loads state has to run a step to bring
        it into being."""
        for shard in self._shards:
            shard.state.clear()  # of an optimizer that is gone
            rules = {self._groups[self._group_of[fqn]].rule for fqn in shard.plan.fqns}
            for rule in sorted(rules, key=lambda rule: rule.kind):
                for name in rule.state_names:
                    shard.state.setdefault(name, torch.zeros_like(shard.master))

    def average(self, divisors: Divisors, coefficients: Mapping[str, Scale], verdict: Tensor | None = None) -> None:
        """Make averages of sums, and have them clipped by whoever reads them next. With a verdict, whoever updates anything
        asks it whether the step is taken.

        Gradients arrive as sums over ranks (of a scaled loss). One division in fp32 makes them averages, with the same
        rounding in every layout.
        """
        if divisors.own != 1.0 and self._shards:
            torch._foreach_div_([shard.update for shard in self._shards], divisors.own)
        for name, parts in self._mixed.items():
            scale_(list(parts.now()), coefficients[name])
        self._verdict = verdict
        scales = (coefficients[next(iter(names))] if len(names) == 1 else self._one for names in self._norm_groups)
        self._scales = list(scales)

    @property
    def _one(self) -> Scale:
        """What gradients are multiplied by that are not clipped, or have been."""
        return 1.0 if self._verdict is None else Factor(self._verdict, ONE)

    def momentum(self, options: Sequence[LiveOptions], step: int) -> None:
        """What comes before a matrix is orthogonalised, element by element; but for what can wait for its batch."""
        for number_, bunch in enumerate(self._bunches):
            if bunch.kind in MATRIX:
                self._elementwise(number_, options, step)

    def orthogonalise(self, options: Sequence[LiveOptions], step: int) -> None:
        """Matrices to their homes, Newton-Schulz there, and back into the masters; what no matrix rule manages is updated
        as soon as there is something to wait for."""
        others = [number_ for number_, bunch in enumerate(self._bunches) if bunch.kind in ELEMENTWISE]

        def meanwhile() -> None:
            while others:
                number_ = others.pop()
                self._elementwise(number_, options, step)

        with self.slots.open():
            for cohorts in self._cohorts:
                self._walk(cohorts, options, meanwhile)
        meanwhile()

    def _elementwise(self, number_: int, options: Sequence[LiveOptions], step: int) -> None:
        """The part of the rule that needs no whole matrix, for one bunch."""
        bunch, grads = self._bunches[number_], self._grads[number_]
        kind, live, scale = bunch.kind, options[bunch.group], self._scales[bunch.group]
        weight_decay = number(live, "weight_decay")
        with scope(f"{kind} element-wise"):
            if weight_decay != 0.0 and live["weight_decay_mode"] == "coupled":
                whole = [run.of(run.shard.update.view(-1)) for run in bunch.runs]
                couple_(whole, bunch.masters, weight_decay=weight_decay, scale=scale)
                scale = self._one
            runs = Runs(bunch.masters, grads, bunch.states, scale)
            if kind in MATRIX:
                self._scales[bunch.group] = scale  # of what goes to batches directly, too
                MATRIX[kind].prepare_(runs, live)
            else:
                ELEMENTWISE[kind].update_(runs, live, step - bunch.begun)

    def _prepare_directly(self, cohort: Cohort, batches: Sequence[Tensor], options: Sequence[LiveOptions]) -> None:
        """The same for what of a cohort is left in its batches at once."""
        for direct, grads in zip(self._direct[cohort], self._direct_grads[cohort], strict=True):
            runs = Runs([], grads, direct.states, self._scales[direct.group], direct.into.of(batches))
            MATRIX[self._groups[direct.group].rule.kind].prepare_(runs, options[direct.group])

    def _walk(self, cohorts: Sequence[Cohort], options: Sequence[LiveOptions], meanwhile: Callable[[], None]) -> None:
        """While one cohort is orthogonalised the next is on its way, and the one before is coming back. While the first is
        under way alone there is time for something else."""
        incoming: dict[int, Passage] = {}
        returning: dict[int, Passage] = {}
        for phase, number_ in staggered(len(cohorts)):
            cohort = cohorts[number_]
            if phase == "exchange":
                with scope(f"exchange of {cohort.label}"):
                    incoming[number_] = cohort.send()
                continue
            meanwhile()
            matrices = cohort.unpack(incoming.pop(number_))
            with scope(f"momentum of {cohort.label}"):
                self._prepare_directly(cohort, matrices, options)
            with scope(f"orthogonalise {cohort.label}"):
                directions = []
                for batch in cohort.batches:
                    # A batch is let go as soon as there is its direction.
                    directions.append(self._direction(batch, matrices.pop(0), options[batch.group]))
            if number_ > 0:
                self._take_home(cohorts[number_ - 1], returning.pop(number_ - 1), options)
            with scope(f"return of {cohort.label}"):
                returning[number_] = cohort.send_back(directions)
            with scope(f"update masters at home of {cohort.label}"):
                factors = self._staying_factors[cohort]
                self._subtract(self._staying[cohort], cohort.kept(directions), factors, options)
            del directions
        for number_, passage in returning.items():
            self._take_home(cohorts[number_], passage, options)

    def _direction(self, batch: Batch, update_BMN: Tensor, options: LiveOptions) -> Tensor:
        """The orthogonalised update of a batch. Rules see logical matrices; storage order comes back."""
        algorithm = MATRIX[self._groups[batch.group].rule.kind]
        logical = update_BMN.mT if batch.transposed else update_BMN
        direction = algorithm.direction(logical, options, self._home_state[batch], self._recorder)
        return direction.mT.contiguous() if batch.transposed else direction

    def _take_home(self, cohort: Cohort, passage: Passage, options: Sequence[LiveOptions]) -> None:
        """What comes back is taken off the masters from where it arrived."""
        returned = cohort.returned(passage)
        with scope(f"update masters of {cohort.label}"):
            self._subtract(self._returning[cohort], returned, self._returning_factors[cohort], options)
        passage.release()

    def _subtract(
        self, masters: Tensors, directions: Tensors, factors: Factors, options: Sequence[LiveOptions]
    ) -> None:
        """Masters decay where they are updated: every element of a matrix is, once."""
        numbers = factors.under(options), factors.keeps_under(options)
        subtract_scaled_(masters, directions, *numbers, self._verdict)

    @property
    def keeps_at_home(self) -> bool:
        """Whether homes keep state of matrices, here."""
        return any(self._home_state.values())

    def free(self) -> None:
        """Let go of memory that only a step needs."""
        self.slots.free()
        self._recorder.free()

    def products(self, options: Sequence[LiveOptions]) -> dict[str, str]:
        """Which kernels multiply, and why, for every `ns_dtype` of the matrix rules."""
        return {
            str(live["ns_dtype"]): products_of(live, self._device)
            for live, group in zip(options, self._groups, strict=True)
            if group.rule.is_matrix_rule
        }

    def state_by_fqn(self) -> dict[str, dict[str, Tensor]]:
        """This rank's state of every trainable param, as views; empty tensors where it holds none, so that all ranks
        have the same keys."""
        found: dict[str, dict[str, Tensor]] = {}
        for shard in self._shards:
            for fqn in shard.plan.fqns:
                tensors = {name: shard.state[name] for name in self._groups[self._group_of[fqn]].rule.state_names}
                if shard.is_apart:
                    tensors["master"] = shard.master
                spans = shard.spans_by_fqn.get(fqn, [])
                found[fqn] = {name: _parts_of(tensor, spans) for name, tensor in tensors.items()}
        return found

    def at_home(self) -> dict[tuple[str, str], AtHome]:
        """What homes keep, of every matrix, by the param and the name of its state; the same on every rank."""
        found: dict[tuple[str, str], AtHome] = {}
        for work in self._works:
            for item in work.items:
                rule = self._groups[self._group_of[item.matrix.fqn]].rule
                if rule.is_matrix_rule:
                    for name, shape in rule.home_state(*item.matrix.logical_shape).items():
                        key = item.matrix.fqn, f"{name}.{item.matrix.index}"
                        found[key] = AtHome(tuple(shape), item.homes[0], item.matrix.label, name)
        return found

    def home_state_by_fqn(self) -> dict[str, dict[str, Tensor]]:
        """What homes keep of the matrices of every param, as views; likewise."""
        here = {
            (label, name): tensor[position]
            for batch, tensors in self._home_state.items()
            for name, tensor in tensors.items()
            for position, label in enumerate(batch.labels)
        }
        found: dict[str, dict[str, Tensor]] = {}
        for (fqn, key), kept in self.at_home().items():
            nothing = torch.zeros(0, dtype=torch.float32, device=self._device)
            found.setdefault(fqn, {})[key] = here.get((kept.matrix, kept.name), nothing)
        return found


def _parts_of(flat: Tensor, spans: Sequence[Span]) -> Tensor:
    """What a shard's tensor has of a param, as a view; nothing where it has nothing. Where it has several spans, those lie
    side by side."""
    if not spans:
        return flat[:0]
    return flat[spans[0].shard_offset : spans[-1].part.stop]

"""Phases 3 to 6 of a step: average, clip, momentum, exchange, orthogonalise, return, and the update of masters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.comm.scopes import scope
from layerwise.dtypes import DType
from layerwise.engine.algorithms import ELEMENTWISE, MATRIX, Options, Runs, number, products_of, state_names
from layerwise.engine.engine import Engine
from layerwise.engine.exchanger import Batch, Cohort, Passage
from layerwise.engine.factors import Factors
from layerwise.engine.param_groups import GroupPlan
from layerwise.kernels.elementwise import decay_, subtract_scaled_
from layerwise.layout.schedule import CommSchedule, pipelined
from layerwise.memory.storage import Bucket


@dataclass(frozen=True)
class _Run:
    """A stretch of one shard whose params are all in one group, padding between them included."""

    bucket: Bucket
    group: int
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop]


def _runs_of(bucket: Bucket, group_of: Mapping[str, int]) -> list[_Run]:
    runs: list[_Run] = []
    for span in bucket.spans:
        group, stop = group_of[span.fqn], span.part.stop
        if runs and runs[-1].group == group:
            # The gap between two params is padding: zero gradient, zero state, so it takes part without being noticed.
            runs[-1] = _Run(bucket, group, runs[-1].start, stop)
        else:
            runs.append(_Run(bucket, group, span.shard_offset, stop))
    return runs


def _tensors_of(runs: Sequence[_Run], names: Sequence[str]) -> Runs:
    return Runs(
        masters=[run.of(run.bucket.master) for run in runs],
        grads=[run.of(run.bucket.work) for run in runs],
        states={name: [run.of(run.bucket.state[name]) for run in runs] for name in names},
    )


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
        self._engine = engine
        self._buckets = engine.storage.buckets
        self._groups = groups
        self._group_of = {fqn: index for index, group in enumerate(groups) for fqn in group.fqns}
        self._allocate_state()
        runs = [run for bucket in self._buckets for run in _runs_of(bucket, self._group_of)]
        self._runs = [
            _tensors_of([run for run in runs if run.group == index], state_names(group.rule.kind))
            for index, group in enumerate(groups)
        ]
        names = sorted(set(norm_group_of.values()))
        numbers = {fqn: names.index(name) for fqn, name in norm_group_of.items()}
        self._runs_by_norm_group: dict[str, list[Tensor]] = {name: [] for name in names}
        for bucket in self._buckets:
            for run in _runs_of(bucket, numbers):
                self._runs_by_norm_group[names[run.group]].append(run.of(bucket.work))
        self._cohorts = [
            [
                Cohort(
                    engine.storage,
                    engine.communicators[work.domain],
                    schedule,
                    work,
                    cohort,
                    self._group_of,
                    wire_dtypes[work.domain, cohort],
                )
                for cohort in range(work.num_cohorts)
            ]
            for work in (engine.plan.works if exchange else ())
        ]
        self._factors = {
            cohort: Factors((self._group_of[region.fqn], region.matrix.logical_shape) for region in cohort.owned)
            for cohorts in self._cohorts
            for cohort in cohorts
        }
        travelling = [[cohort for cohort in cohorts if cohort.travels] for cohorts in self._cohorts]
        self.slots = engine.slots = engine.storage.slots(
            [[cohort.passage_nbytes for cohort in cohorts] for cohorts in travelling]
        )
        for cohorts, slots in zip(travelling, self.slots.plan.slots, strict=True):
            for cohort, slot in zip(cohorts, slots, strict=True):
                cohort.assign(self.slots, slot)
        self._home_state = {
            batch: {
                name: torch.zeros(len(batch.items), *shape, dtype=torch.float32, device=engine.storage.device)
                for name, shape in MATRIX[groups[batch.group].rule.kind].home_state(*batch.logical_shape).items()
            }
            for cohorts in self._cohorts
            for cohort in cohorts
            for batch in cohort.batches
        }

    def _allocate_state(self) -> None:
        """All state, on every rank, before the first step: nothing that saves or loads state has to run a step to bring
        it into being."""
        for bucket in self._buckets:
            bucket.state.clear()  # of an optimizer that is gone
            rules = {self._groups[self._group_of[placement.fqn]].rule.kind for placement in bucket.plan.placements}
            for kind in sorted(rules):
                for name in state_names(kind):
                    bucket.state.setdefault(name, torch.zeros_like(bucket.master))

    def apply(self, options: Sequence[Options], divisor: float, coefficients: Mapping[str, float], step: int) -> None:
        """Average, clip, then update the masters of every group; `options` are the live param groups.

        Gradients arrive as sums over ranks (of a scaled loss). One division in fp32 makes them averages, with the same
        rounding in every layout.
        """
        if divisor != 1.0:
            torch._foreach_div_([bucket.work for bucket in self._buckets], divisor)
        for name, stretches in self._runs_by_norm_group.items():
            if stretches and coefficients[name] < 1.0:
                torch._foreach_mul_(stretches, coefficients[name])
        matrix, other = (
            [index for index, group in enumerate(self._groups) if group.rule.is_matrix_rule is wanted]
            for wanted in (True, False)
        )
        for index in matrix:
            self._elementwise(index, options[index], step)
        with self.slots.open():
            for cohorts in self._cohorts:
                self._orthogonalise(cohorts, options, lambda: self._rest(other, options, step))
        self._rest(other, options, step)
        for bucket in self._buckets:
            bucket.advance()

    def _rest(self, groups: list[int], options: Sequence[Options], step: int) -> None:
        """Update what no matrix rule manages, once: as soon as there is something to wait for."""
        while groups:
            index = groups.pop()
            self._elementwise(index, options[index], step)

    def _elementwise(self, index: int, live: Options, step: int) -> None:
        """Decay and the part of the rule that needs no whole matrix."""
        runs, group = self._runs[index], self._groups[index]
        with scope(f"{group.rule.kind} element-wise"):
            decay_(
                runs.masters,
                runs.grads,
                lr=number(live, "lr"),
                weight_decay=number(live, "weight_decay"),
                mode=str(live["weight_decay_mode"]),
            )
            if group.rule.is_matrix_rule:
                MATRIX[group.rule.kind].prepare_(runs, live)
            else:
                ELEMENTWISE[group.rule.kind].update_(runs, live, step)

    def _orthogonalise(
        self, cohorts: Sequence[Cohort], options: Sequence[Options], meanwhile: Callable[[], None]
    ) -> None:
        """Walk the pipeline: while one cohort is orthogonalised the next is on its way, and the one before is coming
        back. While the first is under way alone there is time for something else."""
        incoming: dict[int, Passage] = {}
        returning: dict[int, Passage] = {}
        for phase, number_ in pipelined(len(cohorts)):
            cohort = cohorts[number_]
            if phase == "exchange":
                with scope(f"exchange of {cohort.label}"):
                    incoming[number_] = cohort.send()
                continue
            meanwhile()
            matrices = cohort.unpack(incoming.pop(number_))
            with scope(f"orthogonalise {cohort.label}"):
                directions = [
                    self._direction(batch, tensor, options[batch.group])
                    for batch, tensor in zip(cohort.batches, matrices, strict=True)
                ]
            del matrices
            if number_ > 0:
                self._take_home(cohorts[number_ - 1], returning.pop(number_ - 1), options)
            with scope(f"return of {cohort.label}"):
                returning[number_] = cohort.send_back(directions)
            del directions
        for number_, passage in returning.items():
            self._take_home(cohorts[number_], passage, options)

    def _direction(self, batch: Batch, update_BMN: Tensor, options: Options) -> Tensor:
        """The orthogonalised update of a batch. Rules see logical matrices; storage order comes back."""
        algorithm = MATRIX[self._groups[batch.group].rule.kind]
        logical = update_BMN.mT if batch.transposed else update_BMN
        direction = algorithm.direction(logical, options, self._home_state[batch])
        return direction.mT.contiguous() if batch.transposed else direction

    def _take_home(self, cohort: Cohort, passage: Passage, options: Sequence[Options]) -> None:
        """Apply returned directions to the masters this rank owns, each region with the factor of its matrix."""
        cohort.store(passage)
        factors = self._factors[cohort].under(options)
        with scope(f"update masters of {cohort.label}"):
            subtract_scaled_(
                [region.master for region in cohort.owned], [region.update for region in cohort.owned], factors
            )

    def products(self, options: Sequence[Options]) -> dict[str, str]:
        """Which kernels multiply, and why, for every `ns_dtype` of the matrix rules."""
        chosen = {
            str(live["ns_dtype"]): products_of(live, self._engine.storage.device)
            for live, group in zip(options, self._groups, strict=True)
            if group.rule.is_matrix_rule
        }
        return {name: f"{products.backend}: {products.reason}" for name, products in chosen.items()}

    def state_by_fqn(self) -> dict[str, dict[str, Tensor]]:
        """This rank's state of every trainable param, as views; empty tensors where it holds none, so that all ranks
        have the same keys."""
        found: dict[str, dict[str, Tensor]] = {}
        for bucket in self._buckets:
            for placement in bucket.plan.placements:
                kind = self._groups[self._group_of[placement.fqn]].rule.kind
                span = bucket.span_by_fqn.get(placement.fqn)
                part = span.part if span is not None else slice(0, 0)
                found[placement.fqn] = {name: bucket.state[name][part] for name in state_names(kind)}
                if bucket.master.dtype != bucket.replica.dtype:
                    found[placement.fqn]["master"] = bucket.master[part]
        self._add_home_state(found)
        return found

    def _add_home_state(self, found: dict[str, dict[str, Tensor]]) -> None:
        here = {
            (label, name): tensor[position]
            for batch, tensors in self._home_state.items()
            for name, tensor in tensors.items()
            for position, label in enumerate(batch.labels)
        }
        for work in self._engine.plan.works:
            for item in work.items:
                rule = self._groups[self._group_of[item.matrix.fqn]].rule
                if not rule.is_matrix_rule:
                    continue
                for name in MATRIX[rule.kind].home_state(*item.matrix.logical_shape):
                    nothing = torch.zeros(0, dtype=torch.float32, device=self._engine.storage.device)
                    found[item.matrix.fqn][f"{name}.{item.matrix.index}"] = here.get((item.matrix.label, name), nothing)

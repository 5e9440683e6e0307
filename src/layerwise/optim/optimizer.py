"""Optimizer: a torch.optim.Optimizer that steps the engine's shards with whole-matrix and element-wise rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from layerwise.comm.engine import Engine
from layerwise.comm.groups import NO_GROUPS, agree, default_world
from layerwise.config.rules import Rule
from layerwise.dtypes import DType
from layerwise.errors import NonFiniteError, PlanMismatchError, StateError, listed
from layerwise.layout.schedule import CommSchedule
from layerwise.optim.algorithms import number
from layerwise.optim.groups import GroupPlan, plan_groups
from layerwise.optim.loss_scale import LossScale, LossScaler
from layerwise.optim.state import ExtraState, describe_spans, export_state, import_state
from layerwise.optim.stats import ClipScope, StatsPass, StepStats, Totals, assign_norm_groups, clip_coefficients
from layerwise.optim.update import Update


@runtime_checkable
class _HasEngine(Protocol):
    engine: Engine


class Optimizer(torch.optim.Optimizer):
    """Steps a `DataParallel` model, or a plain module in a single process.

    `step()` consumes the gradients: the next backward starts from zero, whether or not `zero_grad()` was called.

    Args:
        model: a `DataParallel`, or a plain `nn.Module`.
        matrix: rule for the matrices, usually `Muon`.
        other: rule for everything else, `AdamW` or `Lion`.
        clip_grad_norm: clip gradients (never updates) to this global norm; None does not clip.
        clip: whose gradients: "all", "other-only" (the norm and the clipping leave matrices out) or "none".
        norm_groups: named groups of params (name -> glob) that are clipped by a norm of their own.
        nonfinite: what to do when a reduced gradient holds inf or NaN: "skip" the step, "raise" on every rank, or
            "ignore".
        skip_above: skip a step whose gradient norm is larger.
        count_zeros: also count zero gradient elements.
        loss_scale: dynamic loss scaling for fp16; then call `scale_loss(loss).backward()`.
        strict_grads: raise, on every rank, when a param got no gradient somewhere, instead of counting it as zero.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        matrix: Rule,
        other: Rule,
        clip_grad_norm: float | None = None,
        clip: ClipScope = "all",
        norm_groups: Mapping[str, str] | None = None,
        nonfinite: Literal["skip", "raise", "ignore"] = "skip",
        skip_above: float | None = None,
        count_zeros: bool = False,
        loss_scale: LossScale | None = None,
        strict_grads: bool = False,
    ) -> None:
        _check_arguments(matrix, other, clip_grad_norm, clip, nonfinite, skip_above)
        self._engine = _engine_of(model)
        self._plain = not isinstance(model, _HasEngine)
        self._clip_norm, self._clip_scope = clip_grad_norm, clip
        self._nonfinite, self._skip_above, self._strict = nonfinite, skip_above, strict_grads
        self._scaler = LossScaler(loss_scale) if loss_scale is not None else None
        self._loss_was_scaled = False
        self._step_count = 0
        self.stats = StepStats()
        storage, plan, communicator = self._engine.storage, self._engine.plan, self._engine.communicator
        self._groups = plan_groups(plan, matrix=matrix, other=other)
        norm_group_of = assign_norm_groups(plan, dict(norm_groups or {}))
        self._stats_pass = StatsPass(storage, communicator, norm_group_of, zeros=count_zeros)
        self._wire_dtypes = _wire_dtypes(self._engine, self._groups)
        self._sealed = False
        super().__init__([group.as_param_group(storage.params) for group in self._groups], {})
        self._sealed = True
        self._update = Update(self._engine, self._groups, norm_group_of, self.schedule)
        self._fixed_options = [group["ns_dtype"] for group in self.param_groups if "ns_dtype" in group]
        self._publish_state()
        agree(self._engine.groups, "optimizer settings", self._facts())
        self._engine.has_optimizer = True

    @property
    def schedule(self) -> CommSchedule:
        """Every collective of one step, in order; `stats.bytes_by_collective` adds up to its bytes."""
        return self._engine.plan.schedule(stats_numel=self._stats_pass.numel, wire_dtypes=self._wire_dtypes)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the current loss scale; `step()` divides the gradients by it again."""
        if self._scaler is None:
            raise StateError(
                "scale_loss() was called without loss scaling: pass loss_scale=LossScale() to the Optimizer."
            )
        self._loss_was_scaled = True
        return loss * self._scaler.scale

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Reduce what is left of the gradients, update masters, publish replicas. Returns the closure's loss, if there
        is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._preflight()
        scale = self._scaler.scale if self._scaler is not None else 1.0
        if self._plain:
            self._collect_gradients()
        missing = self._engine.reducer.finish()
        self._update.widen()
        divisor = self._engine.groups.world * scale
        totals = self._stats_pass.reduce(missing, repr(self._settings()), divisor)
        try:
            self._finish(totals, divisor)
        finally:
            self._engine.reducer.reset()
            self._engine.communicator.reset_counters()
            self._loss_was_scaled = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of a backward that failed half way."""
        self._engine.reducer.reset()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, object]) -> None:
        if getattr(self, "_sealed", False):
            raise StateError(
                "params cannot be added after construction: they have no place in the buffers. Build the model whole, then wrap it."
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, object]:
        """This rank's shards of the optimizer state, in torch's format, with the spans they cover. Pure: nothing is
        computed or changed."""
        return export_state(super().state_dict(), self._extra_state())

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take over a `state_dict()` of the same rank of the same plan. Checked whole before anything is written. Call
        it on every rank."""
        extra = import_state(self, state_dict, self._extra_state())
        self._step_count = extra["step"]
        if self._scaler is not None and extra["loss_scale"] is not None:
            self._scaler.load_state_dict(extra["loss_scale"])
        for bucket in self._engine.storage.buckets:
            bucket.master_version += 1
        self._engine.publisher.ensure_all()

    def _extra_state(self) -> ExtraState:
        return {
            "step": self._step_count,
            "plan": self._engine.plan.digest,
            "spans": describe_spans(self._engine.storage),
            "loss_scale": self._scaler.state_dict() if self._scaler is not None else None,
        }

    def _publish_state(self) -> None:
        """Expose this rank's state through `self.state`, the same keys on every rank; views, so that loading writes
        through."""
        for fqn, tensors in self._update.state_by_fqn().items():
            self.state[self._engine.storage.params[fqn]] = tensors

    def _facts(self) -> dict[str, object]:
        return {
            "groups": [
                {"label": f"param group {index}", "fqns": ",".join(group.fqns)}
                for index, group in enumerate(self._groups)
            ],
            "settings": self._settings(),
            "collectives": [[op.phase, op.kind, op.label, str(op.dtype), op.numel] for op in self.schedule.ops],
        }

    def _settings(self) -> dict[str, object]:
        """What all ranks must have in common at a step."""
        hidden = ("params", "fqns")
        return {
            "step": self._step_count,
            "loss_scale": self._scaler.scale if self._scaler is not None else None,
            "clip": [self._clip_norm, self._clip_scope, self._nonfinite, self._skip_above, self._strict],
            "groups": [
                {
                    "label": f"param group {index}",
                    **{name: repr(value) for name, value in group.items() if name not in hidden},
                }
                for index, group in enumerate(self.param_groups)
            ],
        }

    def _preflight(self) -> None:
        """Everything that can be wrong before the first collective, on this rank's own knowledge."""
        self._engine.check_trainables()
        self._engine.storage.check_aliases()
        for index, group in enumerate(self.param_groups):
            lr = number(group, "lr")
            if not 0.0 <= lr < float("inf"):
                raise ValueError(
                    f"param group {index} ({group['rule']}) has lr {group['lr']!r}: expected a finite number that is not negative."
                )
        if [group["ns_dtype"] for group in self.param_groups if "ns_dtype" in group] != self._fixed_options:
            raise StateError(
                "ns_dtype was changed after construction: the exchange was planned with another dtype. Build a new Optimizer."
            )
        if self._scaler is not None and self._engine.reducer.has_gradients and not self._loss_was_scaled:
            raise StateError(
                "step() with loss_scale set, but the loss was not scaled: call optimizer.scale_loss(loss).backward()."
            )

    def _collect_gradients(self) -> None:
        """A plain module has no hooks: its gradients are where torch leaves them."""
        self._engine.reducer.reset()
        for fqn, param in self._engine.storage.params.items():
            if param.grad is not None:
                self._engine.reducer.write(fqn, param.grad, sync=False)

    def _finish(self, totals: Totals, divisor: float) -> None:
        """Decide from reduced values, act, and record."""
        if not totals.consistent:
            agree(self._engine.groups, "optimizer settings", self._settings())
            raise PlanMismatchError(
                "ranks called step() with different optimizer settings, which have changed back since."
            )
        if self._strict and totals.missing:
            names = [f"{fqn} ({count} of {self._engine.groups.world} ranks)" for fqn, count in totals.missing.items()]
            raise StateError(
                f"no gradient for {listed(names)}: strict_grads=True expects one for every trainable param. Freeze what is unused."
            )
        coefficients = clip_coefficients(totals, self._stats_pass.names, self._clip_norm, self._clip_scope)
        reason = self._skip_reason(totals)
        if self._scaler is not None:
            self._scaler.update(overflow=bool(totals.nonfinite))
        if not reason:
            self._step_count += 1
            self._update.apply(self.param_groups, divisor, coefficients, self._step_count)
            self._engine.publisher.ensure_all()
        self.stats = replace(
            _stats_from(totals, coefficients),
            step=self._step_count,
            skipped=bool(reason),
            skip_reason=reason,
            loss_scale=divisor / self._engine.groups.world,
            bytes_by_collective=dict(self._engine.communicator.sent_nbytes),
        )
        if totals.nonfinite and self._nonfinite == "raise":
            raise NonFiniteError(
                f"gradients of {listed(totals.nonfinite)} hold inf or NaN; the step was not taken and nothing was changed."
            )

    def _skip_reason(self, totals: Totals) -> str:
        if len(totals.missing) == len(self._engine.storage.params) and set(totals.missing.values()) == {
            self._engine.groups.world
        }:
            return "no param has a gradient on any rank"
        if totals.nonfinite and self._nonfinite != "ignore":
            return f"gradients of {listed(totals.nonfinite)} hold inf or NaN"
        norm = totals.norm("matrix", "other")
        if self._skip_above is not None and norm > self._skip_above:
            return f"gradient norm {norm:.4g} is above skip_above={self._skip_above:g}"
        return ""


def _stats_from(totals: Totals, coefficients: Mapping[str, float]) -> StepStats:
    return StepStats(
        grad_norm=totals.norm("matrix", "other"),
        norms={name: totals.norm(name) for name in totals.square_sums},
        clip_coefficients=coefficients,
        num_zeros=totals.num_zeros,
        nonfinite=totals.nonfinite,
        missing=totals.missing,
    )


def _engine_of(model: nn.Module) -> Engine:
    """The engine of a wrapped model, or a new one for a plain module in a single process."""
    if isinstance(model, _HasEngine):
        if model.engine.has_optimizer:
            raise StateError(
                "the model has an optimizer already: its state lives in the model's buffers, so there can be one. Reuse it."
            )
        return model.engine
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a DataParallel or an nn.Module, got {type(model).__name__}. Pass the model, not its parameters()."
        )
    if default_world() > 1:
        raise ValueError(
            f"model is a plain {type(model).__name__} on {default_world()} ranks: nobody would average its gradients. "
            "Wrap it: layerwise.DataParallel(module)."
        )
    return Engine(
        model,
        NO_GROUPS,
        layout="flat",
        rules=None,
        bucket_mib=None,
        grad_dtype=torch.float32,
        overlap_grad_reduce=False,
        check_collectives=False,
    )


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


def _check_arguments(
    matrix: Rule, other: Rule, clip_grad_norm: float | None, clip: str, nonfinite: str, skip_above: float | None
) -> None:
    for name, rule in (("matrix", matrix), ("other", other)):
        if not isinstance(rule, Rule):
            raise TypeError(
                f"{name} must be a rule such as layerwise.{'Muon' if name == 'matrix' else 'AdamW'}(lr=...), got {rule!r}."
            )
    for name, bound in (("clip_grad_norm", clip_grad_norm), ("skip_above", skip_above)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} must be positive, got {bound!r}. None switches it off.")
    if clip not in ("all", "other-only", "none"):
        raise ValueError(f"clip must be 'all', 'other-only' or 'none', got {clip!r}.")
    if nonfinite not in ("skip", "raise", "ignore"):
        raise ValueError(f"nonfinite must be 'skip', 'raise' or 'ignore', got {nonfinite!r}.")

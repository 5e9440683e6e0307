"""A slow, obvious, single-process reference for a whole training step. It imports nothing from `src`.

Params are whole tensors, matrices are slices of them, gradients of all ranks are summed in rank order and divided once. Bitwise equality with the
library is expected wherever the sum over ranks is exact, because every other operation is done on the same numbers in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
POLAR_EXPRESS = [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in POLAR_EXPRESS]


def _times(x: Tensor, y: Tensor, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
    """A product of 16-bit matrices on a CPU: fp32 arithmetic, one rounding at the end."""
    if plus is None:
        return torch.mm(x.float(), y.float()).to(x.dtype)
    return torch.addmm(plus.float(), x.float(), y.float(), beta=beta, alpha=alpha).to(x.dtype)


def polar_by_newton_schulz(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Five Polar Express steps; the Gram form where one side is at least twice the other, with a restart after two steps."""
    x = matrix.float()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x.contiguous()
    peak = x.abs().max()
    x = x / (peak if peak > 0 else 1.0)
    x = x / x.square().sum(dim=1, keepdim=True).sum(dim=0, keepdim=True).sqrt().clamp(min=1.0)
    if x.shape[1] >= 2 * x.shape[0]:
        x = x.to(torch.float16 if dtype == torch.bfloat16 else dtype)
        for steps in (POLAR_EXPRESS[:2], POLAR_EXPRESS[2:]):
            x = _times(_gram_steps(x, steps), x)
        x = x.to(dtype)
    else:
        x = x.to(dtype)
        for a, b, c in POLAR_EXPRESS:
            gram = _times(x, x.T)
            x = _times(_times(gram, gram, plus=gram, beta=b, alpha=c), x, plus=x, beta=a)
    return (x.T if tall else x).contiguous()


def _gram_steps(x: Tensor, steps: list[tuple[float, float, float]]) -> Tensor:
    r = _times(x, x.T)
    previous_a, b, c = steps[0]
    z = _times(r, r, plus=r, beta=b, alpha=c)
    q = z.clone()
    for i in range(q.shape[0]):
        q[i, i] += previous_a
    for a, b, c in steps[1:]:
        rz = _times(r, z, plus=r, beta=previous_a)
        r = _times(z, rz, plus=rz, beta=previous_a)
        z = _times(r, r, plus=r, beta=b, alpha=c)
        q = _times(q, z, plus=q, beta=a)
        previous_a = a
    return q


@dataclass
class Hyper:
    """Numbers of a run. `matrix` and `other` name rules; the rest are their options."""

    matrix: str = "muon"
    other: str = "adamw"
    lr: float = 0.02
    other_lr: float = 0.003
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    weight_decay_mode: str = "decoupled"
    other_weight_decay: float = 0.0
    other_weight_decay_mode: str = "decoupled"
    scale: str = "rms"
    extra_scale: float = 1.0
    ns_dtype: torch.dtype = torch.bfloat16
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    beta2: float = 0.95
    matrix_eps: float = 1e-8
    clip: float | None = None
    clip_scope: str = "all"
    norm_groups: dict[str, str] = field(default_factory=dict)  # name of a group: the one param in it
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)  # param: other values for fields above


@dataclass
class Oracle:
    """Whole params, whole state, one process. `matrices` maps a param to the row ranges of its matrices (2-D params), to None for
    a stack, or, for matrices of any form, to tensors that say where each element of each matrix lies in the flattened param.
    `scaled_as` has the shapes that they are scaled by, where those are not their own."""

    params: dict[str, Tensor]
    matrices: Mapping[str, Sequence[tuple[int, int]] | Sequence[Tensor] | None]
    hyper: Hyper
    step_count: int = 0
    grad_norm: float = math.nan
    num_zeros: int = 0
    masters: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    totals: dict[str, Tensor] = field(default_factory=dict)
    averaged: dict[str, Tensor] = field(default_factory=dict)
    scaled_as: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.masters = {fqn: param.detach().float().clone() for fqn, param in self.params.items()}
        self.state = {fqn: {} for fqn in self.params}

    def weights(self) -> dict[str, Tensor]:
        """What forward reads: masters in the params' own dtype."""
        return {fqn: self.masters[fqn].to(param.dtype) for fqn, param in self.params.items()}

    def step(self, grads_by_rank: list[dict[str, Tensor | None]], grad_dtype: torch.dtype = torch.float32) -> bool:
        """One step from the gradients of all ranks; False when it is skipped for inf or NaN."""
        world = len(grads_by_rank)
        self.averaged = {}
        for fqn, master in self.masters.items():
            total = torch.zeros(master.shape, dtype=grad_dtype)
            for grads in grads_by_rank:
                grad = grads.get(fqn)
                if grad is not None:
                    total = total + grad.to(grad_dtype)
            self.totals[fqn] = total
            self.averaged[fqn] = total.float() / world
        self.grad_norm = self._norm([fqn for fqn in self.averaged if fqn not in self.hyper.norm_groups.values()], world)
        self.num_zeros = sum(int((grad == 0).sum()) for grad in self.averaged.values())
        if not math.isfinite(self.grad_norm):
            return False
        self._clip(world)
        self.step_count += 1
        for fqn, grad in self.averaged.items():
            if fqn in self.matrices and self.hyper.matrix in ("muon", "normuon", "adamuon"):
                self._matrix_update(fqn, grad)
            else:
                self._elementwise_update(fqn, grad, is_matrix=fqn in self.matrices)
        return True

    def _norm(self, fqns: list[str], world: int) -> float:
        """The norm of the averaged gradient, from the sums: those are exact, a division by three is not."""
        return math.sqrt(sum(float(self.totals[fqn].double().square().sum()) for fqn in fqns)) / world

    def _clip(self, world: int) -> None:
        if self.hyper.clip is None:
            return
        apart = list(self.hyper.norm_groups.values())
        common = [fqn for fqn in self.averaged if self.hyper.clip_scope == "all" or fqn not in self.matrices]
        for chosen in ([fqn for fqn in common if fqn not in apart], *([fqn] for fqn in apart)):
            coefficient = self.hyper.clip / (self._norm(chosen, world) + 1e-6)
            if coefficient < 1.0:
                for fqn in chosen:
                    self.averaged[fqn] = self.averaged[fqn] * coefficient

    def of(self, fqn: str) -> Hyper:
        """The numbers that hold for one param now: `hyper` may be changed between steps, as schedulers do."""
        return replace(self.hyper, **self.hyper.overrides.get(fqn, {}))

    def _decay(self, fqn: str, grad: Tensor, lr: float, weight_decay: float, mode: str) -> Tensor:
        if weight_decay == 0.0:
            return grad
        if mode == "coupled":
            return torch.add(grad, self.masters[fqn], alpha=weight_decay)
        self.masters[fqn] = self.masters[fqn] * (1.0 - (lr * weight_decay if mode == "decoupled" else weight_decay))
        return grad

    def _moment(self, fqn: str, name: str, grad: Tensor, decay: float) -> Tensor:
        before = self.state[fqn].get(name, torch.zeros_like(self.masters[fqn]))
        self.state[fqn][name] = torch.add(before * decay, grad, alpha=1.0 - decay)
        return self.state[fqn][name]

    def _matrix_update(self, fqn: str, grad: Tensor) -> None:
        h = self.of(fqn)
        grad = self._decay(fqn, grad, h.lr, h.weight_decay, h.weight_decay_mode)
        moment = self._moment(fqn, "momentum", grad, h.momentum)
        update = torch.add(grad * (1.0 - h.momentum), moment, alpha=h.momentum) if h.nesterov else moment
        master = self.masters[fqn]
        blocks = self.matrices[fqn]
        places = [block for block in blocks or () if isinstance(block, Tensor)] or None
        if blocks is None:
            parts = [(master[i], update[i]) for i in range(master.shape[0])]
        elif places is not None:
            parts = [(master.view(-1)[where], update.view(-1)[where]) for where in places]
        else:
            flat = (master.shape[0], -1)
            parts = [(master.view(flat)[a:b], update.view(flat)[a:b]) for a, b in blocks]
        for index, (weight, raw) in enumerate(parts):
            rows, cols = self.scaled_as[fqn][index] if fqn in self.scaled_as else weight.shape
            direction = self._direction(fqn, index, raw)
            weight.sub_(direction.float() * (h.lr * _scale(h.scale, rows, cols) * h.extra_scale))
            if places is not None:  # then it is a copy
                master.view(-1)[places[index]] = weight

    def _direction(self, fqn: str, index: int, raw: Tensor) -> Tensor:
        h = self.of(fqn)
        wire = torch.bfloat16 if h.ns_dtype == torch.bfloat16 else torch.float32
        raw = raw.to(wire)
        if h.matrix == "adamuon":
            raw = raw.sign()
        polar = polar_by_newton_schulz(raw, h.ns_dtype)
        if h.matrix == "muon":
            return polar.to(wire)
        polar = polar.float()
        name = f"second.{index}"
        if h.matrix == "normuon":
            square = polar.square().mean(dim=-1)
            before = self.state[fqn].get(name, torch.zeros_like(square))
            self.state[fqn][name] = torch.add(before * h.beta2, square, alpha=1.0 - h.beta2)
            polar = polar / (self.state[fqn][name].sqrt() + h.matrix_eps)[:, None]
        else:
            before = self.state[fqn].get(name, torch.zeros_like(polar))
            self.state[fqn][name] = torch.addcmul(before * h.beta2, polar, polar, value=1.0 - h.beta2)
            polar = polar / (self.state[fqn][name].sqrt() + h.matrix_eps)
        norm = torch.linalg.vector_norm(polar).clamp_min(torch.finfo(torch.float32).tiny)
        return (polar * (math.sqrt(min(polar.shape)) / norm)).to(wire)

    def _elementwise_update(self, fqn: str, grad: Tensor, *, is_matrix: bool) -> None:
        h = self.of(fqn)
        rule, lr = (h.matrix, h.lr) if is_matrix else (h.other, h.other_lr)
        decay = (
            (h.weight_decay, h.weight_decay_mode) if is_matrix else (h.other_weight_decay, h.other_weight_decay_mode)
        )
        grad = self._decay(fqn, grad, lr, *decay)
        beta1, beta2 = h.betas
        if rule == "adamw":
            first = self._moment(fqn, "exp_avg", grad, beta1)
            before = self.state[fqn].get("exp_avg_sq", torch.zeros_like(grad))
            second = self.state[fqn]["exp_avg_sq"] = torch.addcmul(before * beta2, grad, grad, value=1.0 - beta2)
            denominator = second.sqrt() / math.sqrt(1.0 - beta2**self.step_count) + h.eps
            self.masters[fqn] = torch.addcdiv(
                self.masters[fqn], first, denominator, value=-lr / (1.0 - beta1**self.step_count)
            )
        else:
            before = self.state[fqn].get("exp_avg", torch.zeros_like(grad))
            direction = torch.add(before * beta1, grad, alpha=1.0 - beta1).sign()
            self.masters[fqn] = self.masters[fqn] - direction * lr
            self.state[fqn]["exp_avg"] = torch.add(before * beta2, grad, alpha=1.0 - beta2)


def _scale(name: str, rows: int, cols: int) -> float:
    return {
        "rms": 0.2 * math.sqrt(max(rows, cols)),
        "spectral": math.sqrt(max(rows, cols)),
        "shape": math.sqrt(max(1.0, rows / cols)),
        "unit_rms": math.sqrt(rows / cols),
        "none": 1.0,
    }[name]

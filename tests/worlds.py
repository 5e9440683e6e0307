"""Models and exact gradients for parity tests, and the comparison of a distributed run with the oracle.

Gradients are small integers times a power of two. Their sums over ranks are exact in any order and in any layout, so whatever differs is a bug and not
rounding. Weights are read back from the shards that own them, with momenta and averaged gradients: short runs with bf16 Newton-Schulz can have equal
weights and unequal momenta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerwise
from tests.reference.oracle import Hyper, Oracle


class Zoo(nn.Module):
    """One of everything: embedding, tied or untied head, fused weight, odd shapes, a stack, a convolution, norms, biases, a scalar, a frozen weight."""

    def __init__(self, *, tied: bool = False, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.qkv = nn.Linear(width, width + 8, bias=True)
        self.tall = nn.Linear(7, 31, bias=False)
        self.row = nn.Linear(5, 1)
        self.column = nn.Linear(1, 9, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 6, 10))
        self.conv = nn.Conv1d(3, 8, 3)
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(width, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        width = self.qkv.in_features
        return {"qkv.weight": (width, 4, 4)}


class Few(nn.Module):
    """Fewer params than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(5, 3, bias=False)
        self.norm = nn.LayerNorm(4)


def shapes_module(shapes: list[tuple[int, int]]) -> nn.Module:
    """Linear layers without bias of the given (rows, cols), and one norm."""
    module = nn.Module()
    for index, (rows, cols) in enumerate(shapes):
        module.add_module(f"layer{index}", nn.Linear(cols, rows, bias=False))
    module.add_module("norm", nn.LayerNorm(3))
    return module


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "zoo": Zoo,
    "tied": lambda: Zoo(tied=True),
    "few": Few,
}


@dataclass
class Case:
    """One parity run."""

    model: str = "zoo"
    layout: str = "flat"
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    steps: int = 4
    accumulation: int = 1
    bucket_mib: float | None = 0.001
    missing: bool = False
    hyper: dict[str, Any] = field(default_factory=dict)
    shapes: list[tuple[int, int]] | None = None
    exact: bool = True
    check_collectives: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(5)
        module = shapes_module(self.shapes) if self.shapes is not None else BUILDERS[self.model]()
        with torch.no_grad():
            for param in module.parameters():
                param.copy_(torch.randn(param.shape) * 0.1)
        return module.to(self.dtype)


def matrices_of(module: nn.Module) -> dict[str, list[tuple[int, int]] | None]:
    """Which params of the test models are matrices, written down by hand."""
    if isinstance(module, Zoo):
        width = module.qkv.in_features
        return {
            "qkv.weight": [(0, width), (width, width + 4), (width + 4, width + 8)],
            "tall.weight": [(0, 31)],
            "row.weight": [(0, 1)],
            "column.weight": [(0, 9)],
            "experts": None,
            "conv.weight": [(0, 8)],
        }
    return {fqn: [(0, param.shape[0])] for fqn, param in module.named_parameters() if param.dim() == 2}


def gradient(fqn: str, shape: torch.Size, rank: int, step: int, micro: int, *, exact: bool = True) -> Tensor:
    """The gradient of one param on one rank: integers in [-4, 4] over 8, or Gaussian numbers for the control that must fail."""
    seed = hash_of(f"{fqn} {rank} {step} {micro}")
    generator = torch.Generator().manual_seed(seed)
    if not exact:
        return torch.randn(shape, generator=generator)
    return torch.randint(-4, 5, shape, generator=generator).float() / 8.0


def hash_of(text: str) -> int:
    value = 0
    for char in text:
        value = (value * 131 + ord(char)) % (2**31 - 1)
    return value


def is_missing(case: Case, fqn: str, rank: int, step: int) -> bool:
    return case.missing and (hash_of(f"{fqn} {step}") + rank) % 3 == 0


def rules(hyper: Hyper) -> dict[str, Any]:
    """The library's rules for the oracle's numbers."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    muon = dict(
        lr=hyper.lr,
        momentum=hyper.momentum,
        nesterov=hyper.nesterov,
        weight_decay=hyper.weight_decay,
        weight_decay_mode=hyper.weight_decay_mode,
        scale=hyper.scale,
        extra_scale=hyper.extra_scale,
        ns_dtype=names[hyper.ns_dtype],
    )
    adaptive = dict(beta2=hyper.beta2, eps=hyper.matrix_eps)
    matrix: Any
    if hyper.matrix == "muon":
        matrix = layerwise.Muon(**muon)
    elif hyper.matrix == "normuon":
        matrix = layerwise.NorMuon(**muon, **adaptive)
    elif hyper.matrix == "adamuon":
        matrix = layerwise.AdaMuon(**muon, **adaptive)
    else:
        matrix = layerwise.AdamW(
            lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, weight_decay=hyper.weight_decay, weight_decay_mode=hyper.weight_decay_mode
        )
    decay = dict(weight_decay=hyper.other_weight_decay, weight_decay_mode=hyper.other_weight_decay_mode)
    other: Any = (
        layerwise.AdamW(lr=hyper.other_lr, betas=hyper.betas, eps=hyper.eps, **decay)
        if hyper.other == "adamw"
        else layerwise.Lion(lr=hyper.other_lr, betas=hyper.betas, **decay)
    )
    return {"matrix": matrix, "other": other, "clip_grad_norm": hyper.clip, "clip": hyper.clip_scope}


def deliver(model: layerwise.DataParallel, grads: dict[str, Tensor], *, sync: bool) -> None:
    """Hand gradients to the model as backward would: through a loss whose gradient they are."""
    params = dict(model.module.named_parameters())
    loss = sum((params[fqn] * grad.to(params[fqn].dtype)).sum() for fqn, grad in grads.items())
    if isinstance(loss, Tensor):
        if sync:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()


def train_and_compare(rank: int, world: int, case: Case) -> list[str]:
    """Run a case on this rank beside the oracle of all ranks; returns what differs, by name."""
    hyper = Hyper(**case.hyper)
    module = case.build()
    oracle = Oracle({fqn: p.detach().clone() for fqn, p in module.named_parameters() if p.requires_grad}, matrices_of(module), hyper)
    model = layerwise.DataParallel(
        module, layout=case.layout, bucket_mib=case.bucket_mib, grad_dtype=case.grad_dtype, check_collectives=case.check_collectives
    )
    optimizer = layerwise.Optimizer(model, **rules(hyper), count_zeros=True)
    shapes = {fqn: param.shape for fqn, param in oracle.params.items()}
    for step in range(case.steps):
        for micro in range(case.accumulation):
            deliver(model, _gradients(case, shapes, rank, step, micro), sync=micro == case.accumulation - 1)
        everyone = [
            _accumulated([_gradients(case, shapes, other, step, micro) for micro in range(case.accumulation)]) for other in range(world)
        ]
        oracle.step(everyone, case.grad_dtype)
        found = _reduced_differences(model, oracle)
        optimizer.step()
        optimizer.zero_grad()
        found += differences(model, optimizer, oracle)
        if found:
            return [f"rank {rank} step {step}: {text}" for text in found]
    return []


def _gradients(case: Case, shapes: dict[str, torch.Size], rank: int, step: int, micro: int) -> dict[str, Tensor]:
    return {
        fqn: gradient(fqn, shape, rank, step, micro, exact=case.exact).to(case.dtype)
        for fqn, shape in shapes.items()
        if not is_missing(case, fqn, rank, step)
    }


def _accumulated(micros: list[dict[str, Tensor]]) -> dict[str, Tensor | None]:
    total: dict[str, Tensor | None] = {}
    for grads in micros:
        for fqn, grad in grads.items():
            before = total.get(fqn)
            total[fqn] = grad.float() if before is None else before + grad.float()
    return total


def _reduced_differences(model: layerwise.DataParallel, oracle: Oracle) -> list[str]:
    """Sums over ranks that this rank's shards hold and the oracle does not."""
    model.engine.reducer.finish()
    return [
        f"reduced gradient of {span.fqn}"
        for bucket in model.engine.storage.buckets
        for span in bucket.spans
        if not torch.equal(
            bucket.grad_shard[span.shard_offset : span.shard_offset + span.numel], oracle.totals[span.fqn].reshape(-1)[span.start : span.stop]
        )
    ]


def differences(model: layerwise.DataParallel, optimizer: layerwise.Optimizer, oracle: Oracle) -> list[str]:
    """What this rank holds that is not what the oracle holds: replicas, masters, state, gradient norm, zeros."""
    found = []
    weights = oracle.weights()
    for fqn, param in model.engine.storage.params.items():
        if not torch.equal(param.detach(), weights[fqn]):
            found.append(f"replica of {fqn}")
    for bucket in model.engine.storage.buckets:
        for span in bucket.spans:
            part = slice(span.shard_offset, span.shard_offset + span.numel)
            inside = slice(span.start, span.stop)
            if not torch.equal(bucket.master[part], oracle.masters[span.fqn].reshape(-1)[inside]):
                found.append(f"master of {span.fqn}")
            for name, expected in oracle.state[span.fqn].items():
                if name in bucket.state and not torch.equal(bucket.state[name][part], expected.reshape(-1)[inside]):
                    found.append(f"{name} of {span.fqn}")
    if optimizer.stats.grad_norm != oracle.grad_norm:
        found.append(f"grad norm {optimizer.stats.grad_norm} against {oracle.grad_norm}")
    if optimizer.stats.num_zeros != oracle.num_zeros:
        found.append(f"zero count {optimizer.stats.num_zeros} against {oracle.num_zeros}")
    predicted = optimizer.schedule.bytes_by_collective(dist.get_rank() if dist.is_initialized() else 0)
    if dict(optimizer.stats.bytes_by_collective) != predicted:
        found.append(f"bytes {dict(optimizer.stats.bytes_by_collective)} against {predicted}")
    return found

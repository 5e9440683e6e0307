"""A small model under training that checkpoints are made of: given gradients, everything that a step may change in one hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import layerwise
from layerwise.checkpoint import saving
from tests.reference.oracle import Hyper
from tests.worlds import Case, deliver, gradient, hash_everything, hash_tensors, rules, wrap

SHAPES = [(6, 4), (5, 9), (8, 8), (3, 7)]


@dataclass
class Training:
    """A wrapped model and its optimizer."""

    case: Case
    settings: dict[str, Any] = field(default_factory=dict)
    """More arguments of the optimizer."""

    def __post_init__(self) -> None:
        self.model: nn.Module = wrap(self.case, self.case.build())
        self.optimizer = layerwise.Optimizer(self.model, **rules(Hyper(**self.case.hyper)), **self.settings)
        self.shapes = {fqn: param.shape for fqn, param in self.optimizer.engine.storage.params.items()}

    def step(self, rank: int, number: int) -> None:
        grads = {fqn: gradient(fqn, shape, rank, number, 0) for fqn, shape in self.shapes.items()}
        deliver(self.model, grads, sync=True)  # type: ignore[arg-type]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def hash(self) -> str:
        """Of weights, masters, state, counters, rates and random numbers."""
        rates = repr([(group["name"], group["lr"]) for group in self.optimizer.param_groups])
        drawn = hash_tensors([torch.get_rng_state()])
        return hashlib.sha256((hash_everything(self.optimizer) + rates + drawn).encode()).hexdigest()


@contextmanager
def held_up(until: Callable[[int, Path], object]) -> Iterator[None]:
    """Whoever writes a share of a checkpoint does this first, told its rank and the folder that it is written in."""
    real = saving._write_share

    def write_share(share: saving.Share, rank: int, partial: Path) -> None:
        until(rank, partial)
        real(share, rank, partial)

    with mock.patch.object(saving, "_write_share", write_share):
        yield


def small(**changes: Any) -> Training:
    """Four matrices and a norm, with state on shards and at homes."""
    hyper = {"matrix": "normuon", "ns_dtype": torch.float32, "weight_decay": 0.1}
    return Training(Case(shapes=SHAPES, bucket_mib=None, hyper=hyper, **changes))

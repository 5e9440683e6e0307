"""Params that the library cannot update: errors say how they are trained apart, and what they say works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.errors import StateError
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors

RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.05), "other": layerwise.AdamW(lr=0.01)}
KINDS = {"complex": torch.complex64, "fp64": torch.float64, "sparse": torch.float32}


class Odd(nn.Module):
    """A model with one param that is none for buffers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.odd = nn.Embedding(4, 8, sparse=kind == "sparse", dtype=KINDS[kind])

    def forward(self, x: Tensor, row: int) -> Tensor:
        found = (
            self.odd(torch.tensor([row])) if self.odd.sparse else self.odd.weight[row]
        )  # torch embeds no complex numbers
        return self.first(x) * found.abs()


def built(kind: str, wrapper: str) -> tuple[nn.Module, nn.Module]:
    """The module, and what the optimizer is to be given."""
    module = Odd(kind)
    if wrapper == "DataParallel":
        return module, layerwise.DataParallel(module)
    return module, DistributedDataParallel(module) if wrapper == "DDP" else module


def refused(kind: str, wrapper: str) -> str:
    def train() -> None:
        _, model = built(kind, wrapper)
        optimizer = layerwise.Optimizer(model, **RULES)
        model(torch.ones(2, 6), 1).square().mean().backward()
        optimizer.step()

    return raised(train)


def apart(rank: int, world: int, kind: str, wrapper: str) -> list[Any]:
    """The error without the advice, whether each part moves with it, and all weights after some steps."""
    said = refused(kind, wrapper)
    module = Odd(kind)
    weight = module.odd.weight
    model: nn.Module = module
    if wrapper == "DDP":
        model = DistributedDataParallel(module)
    weight.requires_grad_(False)
    if wrapper == "DataParallel":
        model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, **RULES)
    weight.requires_grad_(True)
    other = torch.optim.SGD([weight], lr=0.5)
    before = [weight.detach().clone(), module.first.weight.detach().clone()]
    for step in range(3):
        model(torch.full((2, 6), 1.0 + rank), (rank + step) % 4).square().mean().backward()
        assert weight.grad is not None
        if wrapper == "DataParallel":
            weight.grad = weight.grad.to_dense() / world
            dist.all_reduce(torch.view_as_real(weight.grad) if weight.is_complex() else weight.grad)
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
    now = [weight.detach(), module.first.weight.detach()]
    moved = [not torch.equal(one, two) for one, two in zip(before, now, strict=True)]
    return [said, moved, hash_tensors([tensor.reshape(-1).clone() for tensor in now])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapper", ["plain", "DataParallel", pytest.param("DDP", marks=pytest.mark.slow)])
def test_what_the_error_says_works(kind: str, wrapper: str) -> None:
    found = run_ranks(1 if wrapper == "plain" else 2, apart, kind, wrapper, meet=wrapper != "plain")
    for said, moved, _ in found:
        what = "a sparse gradient" if kind == "sparse" else f"dtype {KINDS[kind]}"
        assert f"TypeError: param 'odd.weight' has {what}" in said
        assert (
            "call requires_grad_(False) on 'odd.weight' before layerwise.DataParallel and layerwise.Optimizer" in said
        )
        assert moved == [True, True]
    assert len({weights for *_, weights in found}) == 1


def test_a_param_that_has_a_place_here_is_not_unfrozen() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[0].weight.requires_grad_(False)
    optimizer = layerwise.Optimizer(module, **RULES)
    module[0].weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"'0\.weight' was unfrozen after construction"):
        optimizer.step()

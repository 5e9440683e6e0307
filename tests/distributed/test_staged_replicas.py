"""A gather lands where the replica says: here in staging memory, from which every rank makes its weights when it lands. What
quantised replicas will do, with a conversion that changes no bits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import layerwise
from layerwise.memory.replicas import Replica
from tests.ranks import run_ranks
from tests.reference.oracle import Hyper
from tests.worlds import Net, hash_of, hash_tensors, rules


class StagedReplica(Replica):
    """Messages land in memory of their own. Weights are written from there, also on the rank that owns them."""

    staging: Tensor
    rank: int

    @property
    def landing(self) -> Tensor:
        return self.staging

    def message(self) -> Tensor:
        super().message()
        part = self.staging[self.plan.shard_part(self.rank)]
        part.copy_(self.shard.weight)
        self.weights.fill_(torch.nan)  # nobody may read them before they have landed
        return part

    def land(self) -> None:
        self.weights.copy_(self.staging)
        super().land()


def stage(model: layerwise.DataParallel) -> None:
    for replica in model.engine.storage.replicas:
        if replica.plan.publisher == "none":
            continue
        replica.__class__ = StagedReplica
        replica.staging = torch.full_like(replica.weights, torch.nan)
        replica.rank = model.engine.groups.domains[replica.plan.domain].rank


def loss(model: layerwise.DataParallel, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash_of(f"data {rank} {step}"))
    output: Tensor = model(torch.randn(3, 6, generator=generator).to(torch.bfloat16))
    return output.float().square().mean()


def train(rank: int, world: int, options: dict[str, Any], staged: bool) -> tuple[str, int]:
    """The hash of all weights after some steps, and how many buckets were staged."""
    torch.manual_seed(3)
    model = layerwise.DataParallel(Net().to(torch.bfloat16), bucket_mib=1e-4, **options)
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    if staged:
        stage(model)
    for step in range(4):
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.ensure()
    found = [param.detach() for param in model.module.parameters()]
    return hash_tensors(found), sum(isinstance(one, StagedReplica) for one in model.engine.storage.replicas)


OPTIONS: dict[str, dict[str, Any]] = {
    "all_gather": {"layout": "flat"},
    "uneven_all_gather": {"layout": "compact"},
    "broadcast": {"layout": "padded", "param_sync": "broadcast"},
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("publisher", OPTIONS)
def test_messages_that_land_elsewhere_make_the_same_weights(publisher: str, world: int) -> None:
    plain = run_ranks(world, train, OPTIONS[publisher], False)
    staged = run_ranks(world, train, OPTIONS[publisher], True)
    assert [found for found, _ in staged] == [found for found, _ in plain]
    assert min(number for _, number in staged) > 0


def land_without(rank: int, world: int) -> str:
    with mock.patch.object(StagedReplica, "land", Replica.land):
        return train(rank, world, OPTIONS["uneven_all_gather"], True)[0]


def test_weights_that_are_not_made_of_what_landed_differ() -> None:
    assert run_ranks(2, land_without)[0] != run_ranks(2, train, OPTIONS["uneven_all_gather"], False)[0][0]

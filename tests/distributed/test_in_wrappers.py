"""Models that frameworks have wrapped: what is inside is looked for, and what cannot be trained is told why."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import layerwise
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors

RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.05), "other": layerwise.AdamW(lr=0.01)}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))


class AsFabrics(nn.Module):
    """A wrapper that holds what it wraps twice, as Lightning Fabric's does."""

    def __init__(self, forward_module: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)  # type: ignore[no-any-return]


class Holder(nn.Module):
    """A wrapper with nothing of its own, or with a head."""

    def __init__(self, module: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.module = module
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def wrapped(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for wrap in (
        lambda module: DistributedDataParallel(module),
        lambda module: AsFabrics(DistributedDataParallel(module), module),
        lambda module: Holder(Holder(DistributedDataParallel(module))),
        lambda module: torch.compile(Holder(DistributedDataParallel(module)), backend="eager"),
    ):
        model = wrap(net())
        optimizer = layerwise.Optimizer(model, **RULES)
        for step in range(2):
            model(torch.full((2, 6), 1.0 + rank + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        names = [fqn for group in optimizer.param_groups for fqn in group["fqns"]]
        found.append([names, hash_tensors(param.detach() for param in model.parameters())])
    partly = Holder(DistributedDataParallel(net()), nn.Linear(4, 4))
    return [*found, raised(lambda: layerwise.Optimizer(partly, **RULES))]


def test_the_replicas_inside_of_other_wrappers_are_found_and_nothing_beside_them_is_lost() -> None:
    for plain, *others, partly in run_ranks(2, wrapped):
        assert all(other == plain for other in others)
        assert "ValueError: model is a plain Holder on 2 ranks" in partly


def for_itself(rank: int, world: int) -> list[str]:
    """A model that the first rank alone has: what is said, and then what that says, word for word."""
    if rank > 0:
        return []
    said = raised(lambda: layerwise.Optimizer(net(), **RULES))
    advised = re.search(r"is Optimizer\(module, (gradients=.*?)\) with the group of this rank alone, (.*)\.", said)
    if advised is None:
        return [said]
    group = eval(advised.group(2))
    module = net()
    before = module[0].weight.detach().clone()  # type: ignore[union-attr]
    optimizer: layerwise.Optimizer = eval(
        f"layerwise.Optimizer(module, {advised.group(1)}, **RULES)", {**globals(), "module": module, "group": group}
    )
    module(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    moved = not torch.equal(before, module[0].weight)  # type: ignore[index]
    return ["moved" if moved else "stayed", raised(optimizer.state_dict)]


def test_a_model_of_one_rank_alone_is_trained_as_the_error_says() -> None:
    assert run_ranks(2, for_itself)[0] == ["moved", "nothing was raised"]


def first_fsdp(rank: int, world: int) -> list[str]:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
    return [
        raised(lambda: layerwise.Optimizer(model, **RULES)),
        raised(lambda: layerwise.Optimizer(model, gradients="reduced", **RULES)),
        raised(lambda: layerwise.DataParallel(model)),
    ]


def test_the_first_version_of_fsdp_is_named() -> None:
    for said in run_ranks(2, first_fsdp):
        for text in said:
            assert "FullyShardedDataParallel (FSDP1)" in text
            assert "torch.distributed.fsdp.fully_shard(module)" in text

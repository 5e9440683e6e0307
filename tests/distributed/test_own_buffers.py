"""Buffers that each rank has of its own, such as BatchNorm's averages: a run goes on with them to the bit, and one on other ranks
begins with those of one rank, all of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import layerwise
from tests.marks import sampled
from tests.ranks import run_ranks

STEPS = 2


class Running(nn.Module):
    """A scale that training reads and writes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0), 0.1)
            self.seen += 1
        return x / self.scale


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), Running(), nn.Linear(8, 4))


class Training:
    def __init__(self, kind: str, seed: int, rank: int) -> None:
        self.net, self.rank = net(seed), rank
        if kind == "fsdp2":
            fully_shard(self.net)
        elif kind == "tp":
            world = dist.get_world_size()
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(self.net[3], mesh["tp"], ColwiseParallel())
            fully_shard(self.net, mesh=mesh["dp"])
        self.model: nn.Module = self.net if kind in ("fsdp2", "tp") else layerwise.DataParallel(self.net, layout=kind)
        self.optimizer = layerwise.Optimizer(self.model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=1e-3))

    def run(self, first: int) -> None:
        for step in range(first, first + STEPS):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + self.rank))
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.net.named_buffers()}

    def everything(self) -> dict[str, Tensor]:
        if isinstance(self.model, layerwise.DataParallel):
            self.model.ensure()
        own: dict[str, Any] = dict(self.net.named_parameters())
        params = {name: getattr(param, "_local_tensor", param).detach().clone() for name, param in own.items()}
        return {**params, **self.buffers()}


def said_in(do: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        do()
    return [str(one.message) for one in heard]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def go_on(rank: int, world: int, folder: str, before: str, after: str, background: bool) -> tuple[bool, list[str]]:
    """Whether a run that was loaded ends as the one that went on."""
    straight = Training(before, 0, rank)
    straight.run(0)
    saving = layerwise.save(f"{folder}/half", straight.model, straight.optimizer, background=background)
    straight.run(STEPS)
    saving.wait()
    again = Training(after, 1, rank)
    warned = said_in(lambda: layerwise.load(f"{folder}/half", again.model, again.optimizer))
    again.run(STEPS)
    return same(straight.everything(), again.everything()), warned


@pytest.mark.parametrize("background", sampled([False, True], True))
@pytest.mark.parametrize(("before", "after"), [("flat", "flat"), ("flat", "compact"), ("fsdp2", "fsdp2")])
@pytest.mark.parametrize("world", sampled([2, 3], 3))
def test_a_run_goes_on_to_the_bit_with_what_was_each_ranks_own(
    tmp_path: Path, world: int, before: str, after: str, background: bool
) -> None:
    assert run_ranks(world, go_on, str(tmp_path), before, after, background) == [(True, [])] * world
    about = json.loads((tmp_path / "half" / "manifest.json").read_text())["body"]["about"]
    assert len(about["places"]) == world


def save_own(rank: int, world: int, folder: str, kind: str) -> dict[str, Tensor]:
    run = Training(kind, 0, rank)
    run.run(0)
    layerwise.save(f"{folder}/saved", run.model, run.optimizer)
    return run.buffers()


def load_others(rank: int, world: int, folder: str, kind: str) -> tuple[dict[str, Tensor], list[str]]:
    run = Training(kind, 1, rank)
    warned = said_in(lambda: layerwise.load(f"{folder}/saved", run.model, run.optimizer))
    return run.buffers(), warned


def load_weights(rank: int, world: int, folder: str, kind: str) -> tuple[dict[str, Tensor], list[str]]:
    module = net(1)
    warned = said_in(lambda: layerwise.load(f"{folder}/saved", module))
    return dict(module.named_buffers()), warned


@pytest.mark.parametrize(
    ("world", "kind", "load", "after"),
    [
        (3, "flat", load_others, 2),
        (2, "fsdp2", load_others, 3),
        (3, "flat", load_others, 1),
        (4, "flat", load_others, 4),  # as many, of which pairs share out the model itself: they must have the same
        (2, "flat", load_weights, 2),
    ],
)
def test_others_begin_with_those_of_one_rank(
    tmp_path: Path, world: int, kind: str, load: Callable[..., Any], after: int
) -> None:
    first, *others = run_ranks(world, save_own, str(tmp_path), kind)
    assert not any(same(first, other) for other in others)
    found = run_ranks(after, load, str(tmp_path), "tp" if world == after == 4 else kind)
    for rank, (buffers, warned) in enumerate(found):
        assert same(first, buffers)
        assert len(warned) == (rank == 0)
        assert all("'1.running_mean', '1.running_var'" in text and "all begin with those" in text for text in warned)


def save_alike(rank: int, world: int, folder: str) -> None:
    layerwise.save(f"{folder}/saved", layerwise.DataParallel(net(0)))


def test_what_is_alike_is_written_once(tmp_path: Path) -> None:
    run_ranks(3, save_alike, str(tmp_path))
    saved = json.loads((tmp_path / "saved" / "manifest.json").read_text())["body"]
    assert saved["about"]["places"] == []
    assert not any(key.startswith("own.") for key in saved["entries"])

"""Pipeline stages that are models of fully_shard() or of DDP: joined along the dim "pp" of the mesh that theirs is a part of, and else said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import layerwise
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors

APART = "the model is on 2 of 4 ranks"


class Stage(nn.Module):
    """A stage of a pipeline; those after the first have a layer more, whose bias of one element is on one rank alone, and
    whose weight may go without a gradient."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.up = nn.Linear(6, 6)
        self.more = nn.Linear(6, 1) if stage else None
        self.idle = nn.Parameter(torch.ones(1)) if stage else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        return x if self.more is None else x + self.more(x)


def data(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def pipeline(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))


def options(**more: Any) -> dict[str, Any]:
    return {"matrix": layerwise.Muon(lr=0.02, ns_dtype="fp32"), "other": layerwise.AdamW(lr=0.003), **more}


def train(rank: int, world: int, kind: str, clip: float | None) -> dict[str, Any]:
    """Two steps; the second has NaN on the second stage alone."""
    warnings.simplefilter("error")
    mesh = pipeline(world)
    stage, dp = mesh.get_local_rank("pp"), mesh["dp"]
    module = Stage(stage)
    more: dict[str, Any] = {}
    model: nn.Module = module
    if kind == "DataParallel":
        model = layerwise.DataParallel(module, mesh=mesh)
    else:
        fully_shard(module, mesh=dp)
        more = {"apart": {"process_group": dp.get_group()}, "world": {"process_group": dist.group.WORLD}}.get(kind, {})
    optimizer = layerwise.Optimizer(model, **options(clip_grad_norm=clip, **more))
    (model(data(rank, 0)) * (1 + 100 * stage)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    first = optimizer.stats
    local = [getattr(param, "_local_tensor", param) for param in module.parameters()]
    before = hash_tensors(local)
    (model(data(rank, 1)).sum() * (float("nan") if stage else 1.0)).backward()
    warnings.simplefilter("ignore")
    optimizer.step()
    return {
        "norm": first.grad_norm,
        "clip": dict(first.clip_coefficients),
        "missing": sorted(first.missing),
        "skipped": optimizer.stats.skipped,
        "stayed": hash_tensors(local) == before,
        "weights": before,
    }


@pytest.fixture(scope="module")
def wrapped() -> list[dict[str, Any]]:
    return run_ranks(4, train, "DataParallel", 0.1)


@pytest.mark.parametrize("kind", ["fsdp2", "world"])
def test_stages_clip_by_one_norm_and_skip_together(kind: str, wrapped: list[dict[str, Any]]) -> None:
    found = run_ranks(4, train, kind, 0.1)
    for one, expected in zip(found, wrapped, strict=True):
        assert one["norm"] == pytest.approx(expected["norm"], rel=1e-6)
        assert one["clip"] == pytest.approx(expected["clip"], rel=1e-6)
        assert (one["skipped"], one["stayed"]) == (True, True)
        assert one["missing"] == expected["missing"] == ["idle of stage 1"]
    assert len({one["norm"] for one in found}) == 1, "the same bits on every rank"


def test_control_stages_that_are_said_to_be_apart_do_not(wrapped: list[dict[str, Any]]) -> None:
    first, _, second, _ = run_ranks(4, train, "apart", 0.1)
    assert first["norm"] < 1.0 < 1000.0 < second["norm"]
    assert first["norm"] != pytest.approx(wrapped[0]["norm"], rel=1e-2)
    assert [one["skipped"] for one in (first, second)] == [False, True]
    assert not first["stayed"]


def test_joined_stages_have_the_weights_of_stages_apart_where_nothing_is_clipped() -> None:
    joined, apart = (run_ranks(4, train, kind, None) for kind in ("fsdp2", "apart"))
    assert [one["weights"] for one in joined] == [one["weights"] for one in apart]


def replicated_stages(rank: int, world: int) -> list[float]:
    """Stages of replicas of shards: of a param in parts with copies there are more on one stage than on the other."""
    warnings.simplefilter("error")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    stage = mesh.get_local_rank("pp")
    module = Stage(stage)
    fully_shard(module, mesh=mesh["replicate", "shard"])
    optimizer = layerwise.Optimizer(module, **options(clip_grad_norm=0.1))
    (module(data(rank, 0)) * (1 + 100 * stage)).square().mean().backward()
    optimizer.step()
    norm = optimizer.stats.grad_norm
    (module(data(rank, 1)).sum() * (float("nan") if stage else 1.0)).backward()
    warnings.simplefilter("ignore")
    optimizer.step()
    return [norm, float(optimizer.stats.skipped)]


def test_stages_of_replicas_clip_by_one_norm_and_skip_together() -> None:
    first, *others = run_ranks(8, replicated_stages)
    assert others == [first] * 7
    assert first[0] > 1000.0
    assert first[1] == 1.0


def with_a_frozen_stage(rank: int, world: int) -> list[float]:
    warnings.simplefilter("error")
    mesh = pipeline(world)
    stage = mesh.get_local_rank("pp")
    module = Stage(stage).requires_grad_(stage == 0)
    fully_shard(module, mesh=mesh["dp"])
    optimizer = layerwise.Optimizer(module, **options(clip_grad_norm=0.1))
    if stage == 0:
        module(data(rank, 0)).square().mean().backward()
    optimizer.step()
    return [optimizer.stats.grad_norm, *optimizer.stats.clip_coefficients.values()]


def test_a_stage_that_trains_nothing_takes_part() -> None:
    first, *others = run_ranks(4, with_a_frozen_stage)
    assert others == [first] * 3
    assert first[0] > 0.1 > first[1] * first[0] - 1e-6 > 0.0


def save_and_load(rank: int, world: int, folder: str) -> tuple[bool, str]:
    warnings.simplefilter("ignore")
    mesh = pipeline(world)
    stage = mesh.get_local_rank("pp")

    def built(seed: int) -> tuple[nn.Module, layerwise.Optimizer]:
        module = nn.Sequential()  # by names that differ between stages, as those of one model do
        module.add_module(f"stage {stage}", Stage(stage))
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(seed)
        fully_shard(module, mesh=mesh["dp"])
        optimizer = layerwise.Optimizer(module, **options())
        module(data(rank, seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return module, optimizer

    (module, optimizer), (other, its) = built(1), built(2)
    layerwise.save(f"{folder}/saved", module, optimizer)
    layerwise.load(f"{folder}/saved", other, its)
    for one, opt in ((module, optimizer), (other, its)):
        one(data(rank, 3)).square().mean().backward()
        opt.step()
    hashes = [hash_tensors([param._local_tensor for param in one.parameters()]) for one in (module, other)]
    return hashes[0] == hashes[1], hashes[0]


def test_joined_stages_are_one_checkpoint(tmp_path: Path) -> None:
    found = run_ranks(4, save_and_load, str(tmp_path))
    assert [same for same, _ in found] == [True] * 4
    assert len({text for _, text in found}) == 4


def told(rank: int, world: int, kind: str) -> list[str]:
    """The warnings of an optimizer's construction on some of the ranks."""
    stage = rank // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    model: nn.Module = Stage(stage)
    more = {"process_group": group} if kind.endswith("meant") else {}
    if kind.startswith("fsdp2"):
        fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    else:
        model = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layerwise.Optimizer(model, **options(**more))
    return [str(warning.message) for warning in caught if "ranks" in str(warning.message)]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp", "fsdp2, meant", "ddp, meant"])
def test_a_model_on_some_ranks_is_told_whose_norm_it_is_unless_that_is_meant(kind: str) -> None:
    found = run_ranks(4, told, kind)
    if kind.endswith("meant"):
        assert found == [[]] * 4
        return
    assert [len(texts) for texts in found] == [1, 0, 1, 0], "by one rank of each model"
    for (text,) in (found[0], found[2]):
        assert text.startswith(APART)
        for part in ("clipped by the norm", "'pp'", "process_group="):
            assert part in text


def another_group(rank: int, world: int) -> str:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=groups[rank // 2])
    return raised(lambda: layerwise.Optimizer(model, **options(process_group=dist.group.WORLD)))


def test_another_group_than_that_of_the_ddp_is_refused() -> None:
    for number, text in enumerate(run_ranks(4, another_group)):
        ranks = [[0, 1], [2, 3]][number // 2]
        assert text.startswith(
            f"ValueError: process_group has the ranks [0, 1, 2, 3], and the DistributedDataParallel {ranks}"
        )

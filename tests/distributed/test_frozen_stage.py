"""A pipeline stage that trains nothing takes part in every step and does nothing; the others train as if it were not there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from tests import seams
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors


class Block(nn.Module):
    """Attention and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("offset", torch.zeros(3))

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.fused("qkv", n_heads=2, n_kv_heads=2, head_dim=4)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (8, 8, 8)}

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTD).unflatten(-1, (6, 4)).transpose(1, 2).split(2, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x_BTD + self.out(mixed))


def module_of(kind: str) -> nn.Module:
    torch.manual_seed(11)
    if kind == "nothing":
        return nn.Tanh()
    module = Block()
    return module.requires_grad_(kind == "trained")


OPTIONS: dict[str, Any] = {
    "matrix": layerwise.Muon(lr=0.02),
    "other": layerwise.AdamW(lr=0.01),
    "clip_grad_norm": 0.5,
    "count_zeros": True,
    "qk_clip": layerwise.QKClip(threshold=0.01),
}


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().sum()
    if loss.requires_grad:
        loss.backward()


def trained(
    model: layerwise.DataParallel | nn.Module, optimizer: layerwise.Optimizer, steps: range
) -> list[tuple[float, int | None, int]]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = []
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append((optimizer.stats.grad_norm, optimizer.stats.num_zeros, optimizer.stats.clipped_heads))
    return found


def run(rank: int, world: int, kinds: list[str], options: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    kind = kinds[rank * 2 // world]
    module = module_of(kind)
    before = hash_tensors([*module.parameters(), *module.buffers()])
    checks = options.get("check_replicas", False)
    wrapping = {name: value for name, value in options.items() if name != "check_replicas"}
    model = seams.data_parallel(module, mesh=mesh, bucket_mib=0.0001, **wrapping)
    optimizer = layerwise.Optimizer(model, **OPTIONS, check_replicas=checks)
    stats = trained(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict(part=True))
    weights = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    after_three = hash_tensors(model.module.state_dict().values())
    trained(model, optimizer, range(3, 5))
    model.module.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    reloaded = hash_tensors(model.module.state_dict().values())
    backward(model, 9)
    norm = float(model.clip_grad_norm_(1.0))
    model.zero_grad()
    backward(model, 9)
    optimizer.step()
    sent = dict(optimizer.stats.bytes_by_collective)
    missing = dict(optimizer.stats.missing)
    params = sum(len(group["params"]) for group in optimizer.param_groups)
    described = model.plan.describe()
    optimizer.free_buffers()
    freed = model.unwrap()
    return {
        "kind": kind,
        "before": before,
        "stats": stats,
        "three": after_three,
        "reloaded": reloaded,
        "norm": norm,
        "sent": sent,
        "missing": missing,
        "params": params,
        "lr": optimizer.param_groups[0]["lr"],
        "described": described,
        "after": hash_tensors([*freed.parameters(), *freed.buffers()]),
    }


def alone() -> tuple[list[tuple[float, int | None, int]], str]:
    """The stage that trains, by itself in one process."""
    module = module_of("trained")
    optimizer = layerwise.Optimizer(module, **OPTIONS)
    stats = trained(module, optimizer, range(3))
    return stats, hash_tensors(module.state_dict().values())


@pytest.mark.parametrize(
    ("world", "kinds", "options"),
    [
        (2, ["frozen", "trained"], {}),
        (2, ["trained", "frozen"], {"layout": "flat", "overlap_param_gather": False, "check_replicas": True}),
        (2, ["nothing", "trained"], {"layout": "compact", "check_collectives": True}),
        (4, ["frozen", "trained"], {"layout": "flat", "shard_grads": True}),
    ],
)
def test_a_stage_that_trains_nothing_takes_part_and_stays_as_it_is(
    world: int, kinds: list[str], options: dict[str, Any]
) -> None:
    stats, weights = alone()
    results = run_ranks(world, run, kinds, options)
    for result in results:
        assert result["stats"] == results[0]["stats"]
        assert result["norm"] == results[0]["norm"] > 0.0
        assert result["missing"] == {}
        assert result["reloaded"] == result["three"]
        assert result["lr"] < 0.02
        if result["kind"] == "trained":
            assert [norm for norm, *_ in result["stats"]] == pytest.approx([norm for norm, *_ in stats])
            assert [counts for _, *counts in result["stats"]] == [counts for _, *counts in stats]
            assert result["three"] == weights
        else:
            assert result["after"] == result["before"]
            assert result["params"] == 0
            assert set(result["sent"]) <= {"all_reduce"}  # the statistics
            assert "padding 0.000 %" in result["described"]


def nothing_anywhere(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    return raised(lambda: layerwise.DataParallel(module_of("frozen" if rank else "nothing"), mesh=mesh))


def test_a_model_of_which_no_stage_trains_anything_is_refused() -> None:
    for text in run_ranks(2, nothing_anywhere):
        assert "has no trainable param: there is nothing to optimise" in text

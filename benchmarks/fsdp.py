"""Muon on a model that torch's fully_shard() has cut: our step, beside the form that gathers every matrix everywhere and beside fused AdamW, on the
same shards and in one run.

    python benchmarks/fsdp.py            # gloo ranks on the CPU; with a GPU, ranks that share it, and one rank of a world that is not there
    python benchmarks/fsdp.py --ranks 4

Writes benchmarks/results/fsdp.json; figures of another device that are there already stay. Gradients are there before a step begins. `one rank of N`
runs on torch's fake backend: its collectives send nothing, so time and memory are those of the rank alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import layerwise
from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels.newton_schulz import orthogonalize

RESULTS = Path(__file__).parent / "results" / "fsdp.json"
REPEATS, WARMUP = 9, 3
LR = 1e-3
SIZES = {"cpu": (256, 4), "cuda": (1024, 24)}
"""Width and layers."""
WHOLE = layerwise.RouteRule(pattern="*.qkv.weight", to="matrix", split="whole")
"""The other forms take the fused weight as one matrix, so here we do too."""


class Layer(nn.Module):
    """The matrices of one layer. Nothing runs forward here."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False, device=device)
        self.out = nn.Linear(width, width, bias=False, device=device)
        self.up = nn.Linear(width, 4 * width, bias=False, device=device)
        self.down = nn.Linear(4 * width, width, bias=False, device=device)


def build(device: str, mesh: Any) -> nn.Module:
    width, layers = SIZES[device]
    torch.manual_seed(0)
    model = nn.ModuleList(Layer(width, device) for _ in range(layers))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


class GatherEverywhere:
    """The form of Muon for sharded models that needs no plan: momentum on shards, every matrix gathered on every rank, Newton-Schulz on all of them,
    and each keeps its own rows. In bf16 on the wire, with our own Newton-Schulz: nothing but the form differs."""

    def __init__(self, params: list[DTensor]) -> None:
        self._params = params
        self._momentum = [torch.zeros_like(param.to_local()) for param in params]
        self._schedule = coefficient_schedule(*_muon_defaults())

    @torch.no_grad()
    def step(self) -> None:
        for param, momentum in zip(self._params, self._momentum, strict=True):
            assert isinstance(param.grad, DTensor)
            grad = param.grad.to_local()
            momentum.lerp_(grad, 0.05)
            update = torch.lerp(grad, momentum, 0.95).bfloat16()
            # What full_tensor() does, by the plain collective: torch's functional one crashes for gloo with GPUs.
            whole = update.new_empty(param.shape)
            dist.all_gather_into_tensor(whole, update.contiguous())
            direction = orthogonalize(whole[None], schedule=self._schedule)[0]
            rows = torch.chunk(direction, param.device_mesh.size())[param.device_mesh.get_local_rank()]
            param.to_local().mul_(1 - LR * 0.1).add_(rows, alpha=-LR)
            param.grad = None


def _muon_defaults() -> tuple[Any, int]:
    options = layerwise.Muon(lr=LR).options()
    return options["coefficients"], int(options["steps"])  # type: ignore[call-overload]


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "layerwise Muon": lambda model: layerwise.Optimizer(
        model, matrix=layerwise.Muon(lr=LR, weight_decay=0.1), other=layerwise.AdamW(lr=LR), rules=[WHOLE]
    ),
    "gather everywhere": lambda model: GatherEverywhere(list(model.parameters())),
    "torch AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, fused=True),
}


def random_grads(model: nn.Module) -> None:
    for param in model.parameters():
        assert isinstance(param, DTensor)
        local = torch.randn_like(param.to_local())
        param.grad = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


def measure(device: str, name: str, mesh: Any) -> dict[str, float]:
    """Median time of a step and, on a GPU, the most memory that it holds beyond what was there before it."""
    model = build(device, mesh)
    optimizer = MAKERS[name](model)
    times, extra = [], 0

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    for repeat in range(WARMUP + REPEATS):
        random_grads(model)
        kept: list[Tensor | None] = [param.grad for param in model.parameters()]
        wait()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        begin = time.perf_counter()
        optimizer.step()
        wait()
        if repeat >= WARMUP:
            times.append((time.perf_counter() - begin) * 1e3)
        if device == "cuda":
            extra = max(extra, torch.cuda.max_memory_allocated() - before)
        del kept
    found = {"ms": round(statistics.median(times), 2)}
    if device == "cuda":
        found["extra_peak_mib"] = round(extra / 2**20)
    if isinstance(optimizer, layerwise.Optimizer):
        found["sent_mib"] = round(optimizer.stats.bytes_by_collective.get("all_to_all", 0) / 2**20, 2)
    return found


def ratios(rows: dict[str, dict[str, float]]) -> dict[str, Any]:
    ours = rows["layerwise Muon"]["ms"]
    return {
        "rows": rows,
        "gather_everywhere_over_ours": round(rows["gather everywhere"]["ms"] / ours, 2),
        "ours_over_adamw": round(ours / rows["torch AdamW, fused"]["ms"], 2),
    }


def one_of_several(rank: int, world: int, device: str, store: str, path: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh(device, (world,))
    rows = {name: measure(device, name, mesh) for name in MAKERS}
    if rank == 0:
        Path(path).write_text(json.dumps(ratios(rows)))
    dist.destroy_process_group()


def one_of_none(number: int, world: int, path: str) -> None:
    """Rank 0 of a world that is not there. All of its peers say what it says."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    reduce = dist.all_reduce

    def as_if_all_were_alike(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        tensor.mul_(world)
        return reduce(tensor, *args, **kwargs)

    mesh = init_device_mesh("cuda", (world,))
    with mock.patch.object(dist, "all_reduce", as_if_all_were_alike):
        rows = {name: measure("cuda", name, mesh) for name in MAKERS}
    Path(path).write_text(json.dumps(ratios(rows)))
    dist.destroy_process_group()


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranks", type=int, nargs="*", default=None)
    given = arguments.parse_args().ranks
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in given or ([2, 4] if device == "cuda" else [4]):
            path, store = f"{folder}/{world}.json", f"{folder}/store{world}"
            mp.spawn(one_of_several, args=(world, device, store, path), nprocs=world)
            found[f"{world} gloo ranks"] = json.loads(Path(path).read_text())
        for world in (8, 64) if device == "cuda" else ():
            path = f"{folder}/fake{world}.json"
            mp.spawn(one_of_none, args=(world, path), nprocs=1)
            found[f"one rank of {world}"] = json.loads(Path(path).read_text())
    width, layers = SIZES[device]
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report[device] = {
        "command": "python benchmarks/fsdp.py",
        "host": {
            "device": torch.cuda.get_device_name()
            if device == "cuda"
            else f"{os.cpu_count()} cores, {platform.machine()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "model": f"{layers} layers of width {width}",
        "worlds": found,
    }
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    for name, world_report in found.items():
        rows = world_report["rows"]
        print(f"{name}: " + ", ".join(f"{arm} {row['ms']} ms" for arm, row in rows.items()))
        print(
            f"  gathering everywhere takes {world_report['gather_everywhere_over_ours']} times as long as ours; ours takes "
            f"{world_report['ours_over_adamw']} times as long as AdamW"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

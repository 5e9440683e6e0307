"""A model that torch cuts, as it was planned without ranks and as it runs: the same plan, the same bytes held and sent, on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerwise.cli import inspect
from layerwise.cli.meta import shapes_only
from layerwise.comm.joining import Ranks
from layerwise.comm.sharded import local_of
from layerwise.config.resolve import matrix_rule, other_rule, resolve_model
from layerwise.config.rules import tp_mode_of
from layerwise.config.schema import TrainConfig
from layerwise.dtypes import DType
from layerwise.layout.options import Options
from layerwise.layout.placing import MeshSizes, placements_for
from layerwise.layout.plan import Plan, make_plan
from layerwise.models.table import param_table, torch_dtype
from layerwise.planner.memory import memory_by_rank
from layerwise.planner.rules import Rules, schedule_for
from layerwise.train.loop import prepare
from layerwise.train.model import GPT, build_gpt
from tests.distributed.test_planned_bytes import watched
from tests.distributed.trainer_jobs import CPU, several, small_config
from tests.marks import sampled
from tests.ranks import run_ranks

EXPERTS = {"n_experts": 4, "top_k": 2, "expert_hidden": 8}
UNEVEN = {"d_model": 18, "head_dim": 6, "hidden": 22, "tie_embeddings": True}
"""Rows that ranks do not divide, and norms of 18 elements."""
MESHES: dict[str, tuple[MeshSizes, dict[str, Any]]] = {
    "fsdp 2": (MeshSizes(fsdp=2), {}),
    "fsdp 2, uneven": (MeshSizes(fsdp=2), UNEVEN),
    "replicate 2": (MeshSizes(replicate=2), {}),
    "tp 2": (MeshSizes(tp=2), UNEVEN),
    "tp 2, blockwise": (MeshSizes(tp=2), UNEVEN),
    "ep 2": (MeshSizes(fsdp=2, ep=2), EXPERTS),
    "fsdp 4": (MeshSizes(fsdp=4), UNEVEN),
    "hsdp 2 x 2": (MeshSizes(replicate=2, fsdp=2), {}),
    "fsdp 2 x tp 2": (MeshSizes(fsdp=2, tp=2), {}),
    "fsdp 2 x tp 2, blockwise": (MeshSizes(fsdp=2, tp=2), UNEVEN),
    "fsdp 4, ep 2": (MeshSizes(fsdp=4, ep=2), {**EXPERTS, "moe_every": 2}),
    "fsdp 2 x tp 2, ep 2, of rows": (MeshSizes(fsdp=2, tp=2, ep=2), {**EXPERTS, "n_experts": 2}),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("text") / "easy.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return str(file)


def config_of(text: str, name: str, rule: str, precision: str) -> TrainConfig:
    sizes, model = MESHES[name]
    config = small_config(text, model=model, parallel=sizes._asdict(), train={"precision": precision})
    tp_mode: Any = "blockwise" if name.endswith("blockwise") else "auto"
    return replace(config, optim=replace(config.optim, rule=rule, ns_dtype="bf16", tp_mode=tp_mode))


def dtype_of(config: TrainConfig) -> torch.dtype:
    return torch_dtype(DType(config.train.precision))


def planned(config: TrainConfig, sizes: MeshSizes) -> tuple[Plan, Rules]:
    """From the whole model's table alone."""
    rules = Rules(matrix=matrix_rule(config.optim), other=other_rule(config.optim))
    module = build_gpt(resolve_model(config.model), seed=0, dtype=dtype_of(config))
    table = param_table(module)
    options = Options(memory="params", cost=rules.cost, tp_mode=tp_mode_of(rules.matrix))
    return make_plan(table, options, world=sizes.world, placed=placements_for(table, sizes)), rules


def differences(rank: int, world: int, text: str, name: str, rule: str, precision: str) -> list[str]:
    """Where a run is not what was planned."""
    config, (sizes, _) = config_of(text, name, rule, precision), MESHES[name]
    plan, rules = planned(config, sizes)
    schedule = schedule_for(plan, rules)
    memory = memory_by_rank(plan, schedule, rules)[rank]
    run = prepare(config, Ranks(rank=rank, world=world, local_rank=rank, device=CPU))
    run.train_step(1)
    engine, slots = run.optimizer.engine, run.optimizer.stepper.update.slots
    shards = engine.storage.shards
    run.passes.train([run.loader.train_batch(1, 0)])
    grads = [local_of(param.grad) for param in run.model.parameters() if param.grad is not None]
    with watched(SimpleNamespace(engine=engine), memory.slots - slots.plan.nbytes) as watch:
        run.optimizer.step()
    is_fp32 = precision == "fp32"
    with shapes_only():
        inspected = inspect.plan_for(GPT(resolve_model(config.model)).to(dtype_of(config)), config, (), world)
    found = {
        "digest": run.optimizer.plan.digest,
        "inspected": inspected.digest,
        "params": sum(local_of(param).nbytes for param in run.model.parameters()),
        "grads": sum(grad.nbytes + (0 if is_fp32 else 4 * grad.numel()) for grad in grads),
        "masters": 0 if is_fp32 else sum(shard.master.nbytes for shard in shards),
        "state": sum(
            local_of(tensor).nbytes
            for state in run.optimizer.state.values()
            for key, tensor in state.items()
            if key not in ("master", "step")  # planned as masters, and a number that torch wants to find
        ),
        "slots": slots.nbytes + watch.peak,
        "sent": dict(run.optimizer.stats.bytes_by_collective),
    }
    expected = {
        "digest": plan.digest,
        "inspected": plan.digest,
        "params": memory.params,
        "grads": memory.grads,
        "masters": memory.masters,
        "state": memory.state,
        "slots": memory.slots,
        "sent": schedule.bytes_by_collective(rank),
    }
    run.optimizer.zero_grad()
    return [
        f"{name} rank {rank}, {key}: {found[key]}, planned {expected[key]}"
        for key in found
        if found[key] != expected[key]
    ]


@pytest.mark.parametrize(
    ("rule", "precision"),
    sampled([("muon", "fp32"), ("muon", "bf16"), ("normuon", "bf16"), ("adamw", "fp32")], ("normuon", "bf16")),
)
@pytest.mark.parametrize("world", sampled([2, 4], 2))
def test_what_was_planned_is_what_is_held_and_sent(text: str, world: int, rule: str, precision: str) -> None:
    names = [name for name, (sizes, _) in MESHES.items() if sizes.world == world]
    by_rank = run_ranks(world, several, differences, [(text, name, rule, precision) for name in names])
    assert [text for found in by_rank for texts in found for text in texts] == []

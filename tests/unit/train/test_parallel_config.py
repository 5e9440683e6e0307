"""Experts and pipelines in a config: every combination that cannot work is named before anything starts."""

from typing import Any

import pytest
import torch

from layerwise.comm.joining import Ranks, arrange
from layerwise.config.load import load, split_overrides
from layerwise.config.parallelism import world_problems
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import ParallelConfig
from layerwise.config.validate import validate

EXPERTS = ("--model.n-experts", "8")
PIPELINE = ("--parallel.pp", "2", "--train.accumulation", "4")


def validated(*words: str) -> list[str]:
    return [str(problem) for problem in validate(load(None, split_overrides(words)[0]).config)]


@pytest.mark.parametrize(
    "words",
    [
        EXPERTS,
        (*EXPERTS, "--parallel.ep", "4", "--model.top-k", "8"),
        (*EXPERTS, "--model.moe-every", "6"),
        (*EXPERTS, "--model.router-penalty", "0"),
        (*PIPELINE, "--parallel.pp", "4"),
        (*PIPELINE, "--parallel.schedule", "gpipe", "--train.accumulation", "1"),
        (*PIPELINE, "--parallel.chunks", "3"),
        (*PIPELINE, "--parallel.chunks", "2", "--train.accumulation", "3"),
        ("--parallel.layout", "compact", "--parallel.reducer", "ordered", "--parallel.shard-grads", "true"),
        ("--parallel.layout", "padded", "--parallel.reducer", "ordered", "--parallel.grad-dtype", "bf16"),
        (*PIPELINE, *EXPERTS, "--parallel.ep", "2", "--model.tie-embeddings", "true"),
        ("--parallel.fsdp", "4", "--parallel.replicate", "2", "--parallel.grad-dtype", "bf16"),
        ("--parallel.fsdp", "4", "--parallel.reshard-after-forward", "false", "--optim.qk-clip", "100"),
        ("--parallel.tp", "4", "--model.tie-embeddings", "true"),
        (*EXPERTS, "--parallel.fsdp", "2", "--parallel.tp", "2", "--parallel.ep", "4"),
        ("--parallel.ddp", "true", "--parallel.layout", "padded"),
    ],
    ids=" ".join,
)
def test_what_can_work_is_accepted(words: tuple[str, ...]) -> None:
    assert validated(*words) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--parallel.ep", "2"), "parallel.ep: expected 1, got 2: the model has no experts to share out."),
        (("--model.n-experts", "1"), "model.n_experts: expected 0 or at least 2, got 1"),
        (("--model.n-experts", "-1"), "model.n_experts: expected an integer from 0 to 65536, got -1."),
        ((*EXPERTS, "--model.top-k", "9"), "model.top_k: expected at most n_experts=8, got 9."),
        ((*EXPERTS, "--model.top-k", "0"), "model.top_k: expected an integer from 1 to 65536, got 0."),
        ((*EXPERTS, "--model.moe-every", "7"), "model.moe_every: expected at most n_layers=6, got 7: no block would"),
        ((*EXPERTS, "--model.expert-hidden", "0"), "model.expert_hidden: expected an integer from 1"),
        ((*EXPERTS, "--model.router-penalty", "-1"), "model.router_penalty: expected a number that is not negative"),
        ((*EXPERTS, "--parallel.ep", "3"), "parallel.ep: expected a divisor of n_experts=8, got 3"),
        (("--parallel.ep", "0"), "parallel.ep: expected an integer from 1"),
        (("--parallel.pp", "0"), "parallel.pp: expected an integer from 1"),
        (("--parallel.chunks", "2"), "parallel.chunks: expected 1, got 2: only a pipeline has chunks."),
        ((*PIPELINE, "--parallel.pp", "7", "--train.accumulation", "7"), "at most n_layers=6 stages, got pp=7: every"),
        ((*PIPELINE, "--parallel.chunks", "4"), "at most n_layers=6 stages, got pp=2 times chunks=4: every"),
        ((*PIPELINE, "--train.accumulation", "1"), "train.accumulation: expected at least pp=2 microbatches"),
        (
            (*PIPELINE, "--parallel.chunks", "2", "--train.accumulation", "5"),
            "train.accumulation: expected a multiple of pp=2, got 5",
        ),
        (
            (*PIPELINE, "--parallel.chunks", "2", "--parallel.schedule", "gpipe"),
            "parallel.schedule: expected 1f1b with chunks=2, got gpipe.",
        ),
        (
            ("--parallel.layout", "replicated", "--parallel.reducer", "ordered"),
            "parallel.reducer: expected collective with layout replicated, got ordered",
        ),
        (
            ("--parallel.layout", "compact", "--parallel.shard-grads", "true"),
            "parallel.shard_grads: expected false with layout compact, got true",
        ),
        (
            ("--parallel.layout", "replicated", "--parallel.shard-grads", "true"),
            "parallel.shard_grads: expected false with layout replicated, got true",
        ),
        (("--parallel.ddp", "true", "--parallel.fsdp", "2"), "parallel.ddp: expected false with fsdp=2, got true"),
        (
            (*EXPERTS, "--parallel.ddp", "true", "--parallel.ep", "2"),
            "parallel.ep: expected 1 with ddp, got 2: DistributedDataParallel would average different experts.",
        ),
        (("--parallel.ddp", "true", *PIPELINE), "parallel.pp: expected 1 with ddp, got 2"),
        (
            ("--parallel.ddp", "true", "--parallel.grad-dtype", "bf16"),
            "parallel.grad_dtype: expected fp32 with ddp, got bf16",
        ),
        (
            ("--parallel.ddp", "true", "--parallel.reducer", "ordered"),
            "parallel.reducer: expected collective with ddp, got ordered: DistributedDataParallel sums gradients itself.",
        ),
        (("--parallel.fsdp", "0"), "parallel.fsdp: expected an integer from 1"),
        (("--parallel.tp", "0"), "parallel.tp: expected an integer from 1"),
        (("--parallel.replicate", "-1"), "parallel.replicate: expected an integer from 1"),
        (
            ("--parallel.fsdp", "2", "--parallel.layout", "padded"),
            "parallel.layout: expected flat with fsdp=2, got padded: fully_shard() stores params in a way of its own.",
        ),
        (
            ("--parallel.replicate", "2", "--parallel.reducer", "ordered"),
            "parallel.reducer: expected collective with replicate=2, got ordered",
        ),
        (
            ("--parallel.tp", "2", "--parallel.shard-grads", "true"),
            "parallel.shard_grads: expected false with tp=2, got true",
        ),
        (
            ("--parallel.fsdp", "2", "--parallel.bucket-mib", "4"),
            "parallel.bucket_mib: expected none with fsdp=2, got 4.0",
        ),
        (
            ("--parallel.fsdp", "2", "--parallel.overlap-param-gather", "by chunk"),
            "parallel.overlap_param_gather: expected true with fsdp=2, got by chunk",
        ),
        (
            ("--parallel.fsdp", "2", "--parallel.overlap-grad-reduce", "false"),
            "parallel.overlap_grad_reduce: expected true with fsdp=2, got false",
        ),
        (
            ("--parallel.fsdp", "2", "--parallel.overlap-param-gather", "false"),
            "parallel.overlap_param_gather: expected true with fsdp=2, got false",
        ),
        (
            (*PIPELINE, "--parallel.fsdp", "2", "--parallel.tp", "2"),
            "parallel.pp: expected 1 with fsdp=2 times tp=2, got 2: stages are for layerwise.DataParallel.",
        ),
        (
            ("--parallel.reshard-after-forward", "false"),
            "parallel.reshard_after_forward: expected true, got false: without fsdp whole params are always there.",
        ),
        (("--parallel.tp", "3", "--model.hidden", "96"), "parallel.tp: expected a divisor of n_heads=4, got 3"),
        (
            ("--parallel.tp", "4", "--model.n-heads", "12", "--model.n-kv-heads", "6", "--model.head-dim", "8"),
            "parallel.tp: expected a divisor or a multiple of n_kv_heads=6, got 4",
        ),
        (
            ("--parallel.tp", "4", "--model.hidden", "130"),
            "parallel.tp: expected a divisor of the MLP's width 130, got 4.",
        ),
        (
            (*PIPELINE, "--routing.recorded", "routing.json"),
            "routing.recorded: is for a whole model, and with parallel.pp or parallel.ep ranks have parts of it",
        ),
        (("--parallel.tp", "2", "--optim.qk-clip", "100"), "optim.qk_clip: expected none with tp=2, got 100.0"),
        (
            (*EXPERTS, "--parallel.fsdp", "2", "--parallel.replicate", "2", "--parallel.ep", "4"),
            "parallel.ep: expected a divisor of fsdp=2 times tp=1, got 4: these ranks share out the experts",
        ),
    ],
)
def test_each_mistake_is_named(words: tuple[str, ...], expected: str) -> None:
    found = validated(*words)
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    ("pp", "ep", "world", "expected"),
    [
        (1, 1, 7, ""),
        (2, 1, 6, ""),
        (2, 2, 4, ""),
        (2, 1, 1, "parallel.pp: expected a multiple of pp=2 ranks, got 1. Start 2 or a multiple of it"),
        (1, 4, 6, "parallel.ep: expected a multiple of ep=4 ranks, got 6. Start 4 or a multiple of it"),
        (2, 2, 6, "parallel.pp: expected a multiple of pp=2 times ep=2 ranks, got 6. Start 4 or a multiple of it"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_one_problem(pp: int, ep: int, world: int, expected: str) -> None:
    found = [str(problem) for problem in world_problems(ParallelConfig(pp=pp, ep=ep), world)]
    assert len(found) == (1 if expected else 0)
    assert not expected or found[0].startswith(expected)


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ({"fsdp": 4}, 4, ""),
        ({"fsdp": 2, "replicate": 3, "tp": 2}, 12, ""),
        ({"fsdp": 2, "tp": 2, "ep": 4}, 4, ""),
        (
            {"fsdp": 4},
            6,
            "parallel.fsdp: expected fsdp=4 ranks, which is 4, got 6. Start 4, with --nproc or torchrun, or set",
        ),
        ({"tp": 4}, 6, "parallel.tp: expected tp=4 ranks, which is 4, got 6. Start 4, with --nproc or torchrun."),
        ({"ddp": True}, 3, ""),
        ({"ddp": True}, 1, "parallel.ddp: expected false on one rank, got true"),
        ({"replicate": 2, "fsdp": 2}, 1, "parallel.fsdp: expected replicate=2 times fsdp=2 ranks, which is 4, got 1."),
    ],
)
def test_a_mesh_has_as_many_places_as_there_are_ranks(sizes: dict[str, Any], world: int, expected: str) -> None:
    found = [str(problem) for problem in world_problems(ParallelConfig(**sizes), world)]
    assert len(found) == (1 if expected else 0)
    assert not expected or found[0].startswith(expected)


def test_a_model_without_experts_has_none_in_any_block() -> None:
    shape = resolve_model(load(None).config.model)
    assert not any(shape.has_experts(block) for block in range(shape.n_layers))


def ranks(world: int) -> Ranks:
    return Ranks(rank=world - 1, world=world, local_rank=0, device=torch.device("cpu"))


def test_ranks_that_are_all_data_parallel_need_no_mesh() -> None:
    grid = arrange(ranks(3))
    assert (grid.mesh, grid.pipeline, grid.experts.group) == (None, None, None)
    assert (grid.data_coord, grid.data_world, grid.pp_coord, grid.experts.world) == (2, 3, 0, 1)


@pytest.mark.parametrize(("pp", "ep"), [(2, 1), (1, 2), (0, 1), (1, -1)])
def test_ranks_that_cannot_be_arranged_are_refused_before_groups_are_made(pp: int, ep: int) -> None:
    with pytest.raises(ValueError, match=f"3 ranks cannot be arranged as pp={pp} times ep={ep}"):
        arrange(ranks(3), pp=pp, ep=ep)

"""Expert parallelism in the trainer: ranks that share out experts train like ranks that hold all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.joining import Ranks, arrange
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import TrainConfig
from layerwise.train.model import build_gpt, next_byte_loss
from tests.distributed.trainer_jobs import CPU, Curve, largest_difference, several, small_config, train_on_rank
from tests.marks import sampled
from tests.ranks import raised, run_ranks

TOLERANCE = 5e-6
"""Relative, over ten steps; found are 7e-7. An expert multiplies the rows of all ranks at once or of each rank alone, and
fp32 products of different sizes round differently. The mistakes of the controls are off by 6e-3."""

MODEL = {"n_experts": 4, "top_k": 2, "expert_hidden": 8, "router_penalty": 0.05}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file: Path = tmp_path_factory.mktemp("text") / "easy.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\nall work and no play\n" * 100)
    return str(file)


def config_of(text: str, ep: int = 1, *, accumulation: int = 1, **model: Any) -> TrainConfig:
    return small_config(text, model={**MODEL, **model}, parallel={"ep": ep}, train={"accumulation": accumulation})


# -- gradients, without the engine ------------------------------------------------------------------------------------


def _gradients(rank: int, world: int, config: TrainConfig, ep: int) -> dict[str, Tensor]:
    """Gradients of the sum of all ranks' losses; each rank's own experts."""
    grid = arrange(Ranks(rank=rank, world=world, local_rank=rank, device=CPU), ep=ep)
    model = build_gpt(resolve_model(config.model), experts=grid.experts, seed=1)
    tokens = torch.randint(0, 256, (3, 9), generator=torch.Generator().manual_seed(rank))
    next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]).sum().backward()
    grads = {}
    for fqn, param in model.named_parameters():
        assert param.grad is not None
        grads[fqn] = param.grad
        if ".experts." not in fqn or grid.mesh is None:
            dist.all_reduce(param.grad)
        else:
            dist.all_reduce(param.grad, group=grid.mesh.get_group("dp"))
    return grads


@pytest.mark.parametrize(("world", "sizes"), [(2, (2,)), (4, (2, 4))])
def test_expert_gradients_are_the_sum_over_all_ranks(text: str, world: int, sizes: tuple[int, ...]) -> None:
    config = config_of(text)
    by_rank = run_ranks(world, several, _gradients, [(config, ep) for ep in (1, *sizes)])
    whole = by_rank[0][0]
    for rank, results in enumerate(by_rank):
        for ep, grads in zip(sizes, results[1:], strict=True):
            for fqn, grad in grads.items():
                expected = whole[fqn].chunk(ep)[rank % ep] if ".experts." in fqn else whole[fqn]
                assert _are_close(grad, expected), f"{fqn} on rank {rank} with ep={ep}"
            down = "blocks.0.mlp.experts.down"
            average = grads[down] / world  # the control: an average where there should be a sum
            assert not _are_close(average, whole[down].chunk(ep)[rank % ep])


def _are_close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for sums of products in another order."""
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


# -- training ---------------------------------------------------------------------------------------------------------


def curves_of(world: int, *configs: TrainConfig) -> list[Curve]:
    by_rank = run_ranks(world, several, train_on_rank, [(config,) for config in configs])
    assert all(curves == by_rank[0] for curves in by_rank), "all ranks must report the same runs"
    curves: list[Curve] = by_rank[0]
    return curves


@pytest.mark.parametrize(("world", "sizes"), sampled([(2, (1, 2)), (4, (2, 4))], (2, (1, 2))))
def test_ranks_that_share_out_experts_train_like_one_that_has_them_all(
    text: str, world: int, sizes: tuple[int, ...]
) -> None:
    alone = train_on_rank(0, 1, config_of(text, accumulation=world))
    assert alone.losses[-1] < alone.losses[0]
    for ep, curve in zip(sizes, curves_of(world, *(config_of(text, ep) for ep in sizes)), strict=True):
        assert largest_difference(curve, alone) < TOLERANCE, f"ep={ep}"


def test_dense_and_expert_blocks_and_accumulation_go_together(text: str) -> None:
    alone = train_on_rank(0, 1, config_of(text, accumulation=6, moe_every=2, top_k=1))
    (shared,) = curves_of(2, config_of(text, 2, accumulation=3, moe_every=2, top_k=1))
    assert largest_difference(shared, alone) < TOLERANCE


@pytest.mark.slow
def test_mistakes_with_experts_are_seen(text: str) -> None:
    alone = train_on_rank(0, 1, config_of(text, accumulation=2))
    calls = [(config_of(text, 2), sabotage) for sabotage in ("scaled experts", "dense experts")]
    for (_, sabotage), wrong in zip(calls, run_ranks(2, several, train_on_rank, calls)[0], strict=True):
        assert largest_difference(wrong, alone) > 500 * TOLERANCE, sabotage


def _start(rank: int, world: int, config: TrainConfig) -> str:
    return raised(lambda: train_on_rank(rank, world, config))


def test_a_number_of_ranks_that_does_not_fit_is_refused_on_all_of_them(text: str) -> None:
    messages = run_ranks(3, _start, config_of(text, 2))
    assert len(set(messages)) == 1
    assert "parallel.ep: expected a multiple of ep=2 ranks, got 3." in messages[0]

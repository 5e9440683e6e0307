"""A step on fused weights is the step on the same weights stored apart, bit by bit, however they are fused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.routing.split import (
    Split,
    interleaved_rows,
    per_column_head,
    per_row_head,
    row_blocks,
    stack,
    transposed,
    whole,
)
from tests.marks import sampled
from tests.ranks import run_ranks
from tests.worlds import deliver, gradient


@dataclass(frozen=True)
class Fusion:
    """A fused weight, and by hand, without the library, the matrices in it."""

    shape: tuple[int, ...]
    split: Split
    take_apart: Callable[[Tensor], list[Tensor]]
    """Views of the logical matrices: rows are outputs."""


def _interleaved_qkv(weight: Tensor) -> list[Tensor]:
    heads = weight.view(3, 12, 10)  # 3 heads of query 6, key 4, value 2
    return [heads[:, :6].reshape(18, 10), heads[:, 6:10].reshape(12, 10), heads[:, 10:].reshape(6, 10)]


FUSIONS: dict[str, Fusion] = {
    "whole": Fusion((9, 7), whole((9, 7)), lambda w: [w]),
    "qkv one after the other": Fusion((20, 12), row_blocks((20, 12), (12, 4, 4)), lambda w: [w[:12], w[12:16], w[16:]]),
    "qkv head by head": Fusion((36, 10), interleaved_rows((36, 10), 3, (6, 4, 2)), _interleaved_qkv),
    "gate and up in halves": Fusion((22, 8), row_blocks((22, 8), (11, 11)), lambda w: [w[:11], w[11:]]),
    "gate and up taking turns": Fusion((22, 8), Split(grid=(11, 2, 8), roles="rac"), lambda w: [w[0::2], w[1::2]]),
    "per head on rows": Fusion((12, 10), per_row_head((12, 10), 3), lambda w: [w[:4], w[4:8], w[8:]]),
    "per head on columns": Fusion((10, 12), per_column_head((10, 12), 3), lambda w: [w[:, :4], w[:, 4:8], w[:, 8:]]),
    "experts": Fusion((3, 6, 5), stack((3, 6, 5)), lambda w: [w[0], w[1], w[2]]),
    "experts with fused gate and up": Fusion(
        (2, 14, 5), stack((2, 14, 5), sizes=(7, 7)), lambda w: [w[0, :7], w[0, 7:], w[1, :7], w[1, 7:]]
    ),
    "experts stored transposed": Fusion(
        (2, 5, 14),
        stack((2, 5, 14), transposed=True, sizes=(7, 7)),
        lambda w: [w[0, :, :7].T, w[0, :, 7:].T, w[1, :, :7].T, w[1, :, 7:].T],
    ),
    "stored transposed in three": Fusion(
        (8, 21), transposed((8, 21), (7, 7, 7)), lambda w: [w[:, :7].T, w[:, 7:14].T, w[:, 14:].T]
    ),
    "convolution": Fusion((8, 3, 2, 2), whole((8, 3, 2, 2)), lambda w: [w.flatten(1)]),
}


class Fused(nn.Module):
    def __init__(self, name: str, weight: Tensor) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(weight)

    def matrix_splits(self) -> dict[str, Split]:
        return {"weight": FUSIONS[self.name].split}


class Apart(nn.Module):
    def __init__(self, parts: list[Tensor]) -> None:
        super().__init__()
        for index, part in enumerate(parts):
            layer = nn.Linear(part.shape[1], part.shape[0], bias=False)
            layer.weight.data.copy_(part)
            self.add_module(f"part{index}", layer)


def updated(rank: int, module: nn.Module, grads: list[dict[str, Tensor]], rule: str, scale: str) -> dict[str, Tensor]:
    rules = {"muon": layerwise.Muon, "normuon": layerwise.NorMuon, "adamuon": layerwise.AdaMuon}
    model = layerwise.DataParallel(module, bucket_mib=0.0005)
    optimizer = layerwise.Optimizer(
        model, matrix=rules[rule](lr=0.05, scale=scale, weight_decay=0.1), other=layerwise.AdamW(lr=0.01)
    )
    for step in grads:
        deliver(model, step, sync=True)
        optimizer.step()
    return {fqn: param.detach().clone() for fqn, param in module.named_parameters()}


def fused_and_apart(rank: int, world: int, rule: str, scale: str) -> list[str]:
    """Names of the fusions whose updated weight is not that of the parts."""
    wrong = []
    for name, fusion in FUSIONS.items():
        torch.manual_seed(11)
        start = torch.randn(fusion.shape)
        steps = [gradient(name, torch.Size(fusion.shape), rank, step, 0) for step in range(3)]
        fused = updated(rank, Fused(name, start.clone()), [{"weight": grad} for grad in steps], rule, scale)
        apart = updated(
            rank,
            Apart(fusion.take_apart(start)),
            [{f"part{i}.weight": part for i, part in enumerate(fusion.take_apart(grad))} for grad in steps],
            rule,
            scale,
        )
        parts = fusion.take_apart(fused["weight"])
        if not all(torch.equal(part, apart[f"part{i}.weight"]) for i, part in enumerate(parts)):
            wrong.append(name)
    return wrong


@pytest.mark.broad
@pytest.mark.parametrize(
    ("world", "rule", "scale"),
    sampled(
        [
            (world, *how)
            for world in (1, 2, 3)
            for how in (("muon", "shape"), ("normuon", "rms"), ("adamuon", "unit_rms"))
        ],
        (1, "muon", "shape"),
        (1, "adamuon", "unit_rms"),
        (3, "normuon", "rms"),
    ),
)
def test_a_step_on_fused_weights_is_the_step_on_their_parts(world: int, rule: str, scale: str) -> None:
    assert run_ranks(world, fused_and_apart, rule, scale) == [[]] * world


def test_the_comparison_notices_a_wrong_split() -> None:
    """Control: orthogonalised as one, a fused weight moves otherwise than its parts."""
    right = FUSIONS["qkv one after the other"]
    FUSIONS["qkv one after the other"] = Fusion(right.shape, whole((20, 12)), right.take_apart)
    try:
        torch.manual_seed(11)
        start, grad = torch.randn(right.shape), gradient("x", torch.Size(right.shape), 0, 0, 0)
        name = "qkv one after the other"
        fused = updated(0, Fused(name, start.clone()), [{"weight": grad}], "muon", "rms")
        parts = {f"part{i}.weight": part for i, part in enumerate(right.take_apart(grad))}
        apart = updated(0, Apart(right.take_apart(start)), [parts], "muon", "rms")
        assert not torch.equal(right.take_apart(fused["weight"])[0], apart["part0.weight"])
    finally:
        FUSIONS["qkv one after the other"] = right


def test_every_fusion_says_in_words_how_it_splits() -> None:
    module = Fused("qkv head by head", torch.randn(36, 10))
    model = layerwise.DataParallel(module)
    assert model.plan.route("weight").reason.endswith("in interleaved row blocks of 6, 4, 2")

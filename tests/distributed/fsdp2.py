"""A small model under torch's fully_shard, samples for it, and what one process makes of them that sees all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import layerwise
from tests.ranks import run_ranks

VOCABULARY, WIDTH, HIDDEN = 11, 6, 10
SAMPLES = 6
"""Of one batch: as many for each of two ranks, and for each of three."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def built(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    return Model(tied=tied).to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """All samples of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (2, SAMPLES, 4), generator=generator)
    return tokens[0], tokens[1]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def mine(rank: int, world: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's samples of a step."""
    tokens, targets = batch(step)
    return tokens.chunk(world)[rank], targets.chunk(world)[rank]


def cut(model: Model, world: int, **options: Any) -> Model:
    """Every block and the rest of the model, as the tutorials have it."""
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def optimizer_of(model: nn.Module, **options: Any) -> layerwise.Optimizer:
    options = {"matrix": layerwise.Muon(lr=0.05, ns_dtype="fp32"), "other": layerwise.AdamW(lr=0.02), **options}
    return layerwise.Optimizer(model, **options)


def whole(model: nn.Module) -> dict[str, Tensor]:
    """All weights, on every rank."""
    found = {}
    for name, param in model.named_parameters():
        full = param.detach().full_tensor() if isinstance(param, DTensor) else param.detach().clone()
        found[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")] = full
    return found


def alone(rank: int, world: int, steps: int, tied: bool, frozen: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """One process that sees all samples."""
    model = built(tied=tied)
    freeze(model, frozen)
    optimizer = optimizer_of(model, **options)
    for step in range(steps):
        loss_of(model, *batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def freeze(model: nn.Module, part: str) -> None:
    for name, param in model.named_parameters():
        if part and name.startswith(part):
            param.requires_grad_(False)


_EXPECTED: dict[str, dict[str, Tensor]] = {}


def expected(steps: int = 3, *, tied: bool = False, frozen: str = "", **options: Any) -> dict[str, Tensor]:
    key = repr((steps, tied, frozen, options))
    if key not in _EXPECTED:
        (_EXPECTED[key],) = run_ranks(1, alone, steps, tied, frozen, options)
    return _EXPECTED[key]


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], *, atol: float = 2e-5) -> None:
    """Sums over ranks are taken in another order than those over a batch: fp32 rounding, a few steps of it."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name].float(), tensor, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def fill(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Write whole values into a model, wherever its parts lie."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                param.copy_(distribute_tensor(values[name], param.device_mesh, param.placements))
            else:
                param.copy_(values[name])

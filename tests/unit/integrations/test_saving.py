"""Ways to save that come first to mind, each of which would leave one rank's part in a checkpoint: they say so when they save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.nn.parallel import DistributedDataParallel

import layerwise
from tests.ranks import as_launched, raised, run_ranks

RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.05), "other": layerwise.AdamW(lr=0.01)}
IN_PARTS = "StateError: state_dict() was called on an optimizer whose state is in parts"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 4))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_torch(rank: int, world: int) -> list[str]:
    model = DistributedDataParallel(net())
    optimizer = layerwise.Optimizer(model, layout="flat", **RULES)
    stepped(model, optimizer)
    options = (None, StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True, cpu_offload=True))
    said = [raised(lambda how=how: get_state_dict(model, optimizer, options=how)) for how in options]  # type: ignore[misc]
    return [*said, raised(lambda: get_optimizer_state_dict(model, optimizer))]


def test_torchs_get_state_dict_of_replicas() -> None:
    for said in run_ranks(2, by_torch):
        assert all(IN_PARTS in text for text in said)


def by_accelerate(rank: int, world: int, order: str, folder: str) -> list[str]:
    from accelerate import Accelerator

    as_launched(rank, world)
    accelerator = Accelerator(cpu=True)
    module = net()
    if order == "before":
        made = layerwise.Optimizer(module, gradients="reduced", layout="flat", **RULES)
        model, optimizer = accelerator.prepare(module, made)
    else:
        model = accelerator.prepare(module)
        made = layerwise.Optimizer(model, layout="flat", **RULES)
        optimizer = accelerator.prepare(made)
    stepped(model, optimizer)
    said = [raised(lambda: accelerator.save_state(folder))]
    made.consolidate_state_dict()  # as it says
    accelerator.save_state(folder)
    momentum = made.state[made.param_groups[0]["params"][0]]["momentum"]
    before: Tensor = momentum.clone()
    stepped(model, optimizer)
    accelerator.load_state(folder)
    return [*said, "as before" if torch.equal(before, momentum) else "other momenta"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_with_an_optimizer_of_ones_own(order: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    for said, after in run_ranks(2, by_accelerate, order, str(tmp_path)):
        assert IN_PARTS in said
        assert "prepare() and TrainerMixin of layerwise.integrations do it" in said
        assert after == "as before"


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Few rows, all alike."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(8)}


class Model(nn.Module):
    """A model for a Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


def by_trainer(rank: int, world: int, folder: str) -> str:
    from transformers import Trainer, TrainingArguments

    as_launched(rank, world)
    arguments = TrainingArguments(
        folder, use_cpu=True, ddp_backend="gloo", max_steps=2, save_steps=1, report_to=[], disable_tqdm=True
    )
    assert arguments.device.type == "cpu"  # it makes the process group
    module = Model()
    optimizer = layerwise.Optimizer(module, gradients="reduced", layout="flat", **RULES)
    trainer = Trainer(module, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    return raised(trainer.train)  # the second rank hears of it when the first leaves


@pytest.mark.slow
def test_hugging_faces_trainer_with_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    first, _ = run_ranks(2, by_trainer, str(tmp_path))
    assert IN_PARTS in first

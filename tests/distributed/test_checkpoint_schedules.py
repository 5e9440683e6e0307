"""Six steps in a row are three, a checkpoint, and three more: to the bit, for learning rates and random numbers too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler

import layerwise
from layerwise.errors import CheckpointError
from tests.ranks import raised, run_ranks
from tests.worlds import Net, hash_by_param, hash_everything

HALF = 3


def warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 4)


def sequential(optimizer: layerwise.Optimizer) -> Any:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer: layerwise.Optimizer) -> Any:
    parts: list[Any] = [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=4),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
    ]
    return lr_scheduler.ChainedScheduler(parts)


SCHEDULERS: dict[str, Callable[[layerwise.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, warm_up),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9 + 0.01 * step),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=6),
    "warm restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=8, cycle_momentum=False),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.02, step_size_up=4, cycle_momentum=False),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
    "sequential": sequential,
    "chained": chained,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2),
    "none": lambda optimizer: None,
}


class Dropping(nn.Module):
    """A network that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(self.drop(x))
        return out


class Training:
    """A loop as users write it."""

    def __init__(self, scheduler: str, *, wrapped: bool = False, lr: float = 0.02) -> None:
        torch.manual_seed(3)
        module = Dropping()
        self.model: nn.Module = layerwise.DataParallel(module) if wrapped else module
        self.optimizer = layerwise.Optimizer(
            self.model, matrix=layerwise.Muon(lr=lr), other=layerwise.AdamW(lr=lr / 5), clip_grad_norm=1.0
        )
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.rates: list[list[float]] = []
        self.losses: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(torch.randn(3, 6)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.losses.append(float(loss.detach()))
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(1.0)  # which is no better than before
            else:
                self.scheduler.step()

    def save(self, path: Path | str) -> None:
        layerwise.save(path, self.model, self.optimizer, extra={"scheduler": self.scheduler, "cursor": 17})

    def load(self, path: Path | str) -> Any:
        return layerwise.load(path, self.model, self.optimizer, extra={"scheduler": self.scheduler})


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "none"])
def test_a_schedule_goes_on_where_it_was(tmp_path: Path, name: str) -> None:
    straight = Training(name)
    straight.run(2 * HALF)
    first = Training(name)
    first.run(HALF)
    first.save(tmp_path / "half")
    second = Training(name)
    torch.manual_seed(999)
    loaded = second.load(tmp_path / "half")
    assert (loaded.step, loaded.extra, loaded.same_generators) == (HALF, {"cursor": 17}, True)
    second.run(HALF)
    assert first.rates + second.rates == straight.rates
    assert first.losses + second.losses == straight.losses
    assert second.scheduler.state_dict() == straight.scheduler.state_dict()
    assert hash_by_param(second.optimizer) == hash_by_param(straight.optimizer)
    assert len({rates[0] for rates in straight.rates}) > 1  # something happened


@pytest.mark.parametrize(
    "name", sorted(SCHEDULERS.keys() - {"none", "one cycle", "cyclic"})
)  # whose rates are their own
def test_a_schedule_goes_on_with_the_base_rates_of_the_new_run(tmp_path: Path, name: str) -> None:
    """Also those that schedulers keep to themselves, and for all steps to come."""
    straight = Training(name, lr=0.04)
    straight.run(2 * HALF)
    first = Training(name, lr=0.02)
    first.run(HALF)
    first.save(tmp_path / "half")
    second = Training(name, lr=0.04)
    second.load(tmp_path / "half")
    said = second.scheduler.get_last_lr()
    assert said == [group["lr"] for group in second.optimizer.param_groups]
    second.run(HALF)
    for found, expected in zip(second.rates, straight.rates[HALF:], strict=True):
        assert found == pytest.approx(expected, rel=1e-12)  # scaled, and rounded, on the way


def test_a_rate_that_was_taken_to_zero_by_hand_is_warned_of(tmp_path: Path) -> None:
    one = Training("none")
    for group in one.optimizer.param_groups:
        group["lr"] = 0.0
    layerwise.save(tmp_path / "one", one.model, one.optimizer)
    two = Training("none")
    with pytest.warns(UserWarning, match=r"param groups 'matrix', 'other' go on with lr=0"):
        layerwise.load(tmp_path / "one", two.model, two.optimizer)


def test_without_the_scheduler_a_run_is_another_one(tmp_path: Path) -> None:
    """What must fail, does."""
    straight = Training("cosine")
    straight.run(2 * HALF)
    first = Training("cosine")
    first.run(HALF)
    first.save(tmp_path / "half")
    second = Training("cosine")
    layerwise.load(tmp_path / "half", second.model, second.optimizer)
    second.run(HALF)
    assert first.rates + second.rates != straight.rates


def test_random_numbers_of_python_are_the_users(tmp_path: Path) -> None:
    """Ours are torch's; what Python and others draw goes into `extra`."""
    one = Training("step")
    random.seed(5)
    layerwise.save(tmp_path / "one", one.model, one.optimizer, extra={"python": random.getstate()})
    expected = random.random()
    loaded = layerwise.load(tmp_path / "one", one.model, one.optimizer)
    random.setstate(loaded.extra["python"])
    assert random.random() == expected


def test_an_object_that_was_not_saved_is_named(tmp_path: Path) -> None:
    one = Training("step")
    layerwise.save(tmp_path / "one", one.model, one.optimizer, extra={"cursor": 3})
    before = hash_everything(one.optimizer)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no extra 'scheduler': it has 'cursor'"):
        one.load(tmp_path / "one")
    with pytest.raises(TypeError, match=r"extra\['cursor'\] is a int: expected an object with load_state_dict"):
        layerwise.load(tmp_path / "one", one.model, one.optimizer, extra={"cursor": 4})
    assert hash_everything(one.optimizer) == before


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [("cosine", "cosine", 0.5), ("none", "none", 0.5), ("cosine", "none", 1.0), ("none", "cosine", 1.0)],
)
def test_a_rate_goes_on_in_proportion_where_there_is_a_schedule_on_both_sides_or_none(
    tmp_path: Path, before: str, after: str, expected: float
) -> None:
    """Options of the new run count, and the place in the schedule is that of the old one."""
    one = Training(before, lr=0.02)
    for group in one.optimizer.param_groups:
        group["lr"] *= 0.5
    layerwise.save(tmp_path / "one", one.model, one.optimizer)
    for lr in (0.02, 0.04):
        two = Training(after, lr=lr)
        layerwise.load(tmp_path / "one", two.model, two.optimizer)
        assert [group["lr"] for group in two.optimizer.param_groups] == [lr * expected, lr / 5 * expected]


def stage_rates(rank: int, world: int, folder: str) -> list[tuple[str, float]]:
    """Only the second stage has params of a rule."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    own = [layerwise.RouteRule(pattern="late.weight", to="matrix", options={"lr": 0.3})]

    def build() -> tuple[nn.Module, layerwise.Optimizer, Any]:
        stage = nn.ModuleDict({("early" if rank == 0 else "late"): nn.Linear(4, 4)})
        model = layerwise.DataParallel(stage, mesh=mesh, rules=own if rank == 1 else [])
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.01))
        return model, optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = build()
    optimizer.step()
    scheduler.step()
    layerwise.save(f"{folder}/saved", model, optimizer)
    model, optimizer, _ = build()
    layerwise.load(f"{folder}/saved", model, optimizer)
    return [(group["name"], group["lr"]) for group in optimizer.param_groups]


def test_every_stage_goes_on_with_the_rates_of_its_own_groups(tmp_path: Path) -> None:
    first, second = run_ranks(2, stage_rates, str(tmp_path))
    assert first == [("matrix", 0.05), ("other", 0.005)]
    assert second == [("other", 0.005), ("rule 1", 0.15)]


def own_extra(rank: int, world: int, folder: str) -> list[Any]:
    training = Training("step", wrapped=True)
    text = raised(lambda: layerwise.save(f"{folder}/a", training.model, training.optimizer, extra={"cursor": rank}))
    return [text, sorted(path.name for path in Path(folder).iterdir())]


def test_extra_values_that_ranks_have_each_their_own_are_refused(tmp_path: Path) -> None:
    for text, left in run_ranks(2, own_extra, str(tmp_path)):
        assert text.startswith("PlanMismatchError: ranks 0 and 1 derived different extra values: ")
        assert "cursor" in text
        assert left == []


def halves(rank: int, world: int, folder: str, part: str) -> tuple[list[float], list[list[float]], str, bool]:
    """A half of a run, or all of it."""
    training, same = Training("cosine", wrapped=True), True
    torch.manual_seed(100 + rank)  # every rank draws its own
    if part == "second":
        torch.manual_seed(7)
        same = training.load(f"{folder}/half").same_generators
    training.run({"all": 2 * HALF}.get(part, HALF))
    if part == "first":
        training.save(f"{folder}/half")
    return training.losses, training.rates, hash_everything(training.optimizer), same


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    straight = run_ranks(2, halves, str(tmp_path), "all")
    first = run_ranks(2, halves, str(tmp_path), "first")
    second = run_ranks(2, halves, str(tmp_path), "second")
    for whole, one, two in zip(straight, first, second, strict=True):
        assert one[0] + two[0] == whole[0]
        assert one[1] + two[1] == whole[1]
        assert two[2] == whole[2]
        assert two[3]
    assert straight[0][0] != straight[1][0]  # ranks drew different numbers
    ((_, rates, _, same),) = run_ranks(1, halves, str(tmp_path), "second")
    assert rates == second[0][1]
    assert not same

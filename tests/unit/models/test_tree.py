from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from layerwise.models.tree import ModuleTree


def model() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()), nn.Linear(2, 2))
    module[2].weight.requires_grad_(False)
    return module


def rename(module: nn.Sequential) -> None:
    module[0]._parameters = {"other": module[0].weight, "bias": module[0].bias}


def name_anew(module: nn.Sequential) -> None:
    table = module[1][0]._parameters
    table["other"] = table.pop("weight")


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "frozen": lambda module: module[0].weight.requires_grad_(False),
    "unfrozen": lambda module: module[2].weight.requires_grad_(True),
    "replaced": lambda module: setattr(module[0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "a bias of none": lambda module: setattr(module[0], "bias", None),
    "a bias where there was none": lambda module: setattr(module[1][0], "bias", nn.Parameter(torch.zeros(2))),
    "a param added": lambda module: module.register_parameter("extra", nn.Parameter(torch.zeros(2))),
    "a param taken away": lambda module: delattr(module[2], "bias"),
    "a layer replaced": lambda module: module.__setitem__(0, nn.Linear(2, 2)),
    "a module added, deep inside": lambda module: module[1].append(nn.Linear(2, 2)),
    "a module added at a leaf": lambda module: module[1][1].add_module("inner", nn.Linear(2, 2)),
    "the last module taken away": lambda module: module.pop(2),
    "another table of params": rename,
    "another name": name_anew,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_noticed_until_it_is_taken_as_it_is(change: Callable[[nn.Sequential], object]) -> None:
    module = model()
    tree = ModuleTree([module])
    assert tree.is_unchanged()
    change(module)
    assert not tree.is_unchanged()
    tree.renew()
    assert tree.is_unchanged()


def test_values_gradients_and_modes_are_no_change() -> None:
    module = model()
    tree = ModuleTree([module, module[1]])
    module(torch.ones(1, 2)).sum().backward()
    module.eval()
    with torch.no_grad():
        module[0].weight.add_(1.0)
    assert tree.is_unchanged()


def test_a_change_in_any_root_is_noticed() -> None:
    one, two = model(), model()
    tree = ModuleTree([one, two])
    two[0].bias.requires_grad_(False)
    assert not tree.is_unchanged()

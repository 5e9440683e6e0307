from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import layerwise
from layerwise.dtypes import DType
from layerwise.models.table import param_table, plain_dtype, torch_dtype
from layerwise.routing.spec import ModuleKind
from tests.worlds import Zoo


def test_every_param_is_listed_once_in_registration_order_with_its_modules_kind() -> None:
    table = param_table(Zoo())
    assert [param.fqn for param in table] == [fqn for fqn, _ in Zoo().named_parameters()]
    kinds = {param.fqn: param.module_kind for param in table}
    assert kinds["embed.weight"] is ModuleKind.EMBEDDING
    assert kinds["qkv.weight"] is ModuleKind.LINEAR
    assert kinds["conv.weight"] is ModuleKind.CONV
    assert kinds["norm.weight"] is ModuleKind.NORM
    assert kinds["experts"] is ModuleKind.OTHER


def test_a_tied_weight_is_one_param_with_both_names() -> None:
    table = param_table(Zoo(tied=True))
    tied = table.find("head.weight")
    assert tied.fqn == "embed.weight"
    assert tied.aliases == ("head.weight",)
    assert tied.alias_kinds == (ModuleKind.LINEAR,)


def test_frozen_params_are_listed_as_such_whatever_their_dtype() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double().requires_grad_(False))
    assert [param.trainable for param in param_table(module)] == [True, True, False, False]


def test_declared_row_blocks_reach_the_table() -> None:
    split = param_table(Zoo()).find("qkv.weight").split
    assert split is not None
    assert split.blocks == (12, 4, 4)


def test_a_model_without_values_has_a_table_too() -> None:
    with torch.device("meta"):
        module = Zoo()
    assert param_table(module) == param_table(Zoo())


@pytest.mark.parametrize("dtype", list(DType))
def test_dtypes_go_there_and_back(dtype: DType) -> None:
    assert plain_dtype(torch_dtype(dtype), "x") is dtype
    assert torch.empty(0, dtype=torch_dtype(dtype)).element_size() == dtype.itemsize


def test_a_dtype_without_a_name_is_refused_with_its_owner() -> None:
    with pytest.raises(TypeError, match=r"param 'w' has dtype torch.int8: expected one of fp32, bf16, fp16"):
        plain_dtype(torch.int8, "param 'w'")
    with pytest.raises(
        TypeError, match=r"grad_dtype is 'fp32': expected one of torch.float32, torch.bfloat16, torch.float16"
    ):
        layerwise.DataParallel(nn.Linear(2, 2), grad_dtype="fp32")  # type: ignore[arg-type]


def test_a_sparse_param_is_named() -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"param 'weight' is sparse \(torch.sparse_coo\): expected a dense one"):
        layerwise.DataParallel(module)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight


def test_nothing_is_computed_to_look_at_a_parametrized_model() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Conv2d(3, 4, 1), nn.Linear(4, 10, bias=False))
    counts = [Counting() for _ in range(3)]
    for child, counting in zip(list(model)[1:], counts, strict=True):
        register_parametrization(child, "weight", counting, unsafe=True)
    before = [counting.calls for counting in counts]
    names = [param.fqn for param in param_table(model)]
    assert [counting.calls for counting in counts] == before
    assert "3.parametrizations.weight.original" in names

"""Params that are kept as codes: what they read as, what products make of them, and who may write into them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise
from layerwise.errors import StateError
from layerwise.kernels.stored import Stored, stored_of
from layerwise.layout.recipes import RECIPES
from layerwise.models.quantized import QuantizedTensor
from tests.quantizing import codes_of
from tests.reference.block_formats import numbers

SIZES = {"mxfp8": (64, 96), "blockwise": (128, 256)}
BLOCKS = {"mxfp8": (1, 32), "blockwise": (128, 128)}


def meant(values: Tensor, recipe: str) -> Tensor:
    """The numbers that codes of values stand for, by the oracle, in bf16."""
    codes, scales = codes_of(values, recipe)
    tall, wide = BLOCKS[recipe]
    factors = (
        (2.0 ** (scales.double() - 127) if recipe == "mxfp8" else scales)
        .repeat_interleave(tall, -2)
        .repeat_interleave(wide, -1)
    )
    return (torch.from_numpy(numbers("e4m3"))[codes.long()].float() * factors.float()).bfloat16()


def rounded(x: Tensor, recipe: str) -> Tensor:
    """What inputs of products are rounded to."""
    if recipe == "mxfp8":
        return meant(x, recipe)
    codes = []
    for block in x.float().split(128, -1):
        most = block.abs().amax(-1, keepdim=True).clamp(min=448 * 2.0**-126)
        top = torch.full_like(most, 448.0)
        codes.append((block * (top / most)).to(torch.float8_e4m3fn).float() * (most / top))
    return torch.cat(codes, -1).bfloat16()


def param(recipe: str, *batch: int) -> tuple[nn.Parameter, Tensor]:
    values = torch.randn(*batch, *SIZES[recipe], generator=torch.Generator().manual_seed(1)).bfloat16()
    return nn.Parameter(QuantizedTensor(Stored(RECIPES[recipe], values.clone()), values.device)), values


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_multiplies_what_codes_stand_for_and_its_weight_gradient_is_of_full_precision(
    recipe: str,
) -> None:
    weight, values = param(recipe)
    rows, cols = SIZES[recipe]
    x = torch.randn(3, 5, cols).bfloat16().requires_grad_()
    out = F.linear(x, weight, torch.ones(rows).bfloat16())
    assert torch.equal(out, rounded(x.detach(), recipe) @ meant(values, recipe).mT + 1)
    grad = torch.randn_like(out)
    out.backward(grad)
    assert torch.equal(x.grad, rounded(grad, recipe) @ meant(values.mT.contiguous(), recipe).mT)
    assert type(weight.grad) is Tensor
    assert torch.equal(weight.grad, grad.flatten(0, 1).mT @ x.detach().flatten(0, 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_stacks_are_read_whole_and_entry_by_entry(recipe: str) -> None:
    weight, values = param(recipe, 3)
    rows, cols = SIZES[recipe]
    x = torch.randn(3, 4, rows).bfloat16()
    seen, back = rounded(x, recipe), meant(values.mT.contiguous(), recipe)
    for product in (torch.bmm(x, weight), x @ weight, torch.matmul(x, weight)):
        assert torch.equal(product, seen @ back.mT)
    for number, entry in enumerate(weight.unbind()):
        assert torch.equal(x[0] @ entry, seen[0] @ back[number].mT)
        assert torch.equal(F.linear(x.new_ones(2, cols), weight[number]), F.linear(x.new_ones(2, cols), entry))
    (x[1] @ weight[-2]).sum().backward()
    assert weight.grad is not None
    assert weight.grad[1].abs().sum() > 0
    assert weight.grad[0].abs().sum() == weight.grad[2].abs().sum() == 0
    with pytest.raises(IndexError, match="out of bounds"):
        weight[3]


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight.detach().clone(),
        lambda weight: weight.float(),
        lambda weight: weight + 0,
        lambda weight: nn.ParameterDict({"w": weight}).state_dict()["w"] * 1,
        lambda weight: weight.flatten().view(64, 96),
        lambda weight: torch.cat([weight[:10], weight[10:]]),
        lambda weight: weight.t().t(),
    ],
)
def test_whatever_reads_it_sees_what_its_codes_stand_for(read: Callable[[Tensor], Tensor]) -> None:
    weight, values = param("mxfp8")
    assert torch.equal(read(weight).bfloat16(), meant(values, "mxfp8"))
    assert weight.dtype == torch.bfloat16
    assert weight.shape == values.shape


def test_gradients_pass_through_other_operations_as_if_nothing_was_rounded() -> None:
    weight, _ = param("mxfp8")
    (weight * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full(SIZES["mxfp8"], 3.0).bfloat16())


def test_writing_makes_codes_and_keeps_what_was_given() -> None:
    weight, values = param("mxfp8")
    stored = stored_of(weight)
    before = stored.writes
    with torch.no_grad():
        weight.copy_(values * 2)
        assert torch.equal(stored.given, values * 2)
        assert torch.equal(weight, meant(values * 2, "mxfp8"))
        weight.zero_()
        assert not weight.any()
        weight.add_(1.0)
        assert torch.equal(weight, torch.ones_like(values))
        nn.init.constant_(weight, 0.5)
        assert torch.equal(weight, torch.full_like(values, 0.5))
    assert stored.writes == before + 4
    assert weight._version == 4  # by which masters learn of it


def test_a_graph_of_before_is_refused_once_codes_are_new() -> None:
    weight, values = param("mxfp8")
    out = F.linear(torch.ones(2, 96).bfloat16(), weight)
    stored_of(weight).settle(values * 2)
    with pytest.raises(StateError, match="updated between forward and backward"):
        out.sum().backward()


@pytest.mark.parametrize("recipe", SIZES)
def test_an_expert_that_gets_no_tokens_has_a_gradient_of_zeros(recipe: str) -> None:
    weight, _ = param(recipe)
    rows, cols = SIZES[recipe]
    x = torch.zeros(0, cols, dtype=torch.bfloat16, requires_grad=True)
    out = F.linear(x, weight)
    assert out.shape == (0, rows)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, cols)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_input_that_is_not_bf16_is_refused_unless_autocast_says_otherwise(dtype: torch.dtype) -> None:
    weight, _ = param("mxfp8")
    x = torch.ones(2, 96, dtype=dtype)
    with pytest.raises(TypeError, match="expected bf16"):
        F.linear(x, weight)
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(TypeError, match="expected bf16"):
        F.linear(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, weight).dtype == torch.bfloat16


def test_copies_are_apart_and_what_is_pickled_is_a_plain_tensor() -> None:
    linear = layerwise.quantize(nn.Linear(96, 64, bias=False).bfloat16())
    copied = copy.deepcopy(linear)
    with torch.no_grad():
        copied.weight.zero_()
    assert linear.weight.any()
    assert not copied.weight.any()
    file = io.BytesIO()
    torch.save(linear.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["weight"]
    assert type(saved) is Tensor
    assert torch.equal(saved, linear.weight)


def test_a_master_has_nothing_to_begin_with_once_values_are_gone() -> None:
    linear = layerwise.quantize(nn.Linear(96, 64, bias=False).bfloat16())
    stored_of(linear.weight).take_given("weight")
    with pytest.raises(StateError, match="'weight' has codes and no values"):
        layerwise.DataParallel(linear)

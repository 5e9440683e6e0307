"""Quantised tensors of others as params: what they read as, what products make of them, and which cannot be trained."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise
from layerwise import quant
from layerwise.errors import StateError
from layerwise.kernels import foreign
from layerwise.kernels.foreign import Adopted
from layerwise.kernels.stored import QuantizedStorage, Stored, stored_of
from layerwise.kernels.torchao_mx import MXStorage
from layerwise.layout.recipes import RECIPES
from layerwise.models.quantized import QuantizedTensor
from layerwise.models.table import param_table
from tests.foreign import to_mx, with_mx_weights

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'layerwise[dev]'"
)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(values: Tensor, **how: Any) -> nn.Linear:
    """A linear layer whose weight is torchao's."""
    made = nn.Linear(values.shape[1], values.shape[0], bias=False, dtype=torch.bfloat16)
    made.weight = nn.Parameter(to_mx(values, **how), requires_grad=False)
    return made


@pytest.fixture
def registry() -> Iterator[None]:
    """Types that a test makes known are forgotten again."""
    before = dict(foreign._ADAPTERS)
    yield
    foreign._ADAPTERS.clear()
    foreign._ADAPTERS.update(before)


@pytest.mark.parametrize("how", [{}, {"mode": "rceil", "swizzled": True}, {"element": "float8_e5m2"}])
def test_forward_is_torchaos_own_and_gradients_are_of_what_its_codes_stand_for(how: dict[str, Any]) -> None:
    values = random(40, 96)  # rows need be no multiple of a block
    expected = to_mx(values, **how)
    weight = quant.adopt(layer(values, **how), {"weight": values}).weight
    assert weight.requires_grad
    assert (weight.dtype, weight.shape) == (torch.bfloat16, values.shape)
    x = random(3, 5, 96, seed=2).requires_grad_()
    out = F.linear(x, weight, torch.ones(40).bfloat16())
    with torch.no_grad():
        assert torch.equal(out, F.linear(x, expected) + 1)
    grad = random(*out.shape, seed=3)
    out.backward(grad)
    seen = expected.dequantize(torch.bfloat16)
    assert torch.equal(x.grad, grad.flatten(0, 1).matmul(seen).view_as(x))
    assert torch.equal(weight.grad, grad.flatten(0, 1).mT @ x.detach().flatten(0, 1))
    assert torch.equal(random(7, 40) @ weight, random(7, 40) @ seen)
    assert torch.equal(weight.float(), seen.float())


def test_what_the_tensor_was_is_rewritten_in_place_and_copies_are_apart() -> None:
    values, other = random(32, 64), random(32, 64, seed=2)
    module = layer(values)
    tensor = module.weight
    weight = quant.adopt(module, module_values := {"weight": values}).weight
    apart = copy.deepcopy(weight)
    with torch.no_grad():
        weight.copy_(other)
    assert torch.equal(tensor.qdata.view(torch.uint8), to_mx(other).qdata.view(torch.uint8))
    assert torch.equal(apart.detach() * 1, to_mx(values).dequantize(torch.bfloat16))
    assert torch.equal(module_values["weight"], random(32, 64))
    plain = pickle.loads(pickle.dumps(weight))
    assert type(plain) is nn.Parameter
    assert torch.equal(plain, weight.detach() * 1)
    torch.save(module.state_dict(), io.BytesIO())


def test_a_weight_that_moved_between_forward_and_backward_is_refused() -> None:
    weight = quant.adopt(layer(random(32, 64)), from_codes=True).weight
    out = F.linear(random(4, 64).requires_grad_(), weight)
    with torch.no_grad():
        weight.zero_()
    with pytest.raises((StateError, RuntimeError), match=r"updated between forward|modified by an inplace"):
        out.sum().backward()


def test_ours_has_all_of_the_protocol_and_trains_the_same_through_it() -> None:
    values = random(64, 96)
    mine, through = Stored(RECIPES["mxfp8"], values.clone()), Adopted(Stored(RECIPES["mxfp8"], values.clone()), values)
    assert isinstance(mine, QuantizedStorage)
    assert isinstance(through, QuantizedStorage)
    assert isinstance(MXStorage(to_mx(values)), QuantizedStorage)
    found = []
    for stored in (mine, through):
        weight = nn.Parameter(QuantizedTensor(stored, values.device))
        x = random(3, 4, 96, seed=4).requires_grad_()
        F.linear(x, weight).float().square().sum().backward()
        found.append((stored.name, stored.nbytes, x.grad, weight.grad))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(one, other) for one, other in zip(found[0][2:], found[1][2:], strict=True))


def test_tied_weights_stay_one_and_the_table_knows_their_bytes() -> None:
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).bfloat16()
    before = with_mx_weights(module)
    module[1].weight = module[0].weight
    quant.adopt(module, {"1.weight": before["0.weight"]})
    assert module[0].weight is module[1].weight
    (spec,) = param_table(module)
    assert spec.recipe == "torchao mx e4m3 of 32, floor scales"
    assert spec.codes_nbytes == 64 * 64 + 64 * 64 // 32


def test_codes_are_a_beginning_where_it_is_said() -> None:
    weight = quant.adopt(layer(random(32, 64)), from_codes=True).weight
    stored = stored_of(weight)
    assert stored is not None
    assert torch.equal(stored.take_given("weight"), to_mx(random(32, 64)).dequantize(torch.bfloat16))


# ------------------------------------------------------------------------------------------------ what is refused


def transposed() -> nn.Linear:
    made = layer(random(64, 64))
    made.weight = nn.Parameter(made.weight.detach().t(), requires_grad=False)
    return made


def without_inputs() -> nn.Linear:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    made = layer(random(32, 64))
    made.weight = nn.Parameter(MXTensor.to_mx(random(32, 64), torch.float8_e4m3fn), requires_grad=False)
    return made


def for_another_machine() -> nn.Linear:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.quantization.quantize_.common import KernelPreference

    made = layer(random(40, 64))
    inputs = QuantizeTensorToMXKwargs(kernel_preference=KernelPreference.EMULATED)
    tensor = MXTensor.to_mx(
        random(40, 64), torch.float8_e4m3fn, kernel_preference=KernelPreference.AUTO, act_quant_kwargs=inputs
    )
    made.weight = nn.Parameter(tensor, requires_grad=False)
    return made


def stack() -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(to_mx(random(2, 32, 64)), requires_grad=False)
    return made


def in_float() -> nn.Linear:
    made = layer(random(32, 64))
    made.weight = nn.Parameter(to_mx(random(32, 64).float()), requires_grad=False)
    return made


GIVEN = {"weight": random(32, 64)}
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "no values": (lambda: layer(random(32, 64)), {}, r"weight \(no values are given for it, .* or from_codes=True"),
    "values of others": (lambda: layer(random(32, 64, seed=7)), GIVEN, "its codes are not those"),
    "values in another shape": (lambda: layer(random(64, 32)), GIVEN, r"of shape \(32, 64\), expected .* \(64, 32\)"),
    "values in fp32": (lambda: layer(random(32, 64)), {"weight": random(32, 64).float()}, "is torch.float32"),
    "transposed": (transposed, {"weight": random(64, 64).t()}, "it is transposed"),
    "no act_quant_kwargs": (without_inputs, GIVEN, "it has no act_quant_kwargs"),
    "kernels that are not here": (
        for_another_machine,
        {"weight": random(40, 64)},
        "does not do here what training needs",
    ),
    "codes of four bits": (
        lambda: layer(random(32, 64), element="float4_e2m1fn_x2"),
        GIVEN,
        "its elements are torch.float4",
    ),
    "a stack": (stack, {"weight": random(2, 32, 64)}, r"it has shape \(2, 32, 64\), expected rows and columns"),
    "fp32": (in_float, GIVEN, "it reads as torch.float32"),
    "nothing to adopt": (lambda: nn.Linear(32, 32), {}, "Linear has no weight to adopt"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_by_name_and_left_as_it_was(name: str) -> None:
    made, values, said = REFUSED[name]
    module = made()
    weight = module.weight
    before = [getattr(weight, part).clone() for part in ("qdata", "scale") if hasattr(weight, part)]
    with pytest.raises(ValueError, match=said) as caught:
        quant.adopt(module, values)
    assert "weight" in str(caught.value)
    assert module.weight is weight
    after = [getattr(weight, part) for part in ("qdata", "scale") if hasattr(weight, part)]
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(before, after, strict=True)
    )


def test_codes_are_no_values() -> None:
    module = layer(random(32, 64))
    with pytest.raises(ValueError, match="what is given for it is a MXTensor, expected a plain tensor of bf16 values"):
        quant.adopt(module, module.state_dict())


def test_scales_that_other_rules_made_are_seen_in_the_codes() -> None:
    """The tensor does not say how its scales were rounded."""
    module = layer(random(32, 64), mode="rceil")
    module.weight.act_quant_kwargs.scaling_mode = to_mx(random(32, 64)).act_quant_kwargs.scaling_mode
    with pytest.raises(ValueError, match="or it was quantised by other rules"):
        quant.adopt(module, GIVEN)


def test_nobody_trains_them_before_they_are_adopted() -> None:
    for trainable in (False, True):
        module = nn.Sequential(layer(random(32, 64)))
        module[0].weight.requires_grad_(trainable)
        with pytest.raises(
            TypeError, match=r"param '0.weight' is a MXTensor, .* call layerwise.quant.adopt\(module, values\)"
        ):
            layerwise.DataParallel(module)
    rules = {"matrix": layerwise.Muon(lr=0.1), "other": layerwise.AdamW(lr=0.1)}
    with pytest.raises(TypeError, match=r"param '0.weight' is a MXTensor"):
        layerwise.Optimizer(module, **rules)
    quant.adopt(module, {"0.weight": random(32, 64)})
    with pytest.raises(ValueError, match=r"param '0.weight' is quantised .torchao mx"):
        layerwise.Optimizer(module, **rules)
    with pytest.raises(
        ValueError, match=r"param_gather='bf16' has codes made at use, and param '0.weight' has its own"
    ):
        layerwise.DataParallel(module, param_gather="bf16")
    with pytest.raises(ValueError, match=r"0.weight .it is quantised by torchao mx .* already"):
        layerwise.quantize(module)


class Halves(Tensor):
    """Somebody's tensor: bf16 values in halves of their own."""

    @staticmethod
    def __new__(cls, low: Tensor) -> Halves:
        made: Halves = Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.bfloat16, device=low.device)
        made.low = low
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["low"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Halves(args[0].low)


class HalvesStorage:
    name = "halves"

    def __init__(self, tensor: Halves) -> None:
        self.given: Tensor | None = None
        self.low, self.shape = tensor.low, tensor.shape

    @property
    def codes(self) -> tuple[Tensor, ...]:
        return (self.low,)

    def settle(self, values: Tensor) -> None:
        self.low.copy_(values)

    def read(self) -> Tensor:
        return self.low.bfloat16()

    def product(self, x: Tensor, *, by_rows: bool) -> Tensor:
        return x @ (self.read().mT if by_rows else self.read())


class Dithered(HalvesStorage):
    def settle(self, values: Tensor) -> None:
        self.low.copy_(values + torch.rand_like(values))


class KeepsValues(HalvesStorage):
    def __init__(self, tensor: Halves) -> None:
        super().__init__(tensor)
        self.given = random(32, 64)


def halves() -> nn.Linear:
    made = nn.Linear(64, 32, bias=False)
    made.weight = nn.Parameter(Halves(random(32, 64).to(torch.float8_e4m3fn)))
    return made


@pytest.mark.usefixtures("registry")
def test_other_types_are_refused_until_they_are_known_and_what_is_known_is_checked() -> None:
    with pytest.raises(
        TypeError, match=r"param '0.weight' is a Halves, .* layerwise.quant.register_quantized\(\) and call"
    ):
        layerwise.DataParallel(nn.Sequential(halves()))
    with pytest.raises(ValueError, match="has no weight to adopt"):
        quant.adopt(halves(), GIVEN)
    quant.register_quantized(Halves, lambda tensor: tensor)
    with pytest.raises(
        TypeError, match=r"adapter of Halves returned a Halves: expected all of layerwise.quant.QuantizedStorage"
    ):
        quant.adopt(halves(), GIVEN)
    quant.register_quantized(Halves, Dithered)
    with pytest.raises(ValueError, match="other codes of the same values"):
        quant.adopt(halves(), GIVEN)
    quant.register_quantized(Halves, HalvesStorage)
    weight = quant.adopt(halves(), GIVEN).weight
    assert torch.equal(weight.detach() * 1, random(32, 64).to(torch.float8_e4m3fn).bfloat16())


@pytest.mark.usefixtures("registry")
def test_values_that_a_type_has_kept_are_what_masters_begin_with_and_then_let_go_of() -> None:
    quant.register_quantized(Halves, KeepsValues)
    module = nn.Sequential(quant.adopt(halves()))
    stored = stored_of(module[0].weight)
    assert isinstance(stored, Adopted)
    assert stored.storage.given is not None
    model = layerwise.DataParallel(module)
    (shard,) = model.engine.storage.shards
    assert torch.equal(shard.master[: 32 * 64], random(32, 64).float().view(-1))
    assert stored.given is None
    assert stored.storage.given is None


@pytest.mark.parametrize("kind", [Tensor, nn.Parameter, int, "MXTensor"])
def test_only_types_of_tensors_of_their_own_can_be_made_known(kind: Any) -> None:
    with pytest.raises(TypeError, match="kind"):
        quant.register_quantized(kind, HalvesStorage)
    with pytest.raises(TypeError, match="adapter must be callable"):
        quant.register_quantized(Halves, None)  # type: ignore[arg-type]

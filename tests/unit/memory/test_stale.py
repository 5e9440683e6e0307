"""Reading a stale param brings it up to date first, whatever reads it; asking what it is does not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from layerwise.memory.stale import StaleGuard, StaleParam

OLD, NEW = 1.0, 2.0


class Scene:
    """A module whose params are old, and become new when they are asked for."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = nn.Linear(3, 3) if module is None else module
        self.params = list(self.module.parameters())
        self.guard = StaleGuard(self.params, self.ensure)
        self.asked = 0
        self._fill(OLD)
        self.guard.arm()

    def ensure(self) -> None:
        self.asked += 1
        self.guard.disarm()
        self._fill(NEW)

    def _fill(self, value: float) -> None:
        for param in self.params:
            param.data.fill_(value)

    @property
    def is_stale(self) -> bool:
        return any(isinstance(param, StaleParam) for param in self.params)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def saved(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


X = torch.ones(2, 3)
READS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda m: m(X),
    "a function": lambda m: F.linear(X, m.weight),
    "a keyword argument": lambda m: F.linear(input=X, weight=m.weight),
    "an operator": lambda m: X @ m.weight,
    "a reflected operator": lambda m: 1.0 - m.weight,
    "an aten operator": lambda m: torch.ops.aten.linear(X, m.weight),
    "an autograd function": lambda m: Own.apply(X, m.weight),
    "functional_call()": lambda m: functional_call(m, dict(m.named_parameters()), (X,)),
    "vmap() inside": lambda m: torch.func.vmap(lambda x: F.linear(x, m.weight))(X),
    "state_dict()": lambda m: m.state_dict()["weight"],
    "deepcopy of the module": lambda m: copy.deepcopy(m).weight,
    "deepcopy of the param": lambda m: copy.deepcopy(m.weight),
    "copy of the param": lambda m: copy.copy(m.weight),
    "pickle of the module": lambda m: pickle.loads(pickle.dumps(m)).weight,
    "pickle of the param": lambda m: pickle.loads(pickle.dumps(m.weight)),
    "torch.save of the module": lambda m: saved(m).weight,
    "torch.save of its state": lambda m: saved(m.state_dict())["weight"],
    "tolist()": lambda m: m.weight.tolist(),
    "item()": lambda m: m.weight[0, 0].item(),
    "iteration": lambda m: next(iter(m.weight)),
    "repr": lambda m: repr(m.weight),
    "format": lambda m: f"{m.weight}",
    ".data": lambda m: m.weight.data,
    "detach()": lambda m: m.weight.detach(),
    "a view": lambda m: m.weight.view(-1),
    ".T": lambda m: m.weight.T,
    "clone()": lambda m: m.weight.clone(),
    "a list": lambda m: torch.stack([m.weight, m.weight]),
    "foreach": lambda m: torch._foreach_mul([m.weight, m.bias], 1.0)[0],
    "a vector of all": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "as the source of a copy": lambda m: torch.zeros(3, 3).copy_(m.weight),
    "data_ptr()": lambda m: m.weight.data_ptr(),
    "its storage": lambda m: m.weight.untyped_storage(),
    "autograd": lambda m: torch.autograd.grad((m.weight * m.weight).sum(), m.weight)[0],
}


def values(found: Any) -> set[float]:
    """Numbers in what was read; nothing where it is no number."""
    if isinstance(found, Tensor):
        return set(found.detach().reshape(-1).tolist())
    if isinstance(found, list):
        return set().union(*map(values, found))
    return {found} if isinstance(found, float) else set()


@pytest.mark.parametrize("way", READS)
def test_a_read_comes_after_one_ensure(way: str) -> None:
    scene = Scene()
    found = READS[way](scene.module)  # type: ignore[arg-type]
    assert scene.asked == 1
    assert not scene.is_stale
    assert not isinstance(found, StaleParam)
    fresh = Scene()
    fresh.ensure()
    assert values(found) == values(READS[way](fresh.module))  # type: ignore[arg-type]
    READS[way](scene.module)  # type: ignore[arg-type]
    assert scene.asked == 1, "a fresh param asks nobody"


def test_a_copy_of_a_stale_module_is_an_ordinary_module() -> None:
    scene = Scene()
    twin = copy.deepcopy(scene.module)
    assert [type(param) for param in twin.parameters()] == [nn.Parameter, nn.Parameter]
    scene.guard.arm()
    twin.weight.sum()
    assert scene.asked == 1, "a copy has nothing to do with the original's bucket"


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "add_()": lambda m: m.weight.add_(1.0),
    "copy_()": lambda m: m.weight.copy_(torch.full((3, 3), NEW + 1.0)),
    "an item": lambda m: m.weight.__setitem__(slice(None), NEW + 1.0),
    "out=": lambda m: torch.add(torch.full((3, 3), NEW), 1.0, out=m.weight),
    "nn.init": lambda m: nn.init.constant_(m.weight, NEW + 1.0),
    "foreach": lambda m: torch._foreach_add_([m.weight, m.bias], 1.0),
    "load_state_dict()": lambda m: m.load_state_dict({"weight": torch.full((3, 3), NEW + 1.0), "bias": torch.ones(3)}),
    ".data": lambda m: m.weight.data.fill_(NEW + 1.0),
}


@pytest.mark.parametrize("way", WRITES)
@torch.no_grad()
def test_a_write_is_not_lost_when_new_values_arrive(way: str) -> None:
    scene = Scene()
    WRITES[way](scene.module)  # type: ignore[arg-type]
    assert scene.asked == 1
    assert values(scene.params[0]) == {NEW + 1.0}


def set_and_forget(m: nn.Linear) -> None:
    m.weight.grad = torch.ones(3, 3)
    assert m.weight.grad is not None
    del m.weight.grad


HARMLESS: dict[str, Callable[[nn.Linear], Any]] = {
    "shape": lambda m: (
        m.weight.shape,
        m.weight.size(),
        m.weight.size(0),
        m.weight.ndim,
        m.weight.dim(),
        len(m.weight),
    ),
    "numel": lambda m: (m.weight.numel(), m.weight.nelement(), m.weight.nbytes, m.weight.itemsize),
    "strides": lambda m: (m.weight.stride(), m.weight.is_contiguous(), m.weight.storage_offset()),
    "dtype": lambda m: (
        m.weight.dtype,
        m.weight.device,
        m.weight.layout,
        m.weight.is_floating_point(),
        m.weight.is_cuda,
    ),
    "grad": lambda m: (m.weight.grad, m.weight.is_leaf, m.weight.grad_fn, m.weight._version),
    "setting and deleting .grad": set_and_forget,
    "zero_grad": lambda m: m.zero_grad(),
    "requires_grad": lambda m: (m.weight.requires_grad, m.requires_grad_(False), m.requires_grad_(True)),
    "hooks": lambda m: (m.weight.register_hook(lambda grad: grad), m.weight.register_post_accumulate_grad_hook(print)),
    "as a key": lambda m: dict.fromkeys(m.parameters(), 1)[m.weight],
    "is it a param": lambda m: (isinstance(m.weight, nn.Parameter), torch.is_tensor(m.weight)),
    "the module's repr": repr,
    "an optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1.0).zero_grad(),
    "clipping": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "an attribute of the user's": lambda m: (setattr(m.weight, "tag", 3), m.weight.tag),
}


@pytest.mark.parametrize("way", HARMLESS)
def test_what_needs_no_values_waits_for_nothing(way: str) -> None:
    scene = Scene()
    HARMLESS[way](scene.module)  # type: ignore[arg-type]
    assert scene.asked == 0
    assert all(isinstance(param, StaleParam) for param in scene.params)


def test_questions_have_the_answers_of_a_fresh_param() -> None:
    scene, fresh = Scene(), Scene()
    fresh.guard.disarm()
    for way in ("shape", "numel", "strides", "dtype", "requires_grad"):
        stale, expected = (HARMLESS[way](one.module) for one in (scene, fresh))  # type: ignore[arg-type]
        if way != "requires_grad":
            assert stale == expected


def test_params_of_one_bucket_are_asked_for_once() -> None:
    scene = Scene()
    torch.cat([scene.params[0].reshape(-1), scene.params[1]])
    assert scene.asked == 1


def test_params_of_two_buckets_in_one_call_are_both_asked_for() -> None:
    one, other = Scene(), Scene()
    assert values(torch.stack([one.params[0], other.params[0]])) == {NEW}
    one.guard.arm()
    other.guard.arm()
    assert values(F.linear(X, one.params[0], other.params[1])) == {3 * NEW + NEW}
    assert (one.asked, other.asked) == (2, 2)


def test_an_lstm_reads_its_flat_weights() -> None:
    scene = Scene(nn.LSTM(3, 3))
    out, _ = scene.module(torch.ones(1, 1, 3))
    assert scene.asked == 1
    fresh = Scene(nn.LSTM(3, 3))
    fresh.ensure()
    assert torch.equal(out, fresh.module(torch.ones(1, 1, 3))[0])


def test_attention_reads_what_it_hands_on() -> None:
    torch.manual_seed(0)
    scene = Scene(nn.MultiheadAttention(4, 2))
    x = torch.ones(3, 1, 4)
    with torch.no_grad():
        out = scene.module.eval()(x, x, x, need_weights=False)[0]
    assert scene.asked == 1
    assert torch.equal(out, scene.module(x, x, x, need_weights=False)[0])


def test_a_reference_from_before_is_guarded() -> None:
    scene = Scene()
    scene.guard.disarm()
    kept = scene.module.weight
    scene.guard.arm()
    assert values(kept.detach()) == {NEW}


def test_the_guard_can_be_armed_again_and_again() -> None:
    scene = Scene()
    for times in (1, 2, 3):
        scene.module(X)
        assert scene.asked == times
        assert [type(param) for param in scene.params] == [nn.Parameter, nn.Parameter]
        scene.guard.arm()
        scene.guard.arm()


class Tagged(nn.Parameter):
    """A param class with ideas of its own."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tagged.made, (self.tolist(),)

    @staticmethod
    def made(found: list[Any]) -> Tagged:
        return Tagged(torch.tensor(found))


def tagged() -> nn.Linear:
    module = nn.Linear(3, 3, bias=False)
    module.weight = Tagged(torch.zeros(3, 3))
    return module


def test_a_class_of_the_users_own_comes_back() -> None:
    scene = Scene(tagged())
    assert type(scene.params[0]).__name__ == "StaleTagged"
    assert isinstance(scene.params[0], Tagged)
    scene.module(X)
    assert type(scene.params[0]) is Tagged
    for way in ("deepcopy of the param", "pickle of the param"):
        scene.guard.arm()
        found = READS[way](scene.module)  # type: ignore[arg-type]
        assert type(found) is Tagged
        assert values(found) == {NEW}


def test_a_class_of_the_users_own_sees_the_read_that_waited() -> None:
    scene = Scene(tagged())
    Tagged.calls.clear()
    F.linear(X, scene.params[0])
    assert Tagged.calls[-1] == "linear"


class Marked(Tensor):
    """A tensor whose results are marked too, as torch has it for subclasses."""


def test_another_class_among_the_arguments_has_its_say_in_the_read_that_waited() -> None:
    scene = Scene()
    found = F.linear(X.as_subclass(Marked), scene.params[0])
    assert scene.asked == 1
    assert type(found) is Marked
    assert values(found.as_subclass(Tensor)) == {3 * NEW}


def test_nested_arguments_are_looked_into() -> None:
    scene = Scene()
    seen: list[Tensor] = []

    def nested(groups: dict[str, list[tuple[Tensor, ...]]]) -> None:
        seen.append(groups["all"][0][0])

    StaleParam.__torch_function__(nested, (), ({"all": [(scene.params[0],)]},))
    assert scene.asked == 1
    assert values(seen[0]) == {NEW}


def test_an_error_while_waiting_leaves_the_guard_in_place() -> None:
    module = nn.Linear(3, 3)

    def fail() -> None:
        raise RuntimeError("no network")

    guard = StaleGuard(list(module.parameters()), fail)
    guard.arm()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no network"):
            module(X)
    assert isinstance(module.weight, StaleParam)

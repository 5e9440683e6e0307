from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import layerwise
from layerwise.errors import StateError
from tests.worlds import Net, hash_tensors, net_loss


def optimizer_of(model: nn.Module, **more: Any) -> layerwise.Optimizer:
    return layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.01), **more)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        net_loss(model, 0, step).backward()
        optimizer.step()


def hooks_of(module: nn.Module) -> list[Any]:
    return [
        *(hook for child in module.modules() for hook in child._forward_pre_hooks.values()),
        *(hook for child in module.modules() for hook in child._forward_hooks.values()),
        *(hook for param in module.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()),
    ]


@pytest.mark.parametrize("overlap", [True, False])
def test_an_unwrapped_module_is_as_it_was_with_the_weights_of_now(overlap: bool) -> None:
    module = Net()
    model = layerwise.DataParallel(module, overlap_param_gather=overlap)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    expected = hash_tensors([param.detach() for param in module.parameters()])
    net_loss(model, 0, 5).backward()  # gradients that nobody will take
    assert model.unwrap() is module
    assert hash_tensors([param.detach() for param in module.parameters()]) == expected
    assert {type(param) for param in module.parameters()} == {nn.Parameter}
    assert hooks_of(module) == []
    storages = {param.untyped_storage().data_ptr(): param.untyped_storage().nbytes() for param in module.parameters()}
    assert sum(storages.values()) == sum(param.nbytes for param in module.parameters())
    pickle.dumps(module)
    net_loss(module, 0, 0).backward()
    assert all(param.grad is not None for param in module.parameters())
    module.zero_grad()
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, plain, 1)


def test_after_unwrap_the_wrapper_and_its_optimizer_say_so() -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    model.unwrap()
    for use in (
        lambda: model(torch.ones(1, 6)),
        optimizer.step,
        optimizer.state_dict,
        model.unwrap,
        lambda: optimizer_of(model),
    ):
        with pytest.raises(StateError, match=r"was unwrapped.*Wrap the module anew"):
            use()


def test_an_unwrapped_module_is_wrapped_again_and_trains_as_a_new_one_would() -> None:
    module = Net()
    model = layerwise.DataParallel(module)
    train(model, optimizer_of(model))
    fresh = copy.deepcopy(model.unwrap())
    results = []
    for one in (module, fresh):
        again = layerwise.DataParallel(one)
        train(again, optimizer_of(again), 3)
        results.append(hash_tensors([param.detach() for param in one.parameters()]))
    assert results[0] == results[1]


def sweep(module: nn.Module, lr: float) -> float:
    model = layerwise.DataParallel(module)
    optimizer = optimizer_of(model)
    schedule = LambdaLR(optimizer, lambda step: lr)  # holds the optimizer in a cycle
    train(model, optimizer)
    schedule.step()
    return float(net_loss(model, 0, 9).detach())


def test_a_module_whose_wrapper_is_gone_is_wrapped_again() -> None:
    module = Net()
    start = copy.deepcopy(module.state_dict())
    first = sweep(module, 0.1)
    module.load_state_dict(start)
    assert sweep(module, 0.1) == first  # momenta and moments of before are gone too


def test_a_wrapper_that_is_gone_leaves_no_hooks() -> None:
    module = Net()
    sweep(module, 0.1)
    gc.collect()
    assert hooks_of(module) == []


def test_a_module_whose_wrapper_is_there_is_refused_with_what_to_do() -> None:
    module = Net()
    model = layerwise.DataParallel(module)
    with pytest.raises(StateError, match=r"'first.weight' lies in the buffers.*call unwrap\(\)"):
        layerwise.DataParallel(module)
    del model
    layerwise.DataParallel(module)


def test_a_model_whose_optimizer_is_gone_gets_another_which_starts_from_nothing() -> None:
    def run(model: layerwise.DataParallel) -> list[bytes]:
        train(model, optimizer_of(model), 3)
        return hash_tensors([param.detach() for param in model.parameters()])

    module = Net()
    start = copy.deepcopy(module.state_dict())
    model = layerwise.DataParallel(module)
    first = run(model)
    module.load_state_dict(start)
    assert run(model) == first


def test_qk_clip_leaves_its_modules_with_the_wrapper() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def attention_heads(self) -> layerwise.AttentionHeads:
            return layerwise.AttentionHeads.grouped(query="query", key="key", n_heads=2, head_dim=4)

        def forward(self, x: Tensor) -> Tensor:
            heads = [part(x).unflatten(-1, (2, 4)).transpose(0, 1) for part in (self.query, self.key, self.value)]
            return torch.nn.functional.scaled_dot_product_attention(*heads)

    module = Attention()
    model = layerwise.DataParallel(module)
    optimizer = optimizer_of(model, qk_clip=layerwise.QKClip(threshold=1.0))
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert optimizer.stats.max_logit is not None
    model.unwrap()
    assert hooks_of(module) == []
    assert not hasattr(module, "_layerwise_logits")


# -- what saves and moves weights --------------------------------------------------------------------


def size_of(found: object) -> int:
    file = io.BytesIO()
    torch.save(found, file)
    return len(file.getvalue())


def test_one_layer_of_a_wrapped_model_saves_as_small_as_it_is() -> None:
    model = layerwise.DataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    alone = size_of(nn.Linear(64, 64).state_dict())
    assert size_of(model.module[0].state_dict()) <= alone + 64
    assert size_of(model.module[0].weight) <= alone + 64


def test_safetensors_saves_and_loads_a_wrapped_module(tmp_path: Any) -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    train(model, optimizer)
    save_model(model.module, tmp_path / "net.safetensors")
    other = layerwise.DataParallel(Net())
    continued = optimizer_of(other)
    load_model(other.module, tmp_path / "net.safetensors")
    assert hash_tensors(list(other.module.state_dict().values())) == hash_tensors(
        list(model.module.state_dict().values())
    )
    train(other, continued, 1)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("cpu"),
        lambda model: model.to("cpu:0"),
        lambda model: model.float(),
        lambda model: model.cpu(),
    ],
)
def test_moving_a_model_to_where_it_is_changes_nothing(move: Any) -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    assert move(model) is model
    train(model, optimizer)


@pytest.mark.parametrize(
    ("move", "found"),
    [
        (lambda model: model.to("meta"), "torch.float32 on meta"),
        (lambda model: model.half(), "torch.float16 on cpu"),
        (lambda model: model.bfloat16(), "torch.bfloat16 on cpu"),
    ],
)
def test_moving_a_model_elsewhere_is_refused_in_words(move: Any, found: str) -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    with pytest.raises(StateError, match=f"'first.weight' is torch.float32 on cpu and would become {found}"):
        move(model)
    train(model, optimizer)


def test_sharing_a_wrapped_model_with_other_processes_is_refused_in_words() -> None:
    with pytest.raises(StateError, match=r"copy.deepcopy\(model.module\).share_memory\(\)"):
        layerwise.DataParallel(Net()).share_memory()


def test_forward_has_the_modules_signature() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, input_ids: Tensor, *, labels: Tensor | None = None) -> Tensor:
            return self.layer(input_ids)

    for module in (Named(), torch.compile(Named(), backend="eager")):
        model = layerwise.DataParallel(module)
        assert list(inspect.signature(model.forward).parameters) == ["input_ids", "labels"]
        assert model(input_ids=torch.ones(1, 4), labels=None).shape == (1, 4)


def test_accelerate_is_told_that_there_is_nothing_to_wrap() -> None:
    assert layerwise.DataParallel(Net())._is_accelerate_prepared


def test_params_that_are_shared_with_another_process_are_noticed() -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    ForkingPickler.dumps(model.module.state_dict())  # what a queue of torch.multiprocessing does
    net_loss(model, 0, 1).backward()
    with pytest.raises(StateError, match=r"was moved out of its buffer .* send clones to other processes"):
        optimizer.step()


def test_an_unwrapped_model_is_neither_clipped_nor_loaded() -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    module = model.unwrap()
    for action in (lambda: model.clip_grad_norm_(1.0), lambda: optimizer.load_state_dict(state)):
        with pytest.raises(StateError, match="was unwrapped"):
            action()
    assert {type(param) for param in module.parameters()} == {nn.Parameter}


def test_a_subclass_has_a_forward_of_its_own() -> None:
    class Doubled(layerwise.DataParallel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)  # type: ignore[operator]

    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    assert torch.equal(Doubled(module)(x), 2 * module(x))


def test_a_clipping_goes_with_the_gradients_it_was_for() -> None:
    model = layerwise.DataParallel(Net())
    optimizer = optimizer_of(model)
    for forget in (optimizer.zero_grad, model.zero_grad, model.module.zero_grad):
        net_loss(model, 0, 0).backward()
        model.clip_grad_norm_(1e-3)
        forget()
        net_loss(model, 0, 1).backward()
        optimizer.step()
        assert set(optimizer.stats.clip_coefficients.values()) == {1.0}

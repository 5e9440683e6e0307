"""What users of torch's optimizers are used to: hooks, default devices, weights that are tied, modules that are not ready yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import layerwise
from layerwise.errors import NonFiniteError, StateError

WRAPS = pytest.mark.parametrize("wrap", [lambda module: module, layerwise.DataParallel], ids=["plain", "DataParallel"])
Wrap = Callable[[nn.Module], nn.Module]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def optimizer_of(model: nn.Module, **more: Any) -> layerwise.Optimizer:
    return layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1), **more)


def train(model: nn.Module, optimizer: layerwise.Optimizer, x: torch.Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@WRAPS
def test_hooks_of_loading_run_and_may_replace_what_is_loaded(wrap: Wrap) -> None:
    model = wrap(build())
    optimizer = optimizer_of(model)
    train(model, optimizer, torch.ones(2, 8))
    kept = optimizer.state_dict()
    assert isinstance(kept["param_groups"], list)
    calls: list[str] = []

    def replaced(hooked: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        calls.append(f"before, lr {state_dict['param_groups'][0]['lr']}")
        first, *others = state_dict["param_groups"]
        state_dict["param_groups"] = [{**first, "lr": 0.5}, *others]
        return state_dict

    def seen(hooked: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        calls.append(f"before, lr {state_dict['param_groups'][0]['lr']}")

    optimizer.register_load_state_dict_pre_hook(replaced)
    optimizer.register_load_state_dict_pre_hook(seen)
    optimizer.register_load_state_dict_post_hook(
        lambda hooked: calls.append(f"after, lr {hooked.param_groups[0]['lr']}")
    )
    optimizer.load_state_dict(kept)
    assert calls == ["before, lr 0.1", "before, lr 0.5", "after, lr 0.5"]
    assert kept["param_groups"][0]["lr"] == 0.1  # the user's own is as it was


@WRAPS
def test_a_default_device_is_the_users(tmp_path: Path, wrap: Wrap) -> None:
    """As of who has set_default_device("cuda"), and a model, or a part of our work, on the CPU."""
    module, x = build(), torch.ones(2, 8)
    torch.set_default_device("meta")
    try:
        model = wrap(module)
        optimizer = optimizer_of(model, clip_grad_norm=1.0, count_zeros=True)
        train(model, optimizer, x)
        layerwise.save(tmp_path / "one", model, optimizer)
        train(model, optimizer, x)
        layerwise.load(tmp_path / "one", model, optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.stats.grad_norm > 0
    finally:
        torch.set_default_device(None)  # not "cpu", which would stay as a mode that sees every call
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert optimizer.state_dict()["layerwise"]["step"] == 2  # type: ignore[index]


@WRAPS
def test_weights_that_share_memory_and_are_two_params_are_refused(wrap: Wrap) -> None:
    for seen in (lambda weight: weight, torch.t):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight.data = seen(module[0].weight.data)
        with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' lie in the same memory and are two params"):
            optimizer_of(wrap(module))
    module[1].weight = module[0].weight
    model = wrap(module)
    train(model, optimizer_of(model), torch.ones(2, 4))
    assert module[0].weight is module[1].weight


@WRAPS
def test_parts_of_one_tensor_are_params_of_their_own(wrap: Wrap) -> None:
    flat = torch.randn(32)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(module, flat.split(16), strict=True):
        layer.weight.data = part.view(4, 4)
    model = wrap(module)
    train(model, optimizer_of(model), torch.ones(2, 4))


@WRAPS
def test_what_cannot_be_trained_yet_is_named(wrap: Wrap) -> None:
    with pytest.raises(ValueError, match=r"param '0.weight' has no shape yet \(LazyLinear\): run a batch"):
        optimizer_of(wrap(nn.Sequential(nn.LazyLinear(4))))
    with torch.inference_mode():
        made = nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"within torch.inference_mode\(\)"):
            optimizer_of(wrap(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match=r"param 'weight' was made within torch.inference_mode\(\)"):
        optimizer_of(wrap(made))


def test_a_step_that_is_refused_leaves_gradients_where_they_are() -> None:
    """Of a plain module, whose `.grad` is the user's: to be looked at, and for the step that is right."""
    module, x = build(), torch.ones(2, 8)
    optimizer = optimizer_of(module, gradient_policy=layerwise.GradientPolicy(nonfinite="raise"))
    (module(x).sum() * float("nan")).backward()
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert all(param.grad is not None and param.grad.isnan().any() for param in module.parameters())
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.param_groups[0]["lr"], right = -1.0, optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = right
    before = [param.detach().clone() for param in module.parameters()]
    optimizer.step()
    assert not optimizer.stats.skipped
    assert not any(map(torch.equal, before, module.parameters()))
    assert all(param.grad is None for param in module.parameters())


def _swaps(optimizer: layerwise.Optimizer) -> None:
    groups = optimizer.param_groups
    groups[0], groups[1] = groups[1], groups[0]


def _takes_one_out(optimizer: layerwise.Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


def _swaps_two_params(optimizer: layerwise.Optimizer) -> None:
    params = optimizer.param_groups[0]["params"]
    params[0], params[1] = params[1], params[0]


def _removes(optimizer: layerwise.Optimizer) -> None:
    optimizer.param_groups.pop()


def _renames_a_rule(optimizer: layerwise.Optimizer) -> None:
    optimizer.param_groups[1]["rule"] = "nope"


@WRAPS
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_swaps, r"param groups are other \(adamw\), matrix \(muon\), and were matrix \(muon\), other \(adamw\)"),
        (
            _takes_one_out,
            r"the params of group matrix \(muon\) were changed after construction: expected the 2 that it had",
        ),
        (_swaps_two_params, r"expected the 2 that it had, in their order"),
        (_removes, r"param groups are matrix \(muon\), and were"),
        (_renames_a_rule, r"param groups are matrix \(muon\), other \(nope\), and were"),
    ],
)
def test_param_groups_that_were_rearranged_are_refused(
    wrap: Wrap, change: Callable[[layerwise.Optimizer], None], said: str
) -> None:
    model, x = wrap(build()), torch.ones(2, 8)
    optimizer = optimizer_of(model)
    before = [param.detach().clone() for param in model.parameters()]
    change(optimizer)
    model(x).square().sum().backward()
    with pytest.raises(StateError, match=said):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@WRAPS
def test_state_that_was_replaced_is_refused_and_state_that_was_written_counts(wrap: Wrap) -> None:
    model, x = wrap(build()), torch.ones(2, 8)
    optimizer = optimizer_of(model)
    train(model, optimizer, x)
    kept = optimizer.state_dict()
    first = next(iter(model.parameters()))
    own = optimizer.state[first]["momentum"]
    own.zero_()
    assert not optimizer.state_dict()["state"][0]["momentum"].any()  # type: ignore[index]
    optimizer.state[first]["momentum"] = torch.zeros_like(own)
    for refused in (optimizer.state_dict, lambda: optimizer.load_state_dict(kept)):
        with pytest.raises(StateError, match=r"state 'momentum' of param '0.weight' was replaced or removed"):
            refused()

    def steps_are_refused() -> None:
        model(x).square().sum().backward()
        with pytest.raises(StateError, match=r"state 'momentum' of param '0.weight' was replaced or removed"):
            optimizer.step()
        optimizer.zero_grad()

    steps_are_refused()
    optimizer.state[first]["momentum"] = own
    optimizer.load_state_dict(kept)
    train(model, optimizer, x)
    optimizer.state[first] = {**optimizer.state[first], "momentum": own.clone()}
    steps_are_refused()
    optimizer.state.clear()
    steps_are_refused()


def test_a_refused_step_is_taken_once_its_cause_is_gone_also_with_a_scaled_loss() -> None:
    module, x = build(), torch.ones(2, 8)
    optimizer = optimizer_of(module, loss_scale=layerwise.LossScale())
    optimizer.scale_loss(module(x).square().sum()).backward()
    optimizer.param_groups[0]["lr"], right = -1.0, optimizer.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = right
    before = module[0].weight.detach().clone()  # type: ignore[index]
    optimizer.step()
    assert not optimizer.stats.skipped
    assert not torch.equal(before, module[0].weight)  # type: ignore[index]


def test_clipping_twice_is_clipping_to_the_smaller_norm() -> None:
    model, x = layerwise.DataParallel(build()), torch.ones(2, 8)
    optimizer = optimizer_of(model)
    for bounds in ((0.01, 0.05), (0.05, 0.01), (0.01,)):
        model(x).square().sum().backward()
        for bound in bounds:
            model.clip_grad_norm_(bound)
        optimizer.step()
        stats = optimizer.stats
        assert list(stats.clip_coefficients.values()) == pytest.approx([0.01 / stats.grad_norm] * 2, rel=1e-3)
        optimizer.zero_grad()


@WRAPS
def test_param_groups_have_torchs_names_of_params_and_states_without_them_load(wrap: Wrap) -> None:
    model = wrap(build())
    optimizer = optimizer_of(model)
    names = {id(param): name for name, param in build_names(model).items()}
    for group in optimizer.param_groups:
        assert group["param_names"] == [names[id(param)] for param in group["params"]]
    train(model, optimizer, torch.ones(2, 8))
    state: Any = optimizer.state_dict()
    assert [group["param_names"] for group in state["param_groups"]] == [
        group["param_names"] for group in optimizer.param_groups
    ]
    for group in state["param_groups"]:  # as it was before there were names
        del group["param_names"]
    optimizer.load_state_dict(state)
    assert all("param_names" in group for group in optimizer.param_groups)


def build_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Params by the names of the module inside."""
    return dict((model.module if isinstance(model, layerwise.DataParallel) else model).named_parameters())


def test_a_state_dict_of_an_earlier_version_is_loaded_without_the_options_that_are_gone() -> None:
    optimizer, x = optimizer_of(module := build()), torch.ones(2, 8)
    train(module, optimizer, x)
    kept = optimizer.state_dict()
    for group in kept["param_groups"]:  # type: ignore[attr-defined]
        group["method"] = "auto"
    optimizer.load_state_dict(kept)
    assert not any("method" in group for group in optimizer.param_groups)
    train(module, optimizer, x)

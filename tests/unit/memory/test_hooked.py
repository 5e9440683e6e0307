from __future__ import annotations

import copy
import io
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import layerwise
from layerwise.errors import StateError
from tests import seams
from tests.worlds import Net, hash_tensors, net_loss


def trained(**more: Any) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    torch.manual_seed(3)
    model = seams.data_parallel(Net(), **more)
    return model, layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.01))


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: clip_grad_norm_(model.parameters(), 1.0),
        lambda model: clip_grad_norm_(list(model.module.parameters()), 1.0),
        lambda model: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.ones(())),
    ],
)
def test_torchs_functions_that_clip_are_answered_once_with_what_to_call(ask: Any) -> None:
    model, _ = trained()
    net_loss(model, 0, 0).backward()
    with pytest.warns(UserWarning, match=r"model\.clip_grad_norm_\(max_norm\)") as seen:
        ask(model)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ask(model)


def test_nobody_is_warned_where_there_is_nothing_to_clip() -> None:
    model, _ = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clip_grad_norm_(model.parameters(), 1.0)
        assert all(param.grad is None for param in model.parameters())
        net_loss(model, 0, 0).backward()
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        clip_grad_norm_(other.parameters(), 1.0)
        get_total_norm([param.grad for param in other.parameters()])


def sharpened(model: nn.Module) -> None:
    """The first half of a sharpness-aware step, as it is written everywhere."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is None:
                continue
            param.add_(param.grad, alpha=0.05)


def test_other_readers_of_grad_are_told_once_by_name_where_it_is() -> None:
    model, optimizer = trained()
    net_loss(model, 0, 0).backward()
    with pytest.warns(
        UserWarning, match=r"the \.grad of param 'first.weight' was read between backward and step"
    ) as seen:
        sharpened(model)
    assert seen[0].filename == __file__
    assert "optimizer.stats.grad_norm" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharpened(model)
        optimizer.step()
        net_loss(model, 0, 1).backward()
        sharpened(model)


def test_ordinary_loops_are_told_nothing() -> None:
    """Also with a scheduler, another optimizer of torch beside ours, and copies of the module."""
    model, optimizer = trained(overlap_param_gather=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            assert all(param.grad is None for param in model.parameters())  # nothing was delivered
            with model.no_sync():
                net_loss(model, 0, step).backward()
            net_loss(model, 0, step, 1).backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            averaged.update_parameters(model.module)
            copy.deepcopy(model.module)
            [optimizer, model, model.module][step].zero_grad()
        net_loss(model, 0, 0).backward()
        model.module.zero_grad()


def test_a_schedule_that_would_divide_gradients_is_told_what_to_pass() -> None:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    model, _ = trained()
    stage = SimpleNamespace(submod=model.module)
    _PipelineStageBase.scale_grads(stage, 4)  # type: ignore[arg-type]  # there are no gradients yet
    net_loss(model, 0, 0).backward()
    _PipelineStageBase.scale_grads(stage, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Pass scale_grads=False to the schedule, and divide the loss"):
        _PipelineStageBase.scale_grads(stage, 4)  # type: ignore[arg-type]


def step_after(forget: Any) -> list[bytes]:
    """Weights after a step with the gradients of a second backward, the first being forgotten."""
    model, optimizer = trained()
    net_loss(model, 0, 0).backward()
    forget(model, optimizer)
    net_loss(model, 0, 1).backward()
    optimizer.step()
    return hash_tensors([param.detach() for param in model.parameters()])


def test_zero_grad_of_the_module_forgets_as_that_of_the_model_and_of_the_optimizer_does() -> None:
    expected = step_after(lambda model, optimizer: optimizer.zero_grad())
    holder = nn.ModuleList()

    def set_to_none(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> None:
        for param in model.parameters():
            param.grad = None

    def within_another(model: layerwise.DataParallel, optimizer: layerwise.Optimizer) -> None:
        holder.append(model)
        holder.zero_grad()

    assert step_after(lambda model, optimizer: model.zero_grad()) == expected
    assert step_after(lambda model, optimizer: model.module.zero_grad()) == expected
    assert step_after(lambda model, optimizer: model.module.zero_grad(set_to_none=False)) == expected
    assert step_after(within_another) == expected
    assert step_after(set_to_none) == expected
    assert step_after(lambda model, optimizer: None) != expected


def test_zero_grad_of_the_module_leaves_nothing_to_step_with() -> None:
    model, optimizer = trained()
    net_loss(model, 0, 0).backward()
    model.module.zero_grad()
    with pytest.warns(UserWarning, match="no param has a gradient"):
        optimizer.step()
    assert optimizer.stats.skipped


def test_zero_grad_of_a_part_is_refused_by_name() -> None:
    model, optimizer = trained()
    net_loss(model, 0, 0).backward()
    model.module.first.zero_grad()
    with pytest.raises(StateError, match=r"zero_grad\(\) was called on a part.*'last.weight'.*call zero_grad\(\) of"):
        optimizer.step()
    net_loss(model, 0, 1).backward()
    optimizer.step()  # the error forgot all of it


def test_a_part_without_gradients_may_be_told_to_forget_them() -> None:
    model, optimizer = trained()
    model.module.first.zero_grad()
    net_loss(model, 0, 0).backward()
    optimizer.step()
    assert not optimizer.stats.skipped


def test_copies_and_pickles_of_a_hooked_param_are_plain_and_keep_their_gradients() -> None:
    model, _ = trained()
    copied = copy.deepcopy(model.module)
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        assert {type(param) for param in other.parameters()} == {nn.Parameter}
        net_loss(other, 0, 0).backward()
        assert all(param.grad is not None for param in other.parameters())
        assert clip_grad_norm_(other.parameters(), 1.0) > 0


def test_zero_grad_of_a_module_in_a_compiled_function_forgets_gradients() -> None:
    torch._dynamo.reset()
    model = layerwise.DataParallel(nn.Linear(4, 4))

    def discard(x: torch.Tensor) -> None:
        model(x).sum().backward()
        model.module.zero_grad()

    torch.compile(discard, backend="eager")(torch.ones(2, 4))
    assert not model.engine.reducer.has_gradients


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Muon])
def test_another_optimizer_over_wrapped_params_is_told_once_that_it_steps_nothing(kind: Any) -> None:
    model, _ = trained()
    other = kind([param for param in model.parameters() if param.ndim == 2], lr=0.1)
    before = hash_tensors(model.module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.zero_grad()
    net_loss(model, 0, 0).backward()
    with pytest.warns(UserWarning, match=rf"\.{kind.__name__} holds 'first\.weight', a param of a layerwise") as seen:
        other.step()
    assert seen[0].filename == __file__
    assert "layerwise.Optimizer(model" in str(seen[0].message)
    assert hash_tensors(model.module.parameters()) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.step()


def test_another_optimizer_of_params_that_are_not_ours_is_left_alone() -> None:
    torch.manual_seed(3)
    module = Net()
    module.last.requires_grad_(False)
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.01))
    module.last.requires_grad_(True)
    theirs = torch.optim.SGD(module.last.parameters(), lr=0.1)
    before = module.last.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net_loss(model, 0, 0).backward()
        theirs.step()
        module.last.requires_grad_(False)
        optimizer.step()
    assert not torch.equal(module.last.weight, before)


@pytest.mark.parametrize("stale", [False, True])
def test_a_param_is_printed_as_the_parameter_that_it_is(stale: bool) -> None:
    model, optimizer = trained(prefetch=0)
    if stale:
        net_loss(model, 0, 0).backward()
        optimizer.step()
    param = model.module.first.weight
    kind = type(param).__name__
    assert kind == ("StaleHookedParameter" if stale else "HookedParameter")
    told = [str(param), repr(param), f"{param}"]
    assert told == [repr(nn.Parameter(param.detach().clone()))] * 3
    assert told[0].startswith("Parameter containing:\ntensor([[")
    assert type(param).__name__ == "HookedParameter"

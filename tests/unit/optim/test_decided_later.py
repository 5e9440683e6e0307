"""Steps that are launched before it is known what became of their gradients, as on a GPU; here on the CPU, where whatever
asks for the verdict reads it at once."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.engine import step as stepping
from layerwise.errors import NonFiniteError, StateError
from tests.distributed.test_parity import LIVE, RULES
from tests.reference.oracle import Hyper
from tests.worlds import Case, deliver, gradient, hash_everything, oracle_for, rules, train_and_compare, wrap

DECIDED_LATER = [name for name, options in RULES.items() if options.get("matrix", "muon") not in ("normuon", "adamuon")]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "has_own_kernels", lambda device: True)


def plain(**asked: Any) -> tuple[nn.Module, layerwise.Optimizer]:
    module = Case().build()
    chosen = {"matrix": layerwise.Muon(lr=0.02), "other": layerwise.AdamW(lr=0.003), **asked}
    return module, layerwise.Optimizer(module, **chosen)


def feed(module: nn.Module, step: int, *, bad: float | None = None, times: float = 1.0) -> dict[str, Tensor | None]:
    grads: dict[str, Tensor | None] = {}
    for fqn, param in module.named_parameters():
        if param.requires_grad:
            param.grad = gradient(fqn, param.shape, 0, step, 0) * times
            if bad is not None and fqn == "tall.weight":
                param.grad[3, 2] = bad
            grads[fqn] = param.grad.clone()
    return grads


def is_known(optimizer: layerwise.Optimizer) -> bool:
    return optimizer.stepper._left is None


@pytest.mark.parametrize("name", DECIDED_LATER)
def test_every_rule_and_option_matches_the_oracle_bitwise(name: str) -> None:
    case = Case(hyper=RULES[name], schedule=LIVE, steps=len(LIVE), bucket_mib=0.002)
    assert train_and_compare(0, 1, case, ("flat", "replicated")) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_step_among_good_ones_matches_the_oracle_bitwise(bad: float) -> None:
    """Groups with norms of their own, one param group over several of them, and decay in the gradient."""
    hyper = Hyper(
        ns_dtype=torch.float32,
        clip=0.25,
        norm_groups={"experts": "experts", "gain": "gain"},
        weight_decay=0.1,
        weight_decay_mode="coupled",
        other_weight_decay=0.1,
    )
    module, optimizer = plain(**rules(hyper))
    oracle = oracle_for(module, hyper)
    for step in range(5):
        grads = feed(module, step, bad=bad if step in (0, 3) else None)
        assert oracle.step([grads]) is (step not in (0, 3))
        with pytest.warns(UserWarning, match="was skipped") if step == 1 else nullcontext():  # of the one before
            optimizer.step()
        assert not is_known(optimizer)
        for fqn, param in module.named_parameters():
            if param.requires_grad:
                assert torch.equal(param, oracle.masters[fqn]), (step, fqn)
    assert optimizer.stats.step == 3
    assert optimizer.stats.grad_norm == oracle.grad_norm


def test_a_skipped_step_is_told_when_somebody_asks_and_changed_nothing() -> None:
    module, optimizer = plain(gradient_policy=layerwise.GradientPolicy(skip_above=100.0))
    feed(module, 0)
    optimizer.step()
    before = hash_everything(optimizer)
    feed(module, 1, times=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    with pytest.warns(UserWarning, match="step 2 was skipped: gradient norm"):
        assert optimizer.stats.skipped
    assert "above skip_above=100" in optimizer.stats.skip_reason
    assert hash_everything(optimizer) == before
    assert optimizer.stats.step == 1


@pytest.mark.parametrize(
    ("asked", "is_skipped"),
    [
        ({}, True),
        ({"gradient_policy": layerwise.GradientPolicy(nonfinite="ignore")}, False),
        ({"clip_grad_norm": 1.0}, False),
    ],
)
def test_a_norm_whose_square_overflows_is_skipped_by_the_verdict_and_by_what_is_told_of_it(
    asked: dict[str, Any], is_skipped: bool
) -> None:
    module, optimizer = plain(**asked)
    feed(module, 0)
    optimizer.step()
    before = hash_everything(optimizer)
    feed(module, 1, times=2.0**70)
    optimizer.step()
    with (
        pytest.warns(UserWarning, match="step 2 was skipped: gradient norms are above") if is_skipped else nullcontext()
    ):
        assert optimizer.stats.skipped is is_skipped
    assert (hash_everything(optimizer) == before) is is_skipped
    assert optimizer.stats.step == 2 - is_skipped


@pytest.mark.parametrize("ask", ["state_dict", "load_state_dict", "checkpoint"])
def test_whoever_saves_or_loads_has_the_number_of_steps_that_were_taken(ask: str, tmp_path: Any) -> None:
    module, optimizer = plain()
    feed(module, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    ways: dict[str, Callable[[], object]] = {
        "state_dict": optimizer.state_dict,
        "load_state_dict": lambda: optimizer.load_state_dict(saved),
        "checkpoint": lambda: layerwise.save(tmp_path / "there", module, optimizer),
    }
    feed(module, 1, bad=math.nan)
    optimizer.step()
    assert not is_known(optimizer)
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        found = ways[ask]()
    assert not isinstance(found, dict) or found["layerwise"]["step"] == 1
    assert is_known(optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_what_was_asked_for_as_an_exception_comes_at_once() -> None:
    for asked, error in (
        ({"gradient_policy": layerwise.GradientPolicy(nonfinite="raise")}, NonFiniteError),
        ({"gradient_policy": layerwise.GradientPolicy(max_skipped=0)}, StateError),
    ):
        module, optimizer = plain(**asked)
        feed(module, 0, bad=math.nan)
        before = hash_everything(optimizer)
        with pytest.raises(error):
            optimizer.step()
        assert hash_everything(optimizer) == before


def test_a_step_without_gradients_and_with_strict_ones_is_refused_at_once() -> None:
    module, optimizer = plain()
    with pytest.warns(UserWarning, match="no param has a gradient"):
        optimizer.step()
    assert is_known(optimizer)
    module, optimizer = plain(gradient_policy=layerwise.GradientPolicy(strict_grads=True))
    feed(module, 0)
    module.tall.weight.grad = None
    before = hash_everything(optimizer)
    with pytest.raises(StateError, match=r"no gradient for 'tall\.weight"):
        optimizer.step()
    assert hash_everything(optimizer) == before


@pytest.mark.parametrize(
    "asked",
    [
        {"matrix": layerwise.NorMuon(lr=0.02)},
        {"matrix": layerwise.AdaMuon(lr=0.02)},
        {"loss_scale": layerwise.LossScale()},
    ],
    ids=["normuon", "adamuon", "loss_scale"],
)
def test_where_a_verdict_does_not_reach_the_host_decides_first(asked: dict[str, Any]) -> None:
    module, optimizer = plain(**asked)
    feed(module, 0, bad=math.nan)
    optimizer.engine.gradients.said.is_scaled = "loss_scale" in asked
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert is_known(optimizer)
    assert optimizer.stats.skipped
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_whoever_is_interrupted_while_it_waits_can_ask_again() -> None:
    module, optimizer = plain()
    feed(module, 0, bad=math.nan)
    optimizer.step()
    left = optimizer.stepper._left
    assert left is not None
    optimizer.stepper._left = left._replace(totals=mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        _ = optimizer.stats
    optimizer.stepper._left = left
    with pytest.warns(UserWarning, match="step 1 was skipped"):
        assert optimizer.stats.skipped
    assert optimizer.engine.count.steps == 0


def test_a_model_that_is_saved_alone_has_the_number_of_steps_that_were_taken(tmp_path: Path) -> None:
    case = Case()
    model = wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    for step in range(2):
        grads = {fqn: gradient(fqn, shape, 0, step, 0) * (math.nan if step else 1.0) for fqn, shape in shapes.items()}
        deliver(model, grads, sync=True)
        optimizer.step()
    assert optimizer.engine.count.assumed == 2
    layerwise.save(tmp_path / "there", model)
    assert '"step": 1,' in (tmp_path / "there" / "manifest.json").read_text()


def test_a_warning_that_is_an_error_costs_no_other_step() -> None:
    module, optimizer = plain()
    raised = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            feed(module, step, bad=math.nan if step == 1 else None)
            try:
                optimizer.step()
            except UserWarning as warning:
                raised.append((step, str(warning)))
    assert [step for step, _ in raised] == [2]  # where step 1 is told of
    assert "step 2 was skipped" in raised[0][1]
    assert optimizer.stats.step == 3


def test_skipped_steps_are_told_in_their_order_whoever_decided() -> None:
    module, optimizer = plain()
    feed(module, 0, bad=math.nan)
    optimizer.step()
    feed(module, 1, bad=math.nan)
    module.row.weight.grad = None  # then the host decides
    with pytest.warns(UserWarning, match="step 1 was skipped") as told:
        optimizer.step()
    assert is_known(optimizer)
    assert len(told) == 1
    for step in range(2, 10):
        feed(module, step, bad=math.nan)
        with pytest.warns(UserWarning, match="10 steps in a row") if step == 9 else nullcontext():
            optimizer.step()
            _ = optimizer.stats


def test_an_optimizer_that_is_let_go_is_gone_at_once() -> None:
    module, optimizer = plain()
    feed(module, 0)
    optimizer.step()
    assert not is_known(optimizer)
    gone = weakref.ref(optimizer.stepper)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()

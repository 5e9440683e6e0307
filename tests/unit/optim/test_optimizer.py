from __future__ import annotations

import io
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import layerwise
from layerwise.engine.gradients import Divisors
from layerwise.engine.policy import StepPolicy
from layerwise.engine.totals import Totals
from layerwise.engine.update import Update
from layerwise.errors import NonFiniteError, StateError
from tests.worlds import Case, Net, Zoo, deliver, gradient, hash_everything, net_loss, wrap


def totals(**square_sums: float) -> Totals:
    return Totals(
        square_sums={"matrix": 0.0, "other": 0.0, **square_sums},
        num_zeros=None,
        missing={},
        nonfinite=(),
        late=frozenset(),
        nothing_arrived=False,
        disagreeing={},
        consistent=True,
        problems=0,
        scaled=(0,),
        unscaled=(0,),
        divisors=Divisors(1.0, 2.0, 2.0),
    )


def clip_coefficients(found: Totals, scope: Any) -> dict[str, float]:
    """Factors of the norm groups under a policy that clips to norm 1; without a scope nothing is clipped."""
    policy = StepPolicy(layerwise.GradientPolicy(clip=scope or "all"), None if scope is None else 1.0)
    return policy.clip_coefficients(found, list(found.square_sums))


def test_a_norm_is_the_root_of_added_squares_over_the_divisor() -> None:
    assert totals(matrix=9.0, other=16.0).norm("matrix", "other") == 2.5


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("all", {"matrix": 0.4, "other": 0.4}),
        ("other-only", {"matrix": 1.0, "other": 0.5}),
        (None, {"matrix": 1.0, "other": 1.0}),
    ],
)
def test_each_clip_scope_clips_its_families_by_their_common_norm(scope: Any, expected: dict[str, float]) -> None:
    found = clip_coefficients(totals(matrix=9.0, other=16.0), scope)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_named_norm_group_is_clipped_by_its_own_norm_unless_nothing_is_clipped() -> None:
    found = clip_coefficients(totals(matrix=0.01, router=400.0), "all")
    assert found == pytest.approx({"matrix": 1.0, "other": 1.0, "router": 0.1}, rel=1e-5)
    assert set(clip_coefficients(totals(router=400.0), None).values()) == {1.0}


def zoo(**settings: Any) -> tuple[layerwise.DataParallel, layerwise.Optimizer]:
    case = Case()
    model = wrap(case, case.build())
    chosen = {"matrix": layerwise.Muon(lr=0.02), "other": layerwise.AdamW(lr=0.003), **settings}
    return model, layerwise.Optimizer(model, **chosen)


def feed(model: layerwise.DataParallel, *, scale: float = 1.0, without: str = "") -> None:
    params = {fqn: param for fqn, param in model.engine.storage.params.items() if fqn != without}
    deliver(model, {fqn: gradient(fqn, p.shape, 0, 0, 0) * scale for fqn, p in params.items()}, sync=True)


def test_stats_tell_norms_per_group_zeros_and_missing_params() -> None:
    model, optimizer = zoo(
        gradient_policy=layerwise.GradientPolicy(norm_groups={"experts": "experts"}), count_zeros=True
    )
    feed(model, without="row.weight")
    optimizer.step()
    stats = optimizer.stats
    grads = {fqn: gradient(fqn, p.shape, 0, 0, 0).double() for fqn, p in model.engine.storage.params.items()}
    del grads["row.weight"]
    assert stats.norms["experts"] == pytest.approx(float(grads.pop("experts").norm()))
    assert stats.grad_norm == pytest.approx(math.sqrt(sum(float(grad.square().sum()) for grad in grads.values())))
    assert stats.missing == {"row.weight": 1}
    assert stats.num_zeros is not None
    assert stats.num_zeros >= 5
    assert not stats.skipped
    assert stats.step == 1


def test_a_step_above_the_threshold_is_skipped_with_nothing_changed_and_its_norm_in_the_reason() -> None:
    model, optimizer = zoo(gradient_policy=layerwise.GradientPolicy(skip_above=100.0))
    feed(model)
    optimizer.step()
    before = hash_everything(optimizer)
    feed(model, scale=1024.0)
    with pytest.warns(UserWarning, match="step 2 was skipped: gradient norm"):
        optimizer.step()
    assert optimizer.stats.skipped
    assert "above skip_above=100" in optimizer.stats.skip_reason
    assert hash_everything(optimizer) == before


@pytest.mark.parametrize("asked", ["skip", "raise"])
def test_a_norm_whose_square_overflows_is_taken_as_a_gradient_that_is_not_finite(asked: Any) -> None:
    """AdamW's second moment would be inf, and its params would never move again."""
    model, optimizer = zoo(gradient_policy=layerwise.GradientPolicy(nonfinite=asked, norm_groups={"gain": "gain"}))
    feed(model)
    optimizer.step()
    before = hash_everything(optimizer)
    feed(model, scale=2.0**70)
    said = r"gradient norms are above 1.845e\+19 after clipping, and their squares inf in fp32: \S+ of 'gain', \S+ of 'matrix', \S+ of 'other'"
    with pytest.raises(NonFiniteError, match=said) if asked == "raise" else pytest.warns(UserWarning, match=said):
        optimizer.step()
    assert optimizer.stats.skipped
    assert optimizer.stats.nonfinite == ()
    assert hash_everything(optimizer) == before


@pytest.mark.parametrize(
    "settings", [{"gradient_policy": layerwise.GradientPolicy(nonfinite="ignore")}, {"clip_grad_norm": 1.0}]
)
def test_a_huge_norm_is_no_reason_where_it_is_to_be_ignored_or_clipping_makes_it_small(settings: Any) -> None:
    model, optimizer = zoo(**settings)
    feed(model, scale=2.0**70)
    optimizer.step()
    assert not optimizer.stats.skipped
    states = optimizer.state_dict()["state"].values()
    finite = all(
        bool(tensor.isfinite().all()) for state in states for tensor in state.values() if torch.is_tensor(tensor)
    )
    assert finite is ("clip_grad_norm" in settings)


def test_clipping_the_other_family_alone_leaves_a_huge_norm_to_matrices() -> None:
    model, optimizer = zoo(clip_grad_norm=1.0, gradient_policy=layerwise.GradientPolicy(clip="other-only"))
    feed(model, scale=2.0**70)
    with pytest.warns(UserWarning, match=r"in fp32: \S+ of 'matrix'\."):
        optimizer.step()
    assert optimizer.stats.skipped


def test_one_clip_coefficient_for_both_families_brings_the_norm_to_its_bound() -> None:
    clipped = zoo(clip_grad_norm=2.0**-3)
    feed(clipped[0])
    clipped[1].step()
    coefficient = clipped[1].stats.clip_coefficients["matrix"]
    assert 0.0 < coefficient < 1.0
    assert coefficient == clipped[1].stats.clip_coefficients["other"]
    assert coefficient * clipped[1].stats.grad_norm == pytest.approx(2.0**-3, rel=1e-4)


def test_options_of_a_route_rule_make_a_group_of_their_own_that_is_really_used() -> None:
    case = Case()
    rules = [layerwise.RouteRule(pattern="tall.weight", to="matrix", options={"lr": 0.0})]
    module = case.build()
    model = layerwise.DataParallel(module, rules=rules)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    own = next(group for group in optimizer.param_groups if group["fqns"] == ["tall.weight"])
    assert own["lr"] == 0.0
    before = {fqn: param.detach().clone() for fqn, param in module.named_parameters()}
    feed(model)
    optimizer.step()
    moved = {fqn for fqn, param in module.named_parameters() if not torch.equal(param, before[fqn])}
    assert moved == {fqn for fqn, param in module.named_parameters() if param.requires_grad} - {"tall.weight"}


def test_groups_keep_their_number_order_and_names_when_values_of_options_change() -> None:
    found = []
    for lr, bias_lr in ((0.5, 0.25), (0.02, 0.003), (0.25, 0.25)):
        rules = [
            layerwise.RouteRule(pattern="norm.weight", to="other"),
            layerwise.RouteRule(pattern="tall.weight", to="matrix", options={"lr": lr}),
            layerwise.RouteRule(pattern="frozen.*", to="other", options={"lr": lr}),
            layerwise.RouteRule(pattern="*.bias", to="other", options={"lr": bias_lr}),
            layerwise.RouteRule(pattern="gain", to="other", options={"lr": bias_lr}),
        ]
        model = layerwise.DataParallel(Case().build(), rules=rules)
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
        found.append([(group["name"], group["fqns"]) for group in optimizer.param_groups])
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.003, lr, bias_lr, bias_lr]
    assert [name for name, _ in found[0]] == ["matrix", "other", "rule 2", "rule 4", "rule 5"]
    assert "norm.weight" in found[0][1][1]
    assert found[0] == found[1] == found[2]


def test_the_name_of_a_group_is_compared_and_loaded_nowhere() -> None:
    model, optimizer = zoo()
    state: dict[str, Any] = optimizer.state_dict()
    for group in state["param_groups"]:
        group["name"] = "as it was called elsewhere"
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["name"] == "matrix"
    optimizer.param_groups[0]["name"] = "mine"
    feed(model)
    optimizer.step()
    assert not optimizer.stats.skipped


def test_every_trainable_param_is_in_exactly_one_group() -> None:
    model, optimizer = zoo()
    fqns = [fqn for group in optimizer.param_groups for fqn in group["fqns"]]
    assert sorted(fqns) == sorted(model.engine.storage.params)
    assert [len(group["params"]) for group in optimizer.param_groups] == [
        len(group["fqns"]) for group in optimizer.param_groups
    ]


def test_betas_may_be_a_list_as_a_config_file_gives_them() -> None:
    module = nn.Linear(4, 4)
    rule = layerwise.AdamW(lr=0.1, betas=[0.8, 0.9])  # type: ignore[arg-type]
    optimizer = layerwise.Optimizer(module, matrix=layerwise.Muon(lr=0.1), other=rule)
    assert optimizer.param_groups[-1]["betas"] == (0.8, 0.9)


def test_a_param_without_elements_is_carried_along() -> None:
    module = Zoo()
    module.empty = nn.Parameter(torch.zeros(0, 5))
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    feed(model)
    optimizer.step()
    assert not optimizer.stats.skipped


def test_bytes_are_counted_from_one_step_to_the_next() -> None:
    torch.manual_seed(3)
    model = layerwise.DataParallel(Net())
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    for step in range(2):
        net_loss(model, 0, step).backward()
        optimizer.step()
        assert dict(optimizer.stats.bytes_by_collective) == optimizer.schedule.bytes_by_collective(0)


def test_stats_say_which_kernels_multiply_and_why() -> None:
    model = layerwise.DataParallel(Net())
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    net_loss(model, 0, 0).backward()
    optimizer.step()
    assert optimizer.stats.products == {"bf16": "torch: products on cpu are torch's"}


def test_a_step_that_ends_half_way_is_the_last_and_is_never_saved() -> None:
    model, optimizer = zoo()
    feed(model)
    with mock.patch.object(Update, "_direction", side_effect=MemoryError), pytest.raises(MemoryError):
        optimizer.step()
    feed(model)
    with pytest.raises(StateError, match="step 1 ended half way"):
        optimizer.step()
    with pytest.raises(StateError, match="step 1 ended half way"):
        optimizer.state_dict()


def trained(matrix: Any, autocast: torch.dtype | None = None) -> str:
    """Hash of everything after some steps of a small network."""
    torch.manual_seed(3)
    model = layerwise.DataParallel(Net())
    optimizer = layerwise.Optimizer(model, matrix=matrix, other=layerwise.AdamW(lr=0.1))
    for step in range(3):
        net_loss(model, 0, step).backward()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            optimizer.step()
        optimizer.zero_grad()
    return hash_everything(optimizer)


@pytest.mark.parametrize("rule", [layerwise.Muon, layerwise.NorMuon])
@pytest.mark.parametrize("ns_dtype", ["bf16", "fp32"])
def test_a_step_within_autocast_is_the_same_step(rule: Any, ns_dtype: str) -> None:
    matrix = rule(lr=0.1, ns_dtype=ns_dtype)
    assert trained(matrix, autocast=torch.bfloat16) == trained(matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rule", [layerwise.NorMuon, layerwise.AdaMuon])
def test_state_has_the_same_dtype_whatever_torch_makes_by_default(rule: Any, dtype: torch.dtype) -> None:
    def states() -> dict[str, torch.dtype]:
        model = layerwise.DataParallel(nn.Linear(4, 4, bias=False, dtype=torch.float32))
        optimizer = layerwise.Optimizer(model, matrix=rule(lr=0.1), other=layerwise.AdamW(lr=0.1))
        state = next(iter(optimizer.state.values()))
        return {name: value.dtype for name, value in state.items() if isinstance(value, torch.Tensor)}

    before = torch.get_default_dtype()
    expected = states()
    torch.set_default_dtype(dtype)
    try:
        found = states()
    finally:
        torch.set_default_dtype(before)
    assert found == expected
    assert torch.float32 in found.values()


@pytest.mark.parametrize("who", ["model", "optimizer"])
def test_whoever_forgets_gradients_forgets_that_their_loss_was_scaled(who: str) -> None:
    model = layerwise.DataParallel(nn.Linear(4, 4))
    optimizer = layerwise.Optimizer(
        model,
        matrix=layerwise.Muon(lr=0.1),
        other=layerwise.AdamW(lr=0.1),
        loss_scale=layerwise.LossScale(initial=1024.0),
    )
    optimizer.scale_loss(model(torch.ones(1, 4)).sum()).backward()
    (model if who == "model" else optimizer).zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(StateError, match="scale_loss"):
        optimizer.step()


def test_a_grad_scaler_is_refused_in_words_that_name_what_to_use() -> None:
    model = layerwise.DataParallel(Net())
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net_loss(model, 0, 0)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(StateError, match=r"in its buffers. Pass loss_scale=layerwise.LossScale\(\) to the Optimizer"):
        scaler.step(optimizer)
    assert optimizer._step_supports_amp_scaling is False, "others ask whether they may clip"


def test_a_grad_scaler_that_is_disabled_or_of_a_plain_module_steps() -> None:
    found = []
    for enabled, build in ((False, layerwise.DataParallel), (False, Net), (True, Net)):
        torch.manual_seed(0)
        module: Any = Net()
        model: Any = build(module) if build is not Net else module
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
        scaler.scale(net_loss(model, 0, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert not optimizer.stats.skipped
        found.append(module.first.weight.detach().clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def as_numpy(value: float) -> Any:
    return pytest.importorskip("numpy").float32(value)


def as_array(value: float) -> Any:
    return pytest.importorskip("numpy").asarray(value)


@pytest.mark.parametrize("kind", [as_numpy, as_array, torch.tensor])
def test_options_may_be_numpy_scalars_or_tensors(kind: Any) -> None:
    """In rules, in the options of a route rule, and put into live param groups."""
    results = []
    for make in (kind, float):
        lr, beta, decay = make(0.25), make(0.5), make(0.125)  # the same in fp32
        routes = [layerwise.RouteRule(pattern="gain", to="other", options={"lr": lr})]
        model = layerwise.DataParallel(Case().build(), rules=routes)
        optimizer = layerwise.Optimizer(
            model,
            matrix=layerwise.Muon(lr=lr, momentum=beta),
            other=layerwise.AdamW(lr=lr, betas=(beta, beta)),
            clip_grad_norm=make(2.0),
        )
        for _ in range(2):
            feed(model)
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = group["weight_decay"] = decay
                group.update({"betas": [decay, beta]} if "betas" in group else {})
        state: dict[str, Any] = optimizer.state_dict()
        saved = io.BytesIO()
        torch.save(state, saved)
        saved.seek(0)
        optimizer.load_state_dict(torch.load(saved, weights_only=True))
        results.append((hash_everything(optimizer), model.plan.digest, state["param_groups"]))
    assert results[0] == results[1]


def test_a_tensor_of_several_elements_is_no_number() -> None:
    with pytest.raises(ValueError, match="lr must be a finite number, got tensor"):
        layerwise.AdamW(lr=torch.ones(2))  # type: ignore[arg-type]

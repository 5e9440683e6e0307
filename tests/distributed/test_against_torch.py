"""The optimizer beside torch's own: Muon, AdamW, schedulers, state dicts, closures, loss scaling. Tolerances stand beside their reasons; most are zero."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, SequentialLR

import layerwise
from layerwise.kernels import recorded
from layerwise.kernels.newton_schulz import orthogonalize
from tests.distributed.jobs import losses_of_scaling, plain_against_wrapped, resume
from tests.ranks import run_ranks
from tests.worlds import Net, hash_everything, hash_tensors, held, net_loss

SCALES = {"original": "shape", "match_rms_adamw": "rms"}
"""What torch.optim.Muon's `adjust_lr_fn` is called here."""


def stack() -> nn.Sequential:
    """Linear layers of three aspects: tall, wide, square."""
    torch.manual_seed(0)
    shapes = [(48, 32), (16, 48), (16, 16), (40, 16)]
    return nn.Sequential(*[nn.Linear(cols, rows, bias=False) for rows, cols in shapes])


def gaussian_loss(module: nn.Module, step: int) -> Tensor:
    """A loss whose gradients are Gaussian matrices. Those of a real loss on a few samples lack rank, and Newton-Schulz blows their rounding up to one."""
    generator = torch.Generator().manual_seed(step)
    return sum(
        ((param * torch.randn(param.shape, generator=generator)).sum() for param in module.parameters()),
        torch.zeros(()),
    )


class BesideTorch:
    """A module under layerwise and a copy of it under a torch optimizer, on the same gradients."""

    def __init__(self, matrix: Any, torch_optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.ours, self.theirs = stack(), stack()
        self.optimizer = layerwise.Optimizer(self.ours, matrix=matrix, other=layerwise.AdamW(lr=0.001))
        self.torch_optimizer = torch_optimizer(self.theirs.parameters(), **options)

    def step(self, number: int) -> None:
        for module, optimizer in ((self.ours, self.optimizer), (self.theirs, self.torch_optimizer)):
            gaussian_loss(module, number).backward()
            optimizer.step()
            optimizer.zero_grad()

    def distances(self) -> list[float]:
        """Largest difference between the two weights of each layer."""
        pairs = zip(self.ours.parameters(), self.theirs.parameters(), strict=True)
        return [float((mine - its).detach().abs().max()) for mine, its in pairs]

    def momentum_distances(self) -> list[float]:
        """Largest difference between the two momenta of each layer, relative to the largest momentum."""
        found = []
        for mine, its in zip(self.ours.parameters(), self.theirs.parameters(), strict=True):
            expected = self.torch_optimizer.state[its]["momentum_buffer"]
            momentum = self.optimizer.state[mine]["momentum"].view(mine.shape)
            found.append(float((momentum - expected).abs().max() / expected.abs().max()))
        return found


def muon_beside_torch(*, ns_dtype: str, nesterov: bool, lr: float, adjust: str) -> BesideTorch:
    matrix = layerwise.Muon(
        lr=lr,
        weight_decay=0.1,
        nesterov=nesterov,
        coefficients="simple",
        ns_dtype=ns_dtype,
        scale=SCALES[adjust],
    )
    options = {"lr": lr, "weight_decay": 0.1, "momentum": 0.95, "nesterov": nesterov, "adjust_lr_fn": adjust}
    return BesideTorch(matrix, torch.optim.Muon, **options)


def form_of_all(method: str) -> Any:
    """Steps in here take one form of Newton-Schulz, "standard" or "gram", for matrices of any shape."""
    return mock.patch.object(
        recorded, "orthogonalize", lambda update, **options: orthogonalize(update, **{**options, "method": method})
    )


def largest_update(lr: float, module: nn.Module, adjust: str) -> list[float]:
    """lr times the scale of every layer: an element of an orthogonal matrix is at most 1."""
    shapes = [param.shape for param in module.parameters()]
    if adjust == "original":
        return [lr * max(1.0, rows / cols) ** 0.5 for rows, cols in shapes]
    return [lr * 0.2 * max(rows, cols) ** 0.5 for rows, cols in shapes]


@pytest.mark.parametrize("adjust", SCALES)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torch_muon_in_fp32(nesterov: bool, method: str, adjust: str) -> None:
    # torch.optim.Muon casts to bf16 for Newton-Schulz, by bfloat16() and from torch 2.15 on by to(dtype=); with that one cast made a cast to fp32 the same
    # code runs in fp32. What is left is the rounding of fp32 products in another order (and, for gram, of other products): some 1e-6 of the largest update
    # each, over five steps of slope 3.4.
    lr = 0.02
    pair = muon_beside_torch(ns_dtype="fp32", nesterov=nesterov, lr=lr, adjust=adjust)
    to = torch.Tensor.to

    def to_fp32(tensor: Tensor, *args: Any, **how: Any) -> Tensor:
        return to(tensor, *args, **{**how, "dtype": torch.float32} if how.get("dtype") == torch.bfloat16 else how)

    with (
        form_of_all(method),
        mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone()),
        mock.patch.object(torch.Tensor, "to", to_fp32),
    ):
        for number in range(6):
            pair.step(number)
            for distance, update in zip(pair.distances(), largest_update(lr, pair.ours, adjust), strict=True):
                assert distance <= 3e-5 * update
    assert max(pair.momentum_distances()) <= 1e-6  # torch's lerp against multiply and add: an ulp or two


@pytest.mark.parametrize("adjust", SCALES)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_muon_equals_torch_muon_as_it_is_within_bf16(method: str, adjust: str) -> None:
    # As torch ships it, Newton-Schulz runs in bf16 on both sides with other intermediate roundings. bf16 has 8 bits (0.4 %), five steps and their slope make
    # it 2 % of the largest update per step; over six steps the errors add up.
    lr = 0.02
    pair = muon_beside_torch(ns_dtype="bf16", nesterov=True, lr=lr, adjust=adjust)
    for number in range(6):
        with form_of_all(method):
            pair.step(number)
        for distance, update in zip(pair.distances(), largest_update(lr, pair.ours, adjust), strict=True):
            assert distance <= 0.02 * (number + 1) * update
    assert max(pair.momentum_distances()) <= 1e-6


def test_adamw_equals_torch_adamw() -> None:
    # The first step is equal bit by bit. Later torch's lerp and our multiply-add round the first moment differently, which moves a weight by an ulp
    # a step: 2^-25 for weights below 0.5.
    options = {"lr": 0.003, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    pair = BesideTorch(layerwise.AdamW(**options), torch.optim.AdamW, **options)
    pair.step(0)
    assert max(pair.distances()) == 0.0
    for number in range(1, 20):
        pair.step(number)
        assert max(pair.distances()) <= 2.0**-25 * number


def test_control_another_decay_or_scale_is_seen_by_these_tolerances() -> None:
    wrong_decay = {"lr": 0.003, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    adamw = BesideTorch(layerwise.AdamW(**{**wrong_decay, "weight_decay": 0.0}), torch.optim.AdamW, **wrong_decay)
    adamw.step(0)
    assert max(adamw.distances()) > 2.0**-25 * 20
    for adjust, wrong in (("original", "unit_rms"), ("match_rms_adamw", "spectral")):
        matrix = layerwise.Muon(lr=0.02, weight_decay=0.1, coefficients="simple", scale=wrong)
        muon = BesideTorch(matrix, torch.optim.Muon, lr=0.02, adjust_lr_fn=adjust)
        muon.step(0)
        allowed = [0.02 * update for update in largest_update(0.02, muon.ours, adjust)]
        # unit_rms differs from shape where a matrix is wide
        assert any(found > limit for found, limit in zip(muon.distances(), allowed, strict=True)), adjust


def net_and_optimizer(**settings: Any) -> tuple[Net, layerwise.Optimizer]:
    torch.manual_seed(3)
    module = Net()
    chosen = {"matrix": layerwise.Muon(lr=0.02, ns_dtype="fp32"), "other": layerwise.AdamW(lr=0.003), **settings}
    return module, layerwise.Optimizer(module, **chosen)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer,
        [LambdaLR(optimizer, lambda step: (step + 1) / 4), CosineAnnealingLR(optimizer, T_max=3)],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_schedulers_drive_the_lr_of_every_group(name: str) -> None:
    module, optimizer = net_and_optimizer()
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": group["lr"]} for group in optimizer.param_groups]
    reference = torch.optim.SGD(groups, lr=1.0)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    for step in range(6):
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in reference.param_groups]
        net_loss(module, 0, step).backward()
        optimizer.step()
        reference.step()
        ours.step()
        theirs.step()


def test_a_step_uses_the_lr_that_the_scheduler_left() -> None:
    scheduled, by_hand = net_and_optimizer(), net_and_optimizer()
    scheduler = LambdaLR(scheduled[1], lambda step: 0.5**step)
    for step in range(4):
        for (module, optimizer), scale in ((scheduled, None), (by_hand, 0.5**step)):
            for group, lr in zip(optimizer.param_groups, (0.02, 0.003), strict=True):
                if scale is not None:
                    group["lr"] = lr * scale
            net_loss(module, 0, step).backward()
            optimizer.step()
        scheduler.step()
    assert hash_tensors(scheduled[0].parameters()) == hash_tensors(by_hand[0].parameters())


def test_an_lr_of_zero_leaves_the_weights_alone() -> None:
    module, optimizer = net_and_optimizer()
    before = hash_tensors(module.parameters())
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0)  # schedulers may put a tensor there
    net_loss(module, 0, 0).backward()
    optimizer.step()
    assert optimizer.stats.step == 1
    assert hash_tensors(module.parameters()) == before


@pytest.mark.parametrize("name", ["step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"])
def test_methods_take_torchs_arguments_by_torchs_names(name: str) -> None:
    parameters = inspect.signature(getattr(layerwise.Optimizer, name)).parameters
    # Options of our own, such as state_dict(part=True), go by name alone.
    ours = {name: found for name, found in parameters.items() if found.kind is not found.KEYWORD_ONLY}
    theirs = inspect.signature(getattr(torch.optim.AdamW, name)).parameters
    assert list(ours) == list(theirs)
    assert [parameter.default for parameter in ours.values()] == [parameter.default for parameter in theirs.values()]


def test_it_is_a_torch_optimizer() -> None:
    _, optimizer = net_and_optimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert {"params", "lr", "weight_decay"} <= set(optimizer.param_groups[0])


def test_all_state_is_there_before_the_first_step_and_state_dict_changes_nothing() -> None:
    module, optimizer = net_and_optimizer()
    for expected in ("before any step", "after a step"):
        before = hash_everything(optimizer)
        saved = optimizer.state_dict()
        assert set(saved["state"]) == set(range(len(list(module.parameters())))), expected
        assert hash_everything(optimizer) == before, expected
        net_loss(module, 0, 0).backward()
        optimizer.step()


def test_get_optimizer_state_dict_neither_steps_nor_changes_anything() -> None:
    module, optimizer = net_and_optimizer()
    before = hash_everything(optimizer)
    found = get_optimizer_state_dict(module, optimizer)
    assert set(found["state"]) == {fqn for fqn, _ in module.named_parameters()}
    assert hash_everything(optimizer) == before
    assert optimizer.stats.step == 0


ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "fp32, muon": {"dtype": torch.float32, "matrix": "muon"},
    "bf16, normuon": {"dtype": torch.bfloat16, "matrix": "normuon"},
    "fp16, adamuon, loss scaling": {"dtype": torch.float16, "matrix": "adamuon", "scaled": True},
    "bf16, adamw": {"dtype": torch.bfloat16, "matrix": "adamw"},
}


@pytest.mark.broad
@pytest.mark.parametrize("layout", ["flat", "replicated"])
@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("world", [1, 3])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(world: int, name: str, layout: str) -> None:
    for straight, resumed, restored in run_ranks(world, resume, {**ROUND_TRIPS[name], "layout": layout}):
        assert restored == "as saved"
        assert straight == resumed


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("when", ["before the optimizer", "after the optimizer"])
def test_weights_may_be_loaded_into_a_wrapped_model_before_or_after_its_optimizer_state(
    when: str, dtype: torch.dtype
) -> None:
    setting = {"dtype": dtype, "matrix": "muon", "layout": "flat", "weights": when}
    for straight, resumed, _ in run_ranks(2, resume, setting):
        assert straight == resumed


def test_a_state_dict_survives_torch_save_without_pickled_code() -> None:
    module, optimizer = net_and_optimizer(loss_scale=layerwise.LossScale())
    optimizer.scale_loss(net_loss(module, 0, 0)).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["layerwise"] == optimizer.state_dict()["layerwise"]
    optimizer.load_state_dict(loaded)


def test_a_state_dict_of_another_layout_is_refused_with_nothing_written() -> None:
    torch.manual_seed(3)
    module, optimizer = net_and_optimizer()
    other = layerwise.Optimizer(nn.Linear(6, 6), matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    net_loss(module, 0, 0).backward()
    optimizer.step()
    before = hash_everything(optimizer)
    with pytest.raises(ValueError, match="state dict belongs to another"):
        optimizer.load_state_dict(other.state_dict())
    assert hash_everything(optimizer) == before


def test_a_loaded_state_dict_is_copied_not_shared() -> None:
    module, optimizer = net_and_optimizer()
    net_loss(module, 0, 0).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    net_loss(module, 0, 1).backward()
    optimizer.step()
    for key, tensors in kept["state"].items():
        for name, tensor in tensors.items():
            assert torch.equal(saved["state"][key][name], tensor)


def test_a_closure_is_evaluated_once_with_gradients_on_and_its_loss_comes_back() -> None:
    by_closure, by_hand = net_and_optimizer(), net_and_optimizer()
    calls = []

    def closure() -> Tensor:
        by_closure[1].zero_grad()
        loss = net_loss(by_closure[0], 0, 0)
        loss.backward()
        calls.append(loss)
        return loss

    returned = by_closure[1].step(closure)
    net_loss(by_hand[0], 0, 0).backward()
    assert by_hand[1].step() is None
    assert returned is calls[0]
    assert len(calls) == 1
    assert hash_everything(by_closure[1]) == hash_everything(by_hand[1])


def test_a_plain_module_equals_a_wrapped_one_with_and_without_a_process_group() -> None:
    alone = plain_against_wrapped(0, 1)
    assert len(set(alone)) == 1
    assert run_ranks(1, plain_against_wrapped) == [alone]


def test_step_consumes_the_gradients_of_a_plain_module_too() -> None:
    module, optimizer = net_and_optimizer()
    net_loss(module, 0, 0).backward()
    optimizer.step()
    before = hash_everything(optimizer)
    optimizer.step()
    assert optimizer.stats.skipped
    assert hash_everything(optimizer) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_loaded_after_wrapping_are_what_training_goes_on_from(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)).to(dtype)
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=2.0**-10), other=layerwise.AdamW(lr=2.0**-10))
    module.load_state_dict({name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()})
    model(torch.ones(2, 6, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    for fqn, param in module.named_parameters():
        assert float((param.detach().float() - 0.5).abs().max()) < 0.01, fqn


@pytest.mark.parametrize("world", [1, 3])
def test_scaling_by_powers_of_two_changes_no_bit(world: int) -> None:
    for plain, scaled in run_ranks(world, losses_of_scaling):
        assert plain == scaled


def scaled_net(**scale: Any) -> tuple[nn.Module, layerwise.Optimizer]:
    torch.manual_seed(3)
    module = nn.Linear(6, 4).half()
    matrix, other = layerwise.Muon(lr=0.02), layerwise.AdamW(lr=0.003)
    return module, layerwise.Optimizer(module, matrix=matrix, other=other, loss_scale=layerwise.LossScale(**scale))


def scaled_step(module: nn.Module, optimizer: layerwise.Optimizer, *, overflow: bool = False) -> None:
    weight = module.weight.float()
    optimizer.scale_loss((weight * (2.0**15 if overflow else 2.0**-6)).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_overflow_skips_the_step_with_weights_masters_and_moments_untouched() -> None:
    module, optimizer = scaled_net(initial=2.0**4)
    scaled_step(module, optimizer)
    before = [hash_tensors([tensor]) for tensor in held(optimizer.engine.storage)]
    scaled_step(module, optimizer, overflow=True)
    assert optimizer.stats.skipped
    assert optimizer.stats.nonfinite == ("weight",)
    assert "'weight'" in optimizer.stats.skip_reason
    assert [hash_tensors([tensor]) for tensor in held(optimizer.engine.storage)] == before
    assert optimizer.stats.step == 1


def test_the_scale_halves_after_as_many_overflows_as_the_hysteresis_says() -> None:
    module, optimizer = scaled_net(initial=2.0**4, hysteresis=2)
    scales = []
    for _ in range(5):
        scaled_step(module, optimizer, overflow=True)
        scales.append(optimizer.state_dict()["layerwise"]["loss_scale"]["scale"])
    assert scales == [16.0, 8.0, 8.0, 4.0, 4.0]


def test_the_scale_grows_after_a_quiet_interval_and_never_falls_below_its_minimum() -> None:
    module, optimizer = scaled_net(initial=4.0, growth_interval=2, hysteresis=1, minimum=2.0)
    scales = []
    for overflow in (False, False, False, True, False, False, True, True, True):
        scaled_step(module, optimizer, overflow=overflow)
        scales.append(optimizer.state_dict()["layerwise"]["loss_scale"]["scale"])
    assert scales == [4.0, 8.0, 8.0, 4.0, 4.0, 8.0, 4.0, 2.0, 2.0]

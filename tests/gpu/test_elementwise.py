"""Our own element-wise kernels, on a GPU or, with TRITON_INTERPRET=1, on the CPU: the formulas in float64, and bit by bit
the operations that a kernel is to do, for lists of any lengths in any places."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from layerwise.kernels import elementwise
from layerwise.kernels.triton_elementwise import fused_adamw_, fused_lion_, fused_momentum_, look_at
from layerwise.kernels.triton_pairs import fused_copy_, fused_subtract_
from layerwise.kernels.verdicts import Factor
from tests.gpu.lists import COUNTS, DEVICE, IS_INTERPRETED, PLACES, Guarded, fma, lengths, numbers, same_bits, times

NUMELS = [1, 1023, 1024, 2049] if IS_INTERPRETED else [1, 4095, 4096, 3_000_001]
WITH_ROUNDING = pytest.mark.skipif(IS_INTERPRETED, reason="Triton's interpreter cuts off where a GPU rounds to bf16")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASTS = [(BF16, FP32), (FP32, FP16)] if IS_INTERPRETED else list(product((FP32, BF16, FP16), repeat=2))


def runs(numel: int, count: int) -> list[Tensor]:
    """Numbers of many sizes in the middle of memory that must stay as it is."""
    return [numbers(numel + 2, seed) for seed in range(count)]


def check(found: list[Tensor], expected: list[Tensor], before: list[Tensor]) -> None:
    for one, other, was in zip(found, expected, before, strict=True):
        torch.testing.assert_close(
            one[1:-1].double(), other[1:-1], rtol=2e-6, atol=5e-6
        )  # terms of up to 50 may cancel
        assert torch.equal(one[[0, -1]], was[[0, -1]])


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("numel", NUMELS)
def test_momentum(numel: int, nesterov: bool) -> None:
    grad, state = before = runs(numel, 2)
    found = [tensor.clone() for tensor in before]
    fused_momentum_([found[0][1:-1]], [found[1][1:-1]], momentum=0.9, nesterov=nesterov)
    moved = 0.9 * state.double() + (1 - 0.9) * grad.double()
    direction = (1 - 0.9) * grad.double() + 0.9 * moved if nesterov else moved
    check(found, [direction, moved], before)


@WITH_ROUNDING
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_goes_elsewhere_rounded_once_and_leaves_the_gradient_alone(nesterov: bool) -> None:
    grads, momenta = lists(6, 2)
    given = [grad.clone() for grad in grads]
    into = [torch.full_like(grad, 9.0, dtype=BF16) for grad in grads]
    expected = [momentum_oracle(*pair, nesterov) for pair in zip(grads, momenta, strict=True)]
    fused_momentum_(grads, momenta, into, momentum=0.9, nesterov=nesterov)
    same_bits(grads, given)
    same_bits(momenta, [state for _, state in expected])
    same_bits(into, [direction.to(BF16) for direction, _ in expected])


@pytest.mark.parametrize("numel", NUMELS)
def test_adamw(numel: int) -> None:
    before = runs(numel, 4)
    before[3] = before[3].abs()
    found = [tensor.clone() for tensor in before]
    betas, eps, lr, step = (0.85, 0.93), 1e-7, 0.3, 3
    root, size = math.sqrt(1 - betas[1] ** step), lr / (1 - betas[0] ** step)
    inner = [[tensor[1:-1]] for tensor in found]
    fused_adamw_(*inner, betas=betas, root=root, eps=eps, size=size)
    master, grad, avg, avg_sq = (tensor.double() for tensor in before)
    terms = betas[0] * avg.abs() + (1 - betas[0]) * grad.abs()
    avg = betas[0] * avg + (1 - betas[0]) * grad
    avg_sq = betas[1] * avg_sq + (1 - betas[1]) * grad**2
    denominator = avg_sq.sqrt() / root + eps
    check(found[1:], [grad, avg, avg_sq], before[1:])
    # A mean whose terms cancel has the rounding of the terms, and so has what is divided by next to nothing.
    bound = 1e-6 * (master.abs() + size * terms / denominator)
    error = (found[0].double() - (master - size * avg / denominator)).abs()
    assert bool((error <= bound)[1:-1].all())
    assert torch.equal(found[0][[0, -1]], before[0][[0, -1]])


@pytest.mark.parametrize("numel", NUMELS)
def test_lion(numel: int) -> None:
    before = runs(numel, 3)
    before[1][: numel // 2], before[2][: numel // 3] = 0.0, 0.0  # where both are zero nothing moves
    found = [tensor.clone() for tensor in before]
    betas, lr = (0.8, 0.97), 0.25
    fused_lion_(*([tensor[1:-1]] for tensor in found), lr=lr, betas=betas)
    master, grad, avg = (tensor.double() for tensor in before)
    direction = (betas[0] * avg + (1 - betas[0]) * grad).sign()
    check(found, [master - lr * direction, grad, betas[1] * avg + (1 - betas[1]) * grad], before)


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, math.nan):
        tensors = [torch.ones(8, device=DEVICE) for _ in range(4)]
        tensors[1][3] = bad
        fused_adamw_(*([tensor] for tensor in tensors), betas=(0.9, 0.99), root=1.0, eps=1e-8, size=0.1)
        assert not torch.isfinite(tensors[2][3])
        assert torch.isfinite(tensors[0][[0, 1, 2, 4, 5, 6, 7]]).all()
    tensors = [torch.ones(8, device=DEVICE) for _ in range(3)]
    tensors[1][3] = math.nan
    fused_lion_(*([tensor] for tensor in tensors), lr=0.1, betas=(0.9, 0.99))
    assert torch.isnan(tensors[0][3])


def lists(count: int, roles: int) -> list[list[Tensor]]:
    return [[numbers(n, 1000 * role + n) for n in lengths(count)] for role in range(roles)]


def momentum_oracle(grad: Tensor, state: Tensor, nesterov: bool) -> list[Tensor]:
    if not nesterov:
        state = fma(1.0 - 0.9, grad, times(0.9, state))
        return [state, state]
    state = fma(0.9, state, times(1.0 - 0.9, grad))
    return [fma(0.9, state, times(1.0 - 0.9, grad)), state]


def adamw_oracle(master: Tensor, grad: Tensor, avg: Tensor, avg_sq: Tensor) -> list[Tensor]:
    avg = fma(1.0 - 0.85, grad, times(0.85, avg))
    avg_sq = fma(times(1.0 - 0.93, grad), grad, times(0.93, avg_sq))
    # Not every build of torch rounds a root in fp32 to the nearest, and by a scalar it does not divide but multiply.
    root, eps = torch.full_like(avg, 0.7), torch.full_like(avg, 1e-7)
    return [fma(-0.3, avg / (avg_sq.double().sqrt().float() / root + eps), master), grad, avg, avg_sq]


def lion_oracle(master: Tensor, grad: Tensor, avg: Tensor) -> list[Tensor]:
    direction = fma(1.0 - 0.8, grad, times(0.8, avg)).sign()
    return [master - times(0.25, direction), grad, fma(1.0 - 0.97, grad, times(0.97, avg))]


def verdict(is_taken: bool) -> Tensor:
    """That of two norm groups."""
    return torch.tensor([float(is_taken), 1.0, 0.9, 0.3], device=DEVICE)


RULES = {
    "nesterov": (
        2,
        lambda *given: fused_momentum_(*given, momentum=0.9, nesterov=True),
        lambda *given: momentum_oracle(*given, True),
    ),
    "nesterov elsewhere": (
        3,
        lambda *given: fused_momentum_(given[1], given[0], given[2], momentum=0.9, nesterov=True),
        lambda state, grad, _: [
            *momentum_oracle(grad, state, True)[::-1][:1],
            grad,
            momentum_oracle(grad, state, True)[0],
        ],
    ),
    "plain momentum": (
        2,
        lambda *given: fused_momentum_(*given, momentum=0.9, nesterov=False),
        lambda *given: momentum_oracle(*given, False),
    ),
    "adamw": (
        4,
        lambda *given: fused_adamw_(*given, betas=(0.85, 0.93), root=0.7, eps=1e-7, size=0.3),
        adamw_oracle,
    ),
    "lion": (3, lambda *given: fused_lion_(*given, lr=0.25, betas=(0.8, 0.97)), lion_oracle),
    # Weights that decay and gradients that are clipped on the way: as if both had been multiplied, and rounded, before.
    "clipped momentum": (
        2,
        lambda *given: fused_momentum_(*given, momentum=0.9, nesterov=True, scale=0.3),
        lambda grad, state: momentum_oracle(times(0.3, grad), state, True),
    ),
    # The same where a device has decided by how much.
    "momentum that a verdict clips": (
        2,
        lambda *given: fused_momentum_(*given, momentum=0.9, nesterov=False, scale=Factor(verdict(True), 3)),
        lambda grad, state: momentum_oracle(times(0.3, grad), state, False),
    ),
    "adamw that a verdict clips": (
        4,
        lambda *given: fused_adamw_(
            *given, betas=(0.85, 0.93), root=0.7, eps=1e-7, size=0.3, scale=Factor(verdict(True), 3)
        ),
        lambda master, grad, *state: [
            grad if index == 1 else one for index, one in enumerate(adamw_oracle(master, times(0.3, grad), *state))
        ],
    ),
    "lion that a verdict lets be": (
        3,
        lambda *given: fused_lion_(*given, lr=0.25, betas=(0.8, 0.97), scale=Factor(verdict(True), 1)),
        lion_oracle,
    ),
    "decaying adamw": (
        4,
        lambda *given: fused_adamw_(*given, betas=(0.85, 0.93), root=0.7, eps=1e-7, size=0.3, keep=0.77, scale=0.3),
        lambda master, grad, *state: [
            grad if index == 1 else one
            for index, one in enumerate(adamw_oracle(times(0.77, master), times(0.3, grad), *state))
        ],
    ),
    "decaying lion": (
        3,
        lambda *given: fused_lion_(*given, lr=0.25, betas=(0.8, 0.97), keep=0.77, scale=0.3),
        lambda master, grad, avg: [
            grad if index == 1 else one
            for index, one in enumerate(lion_oracle(times(0.77, master), times(0.3, grad), avg))
        ],
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", RULES)
def test_a_list_in_one_launch_gets_the_bits_of_its_formula(name: str, count: int, place: str) -> None:
    roles, rule, oracle = RULES[name]
    given = lists(count, roles)
    if "adamw" in name:
        given[3] = [tensor.abs() for tensor in given[3]]
    for is_known in (False, True):  # the second time elsewhere: only pointers are new
        guarded = [Guarded(tensors, place, around=70.0 + role) for role, tensors in enumerate(given)]
        if is_known:
            look_at(guarded[0].views)
        rule(*(one.views for one in guarded))
        expected = [oracle(*entry) for entry in zip(*given, strict=True)]
        for role, one in enumerate(guarded):
            same_bits(one.views, [entry[role] for entry in expected])
            one.check_around()


UNDECIDED = {
    "momentum": (2, lambda *given, **decided: fused_momentum_(*given, momentum=0.9, nesterov=True, **decided)),
    "adamw": (
        4,
        lambda *given, **decided: fused_adamw_(*given, betas=(0.8, 0.9), root=0.7, eps=1e-7, size=0.3, **decided),
    ),
    "lion": (3, lambda *given, **decided: fused_lion_(*given, lr=0.25, betas=(0.8, 0.97), keep=0.5, **decided)),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", UNDECIDED)
def test_a_step_that_is_not_taken_writes_nothing(name: str, place: str) -> None:
    roles, rule = UNDECIDED[name]
    given = lists(6, roles)
    given[0][0][3] = math.nan
    for is_taken in (False, True):
        guarded = [Guarded(tensors, place, around=70.0 + role) for role, tensors in enumerate(given)]
        rule(*(one.views for one in guarded), scale=Factor(verdict(is_taken), 3))
        for one, before in zip(guarded, given, strict=True):
            if not is_taken:
                same_bits(one.views, before)
            one.check_around()
        assert not is_taken or not torch.equal(guarded[-1].views[5], given[-1][5])


def test_an_update_of_a_step_that_is_not_taken_stays_off_the_masters() -> None:
    masters, updates = views(FP32)[::2], views(FP32)[1::2]
    masters.append(torch.ones(2, 2, 2, 2, 2, device=DEVICE).permute(4, 2, 0, 3, 1))  # walked by torch
    updates.append(torch.ones(2, 2, 2, 2, 2, device=DEVICE))
    factors, keeps = [0.1] * len(masters), [0.5] * len(masters)
    taken, plain, left = clones(masters), clones(masters), clones(masters)
    fused_subtract_(plain, updates, factors, keeps)
    fused_subtract_(taken, updates, factors, keeps, verdict(True))
    fused_subtract_(left, updates, factors, keeps, verdict(False))
    same_bits(taken, plain)
    same_bits(left, masters)
    assert not torch.equal(taken[-1], masters[-1])


@pytest.mark.parametrize("name", RULES)
@WITH_ROUNDING
def test_memory_in_pieces_and_16_bit_gradients(name: str) -> None:
    """A gradient may be a view, or of another dtype than its master, or both."""
    roles, rule, oracle = RULES[name]
    given = [[numbers((9, 40), 10 * role + entry).abs() for entry in range(4)] for role in range(roles)]
    which = 0 if roles == 2 else 1
    given[which] = [
        given[which][0].mT.contiguous().mT,
        given[which][1].to(BF16),
        given[which][2],
        given[which][3].to(BF16).mT.contiguous().mT,
    ]
    found = [[tensor.clone() for tensor in tensors] for tensors in given]
    assert not found[which][0].is_contiguous()
    rule(*found)
    for entry in range(4):
        expected = oracle(*(tensors[entry].float() for tensors in given))
        expected[which] = expected[which].to(given[which][entry].dtype)
        same_bits([tensors[entry] for tensors in found], expected)


def views(dtype: torch.dtype) -> list[Tensor]:
    """Pairs of neighbours have equal shapes: flat, with odd offsets, of rows of a larger matrix, transposed, with gaps
    everywhere, of one element and of none."""

    def whole(*shape: int) -> Tensor:
        values = numbers(shape, sum(shape))
        return (values.to(BF16) if IS_INTERPRETED else values).to(dtype)

    return [
        whole(1027), whole(2, 1027)[1],
        whole(66, 96)[:, 32:64], whole(2, 66, 32)[1],
        whole(66, 95)[:, 32:64], whole(32, 66).mT,
        whole(3, 34, 40), whole(34, 3, 40).transpose(0, 1),
        whole(3, 34, 40), whole(40, 3, 34).permute(1, 2, 0),
        whole(70, 6)[:, ::2], whole(3, 140).mT[::2],
        whole(5, 7)[2:3, 3:4], whole(1, 1),
        whole(3, 0), whole(0, 3).mT,
        whole(), whole(1)[0],
        whole(32, 64), whole(32, 64),
        whole(2, 3, 4, 5)[:, :2, :3, :4], whole(5, 4, 3, 2)[:4, :3, :2].permute(3, 2, 1, 0),
        whole(50, 40)[:, :1], whole(50).unsqueeze(1),
        whole(33, 1).expand(33, 35).clone(), whole(33, 1).expand(33, 35),
    ]  # fmt: skip


def clones(tensors: list[Tensor]) -> list[Tensor]:
    """Copies with the same strides, in memory of the same extent."""
    return [
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)
        for tensor in tensors
    ]


@pytest.mark.parametrize(("target", "source"), CASTS)
def test_copies_between_views_with_any_strides(target: torch.dtype, source: torch.dtype) -> None:
    into, read = views(target), views(source)
    targets, sources = into[::2] + into[1:-2:2], read[1::2] + read[:-2:2]
    sources[0][5], sources[0][6] = math.inf, math.nan
    bases = [torch.as_strided(one, (one.untyped_storage().nbytes() // one.itemsize,), (1,), 0) for one in targets]
    around = [base.clone() for base in bases]
    expected = [
        torch.as_strided(copy, one.shape, one.stride(), one.storage_offset())
        for copy, one in zip(around, targets, strict=True)
    ]
    for one, other in zip(expected, sources, strict=True):
        one.copy_(other)
    fused_copy_(targets, sources)
    same_bits(targets, expected)
    same_bits(bases, around)  # and what lies between them stays


@WITH_ROUNDING
def test_copies_of_mixed_and_unknown_dtypes() -> None:
    sources = [numbers(4100, 1), numbers(50, 2).to(BF16), numbers(70, 3).double(), torch.arange(9, device=DEVICE)]
    targets = [torch.zeros(4100, device=DEVICE, dtype=BF16), *(torch.zeros_like(source) for source in sources[1:])]
    fused_copy_(targets, sources)
    same_bits(targets, [source.to(target.dtype) for target, source in zip(targets, sources, strict=True)])


def test_only_equal_shapes_are_pairs() -> None:
    with pytest.raises(ValueError, match=r"a target of shape \(3,\) and a source of shape \(4,\) are no pair"):
        fused_copy_([torch.zeros(3, device=DEVICE)], [torch.zeros(4, device=DEVICE)])
    with pytest.raises(ValueError, match="equal length"):
        fused_momentum_([torch.zeros(3, device=DEVICE)], [torch.zeros(4, device=DEVICE)], momentum=0.9, nesterov=True)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_update_is_taken_off_with_the_factor_of_its_tensor(dtype: torch.dtype) -> None:
    masters, updates = views(FP32)[::2], views(dtype)[1::2]
    factors = [0.1 * (index + 1) for index in range(len(masters))]
    keeps = [1.0 / (index + 1) for index in range(len(masters))]
    for _ in range(2):
        found, decayed = clones(masters), clones(masters)
        fused_subtract_(found, updates, factors)
        fused_subtract_(decayed, updates, factors, keeps)
        pairs = list(zip(masters, updates, factors, keeps, strict=True))
        same_bits(found, [fma(-factor, update.float(), master) for master, update, factor, _ in pairs])
        expected = [fma(-factor, update.float(), times(keep, master)) for master, update, factor, keep in pairs]
        same_bits(decayed, expected)
        factors = [factor / 3 for factor in factors]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("count", COUNTS)
def test_lists_of_copies_and_updates(count: int, place: str) -> None:
    values = [numbers(n, n).to(BF16).float() for n in lengths(count)]
    targets = Guarded([torch.zeros_like(value, dtype=BF16) for value in values], place)
    fused_copy_(targets.views, values)
    same_bits(targets.views, [value.to(BF16) for value in values])
    masters = Guarded([numbers(n, n + 1) for n in lengths(count)], place)
    before = [master.clone() for master in masters.views]
    fused_subtract_(masters.views, targets.views, [0.3] * count)
    pairs = zip(before, targets.views, strict=True)
    same_bits(masters.views, [fma(-0.3, update.float(), master) for master, update in pairs])
    targets.check_around()
    masters.check_around()


def test_empty_lists_and_empty_tensors() -> None:
    for length in (0, 1):
        nothing = [torch.zeros(0, device=DEVICE)] * length
        for roles, rule, _ in RULES.values():
            rule(*[nothing] * roles)
        fused_copy_(nothing, nothing)
        fused_subtract_(nothing, nothing, [1.0] * length)
        elementwise.copy_all_(nothing, nothing)


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
def test_the_bits_of_torchs_foreach_kernels() -> None:
    """Where a formula is one operation of torch, ours has its bits."""
    masters, updates = ([numbers(n, seed + n) for n in lengths(40)] for seed in (1, 2))
    expected = [master.clone() for master in masters]
    torch._foreach_add_(expected, updates, alpha=-0.37)
    elementwise.subtract_scaled_(masters, updates, [0.37] * 40)
    same_bits(masters, expected)
    targets = [torch.zeros_like(update, dtype=BF16) for update in updates]
    elementwise.copy_all_(targets, updates)
    rounded = [torch.zeros_like(target) for target in targets]
    torch._foreach_copy_(rounded, updates)
    same_bits(targets, rounded)

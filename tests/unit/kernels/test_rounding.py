from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from layerwise.kernels.rounding import round_stochastically

BF16_ULP = 2.0**-7
"""The step from 1.0 to the next bf16 number."""


def rounded(x: Tensor, seed: int = 0) -> Tensor:
    return round_stochastically(x, torch.Generator().manual_seed(seed))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x.view(torch.int32)


def every_bf16() -> Tensor:
    """All 65,536 of them, as fp32."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()


def test_every_number_that_bf16_can_hold_stays_as_it_is_bit_by_bit() -> None:
    exact = every_bf16()
    finite = exact[torch.isfinite(exact)]
    for seed in range(20):
        assert torch.equal(bits(rounded(finite, seed)), bits(finite.to(torch.bfloat16)))


def test_inf_and_nan_stay_what_they_are() -> None:
    special = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    for seed in range(20):
        found = rounded(special, seed)
        assert found[:2].tolist() == [math.inf, -math.inf]
        assert found[2:].isnan().all()
    # A NaN whose payload is all in the bits that bf16 lacks must not become inf.
    assert rounded(torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)).isnan().all()


def test_zeros_keep_their_sign() -> None:
    found = rounded(torch.tensor([0.0, -0.0]))
    assert torch.equal(torch.signbit(found), torch.tensor([False, True]))
    assert (found == 0).all()


def test_the_largest_bf16_number_stays_finite() -> None:
    largest = torch.finfo(torch.bfloat16).max
    for seed in range(20):
        assert rounded(torch.tensor([largest, -largest]), seed).tolist() == [largest, -largest]


def test_denormals_go_up_or_down_by_one_step_and_never_lose_their_sign() -> None:
    tiny = torch.arange(1, 2**16, 37, dtype=torch.int32)
    for sign in (0, -(2**31)):
        x = (tiny + sign).view(torch.float32)
        found = bits(rounded(x)).to(torch.int32) & 0x7FFF
        assert set(found.tolist()) == {0, 1}
        assert torch.equal(torch.signbit(rounded(x)), torch.signbit(x))


def test_a_number_goes_to_one_of_its_two_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20_000, generator=generator) * torch.exp(10 * torch.randn(20_000, generator=generator))
    found = rounded(x).float()
    below = (x.view(torch.int32) & -(2**16)).view(torch.float32)  # towards zero
    above = ((x.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    assert ((found == below) | (found == above)).all()
    assert (found == below).any()
    assert (found == above).any()


@pytest.mark.parametrize("numerator", [1, 1000, 16_384, 32_768, 49_152, 65_535])
@pytest.mark.parametrize("base", [1.0, -1.0, 96.0, 1.9921875])
def test_the_share_that_goes_up_is_how_far_up_the_number_lies(base: float, numerator: int) -> None:
    """Also where the step up is a step to the next exponent (1.9921875 is the last bf16 number below 2)."""
    draws = 200_000
    share = numerator / 2**16
    step = BF16_ULP * 2.0 ** math.floor(math.log2(abs(base)))
    x = torch.full((draws,), base + math.copysign(share * step, base))
    found = rounded(x, seed=numerator).float()
    up = int((found.abs() > abs(base)).sum())
    # Five standard deviations of a binomial, and one for the smallest ones.
    assert abs(up - draws * share) <= 5 * math.sqrt(draws * share * (1 - share)) + 1


def test_the_mean_of_many_roundings_is_the_number_and_that_of_plain_roundings_is_not() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(200, generator=generator) + 1
    trials = 4000
    total = torch.zeros(200, dtype=torch.float64)
    for seed in range(trials):
        total += rounded(x, seed).double()
    error = (total / trials - x.double()).abs().max()
    assert error < 5 * BF16_ULP / 2 / math.sqrt(trials)
    assert (x.to(torch.bfloat16).double() - x.double()).abs().max() > error * 4


def test_the_same_generator_state_gives_the_same_bits_and_another_one_others() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    assert torch.equal(rounded(x, 7), rounded(x, 7))
    assert not torch.equal(rounded(x, 7), rounded(x, 8))


def test_the_users_generator_and_the_source_are_not_touched() -> None:
    x = torch.randn(100)
    before, state = x.clone(), torch.get_rng_state()
    rounded(x)
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)

"""Eight-bit codes: the definition in torch against an oracle, against torchao, and by hand where it matters."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerwise.kernels import encoding
from layerwise.kernels.codec import Codes, decode, encode_by_torch
from layerwise.kernels.encoders import Encoder, choose_encoder, encoder_tile
from layerwise.kernels.encoding import encode, encode_both_into, encode_into
from layerwise.layout.recipes import FP8_ROWS, MX_E4M3, MX_E5M2, BlockFormat, codes_nbytes
from tests.codes import FORMATS, hard_numbers
from tests.marks import sampled
from tests.reference import block_formats as reference

DTYPES = [torch.float32, torch.bfloat16]
NAN, INF = math.nan, math.inf
MX = {"mx e4m3": MX_E4M3, "mx e5m2": MX_E5M2}


def code_bytes(codes: Codes) -> list[int]:
    return codes.values.view(torch.uint8).flatten().tolist()


def row(*numbers: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64).to(dtype)


def check_against_oracle(x: Tensor, format: BlockFormat) -> None:
    found = encode(x, format)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in x.shape[:-2])) if x.ndim > 2 else [...]:
        at = tuple(index.reshape(-1).tolist()) if isinstance(index, Tensor) else index
        values, scales = reference.encoded(x[at].float().numpy(), format.element, format.block, format.scale)
        assert torch.equal(found.values[at].view(torch.uint8), torch.from_numpy(values))
        expected = torch.from_numpy(scales)
        torch.testing.assert_close(found.scales[at], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 128), (3, 5, 70), (130, 259), (1, 1), (2, 3, 1, 33)])
def test_codes_are_those_of_the_oracle(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for run in (1, 32):
        check_against_oracle(hard_numbers(shape, dtype, seed=sum(shape), run=run), FORMATS[name])


@pytest.mark.parametrize("name", sampled(MX, "mx e4m3"))
def test_every_16_bit_number_alone_and_beside_a_larger_one(name: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    check_against_oracle(every.unsqueeze(1), MX[name])
    check_against_oracle(torch.stack([every, torch.full_like(every, 1.0)], 1), MX[name])


def test_the_oracle_knows_the_numbers_of_torchs_types() -> None:
    for element, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        known = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        torch.testing.assert_close(torch.from_numpy(reference.numbers(element)), known, rtol=0, atol=0, equal_nan=True)


def test_a_scale_is_the_power_of_two_that_brings_the_largest_number_under_512() -> None:
    codes = encode(row(1.0, -0.75, 0.0625), MX_E4M3)
    assert codes.scales.tolist() == [[127 - 8]]
    assert codes.values.float().tolist() == [[256.0, -192.0, 16.0]]
    assert encode(row(1.99), MX_E4M3).scales.tolist() == [[127 - 8]]
    assert encode(row(2.0), MX_E4M3).scales.tolist() == [[127 - 7]]
    assert encode(row(2.0), MX_E5M2).scales.tolist() == [[127 - 14]]


def test_ties_go_to_the_even_code() -> None:
    """In [256, 512) elements of e4m3 are 32 apart, below 2^-6 they are 2^-9 apart."""
    codes = encode(row(256, 272, 304, 272.001, 303.999, -272), MX_E4M3)
    assert codes.values.float().tolist() == [[256, 256, 320, 288, 288, -256]]
    small = encode(row(256, 2**-10, 1.5 * 2**-9, 2.5 * 2**-9, 0.999 * 2**-10, -(2**-10)), MX_E4M3)
    assert small.values.float().tolist() == [[256, 0, 2**-8, 2**-8, 0, 0]]
    assert code_bytes(small)[-1] == 128  # and what rounds to zero keeps its sign


def test_what_is_too_large_is_saturated() -> None:
    """With a power of two for a scale the upper eighth of the last binade has no element of its own."""
    assert encode(row(448, 449, 480, 511.9, -511.9), MX_E4M3).values.float().tolist() == [[448, 448, 448, 448, -448]]
    assert encode(row(65535.0, -65000.0), MX_E5M2).values.float().tolist() == [[57344, -57344]]
    assert encode(row(3.0, -3.0), FP8_ROWS).values.float().tolist() == [[448, -448]]


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_with_their_sign(name: str) -> None:
    codes = encode(row(0.0, -0.0), FORMATS[name])
    assert code_bytes(codes) == [0, 128]
    assert codes.scales.tolist() == [[0 if FORMATS[name].scale == "e8m0" else 2.0**-126]]
    assert str(decode(codes).tolist()) == "[[0.0, -0.0]]"


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_makes_its_block_nan_and_no_other(name: str) -> None:
    format = FORMATS[name]
    x = torch.ones(2 * format.block[0], 2 * format.block[1])
    x[0, 3], x[0, 4], x[0, 5] = NAN, INF, -2.0
    x.view(torch.int32)[0, 6] = -1  # a NaN with its sign and all of its bits set
    codes = encode(x, format)
    back = decode(codes, torch.float32)
    tall, wide = format.block
    assert bool(back[:tall, :wide].isnan().all())
    back[:tall, :wide] = 1.0
    assert bool((back == 1.0).all())
    assert code_bytes(codes)[3:7] == [127, 127, 128, 127]
    first = codes.scales.flatten()[0]
    assert bool(first == 255) if format.scale == "e8m0" else bool(first.isnan())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inf_never_becomes_a_finite_number(name: str, sign: float) -> None:
    for dtype in DTYPES:
        back = decode(encode(row(1.0, sign * INF, 0.0, dtype=dtype), FORMATS[name]), dtype)
        if FORMATS[name].scale == "e8m0":
            assert back.tolist() == [[0.0, sign * INF, 0.0]]
        else:
            assert bool(back.isnan().all())


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_and_the_least_numbers(name: str) -> None:
    largest, least = torch.finfo(torch.float32).max, 2.0**-149
    back = decode(encode(row(largest, -largest), FORMATS[name]), torch.float32)
    assert bool(back.isfinite().all())
    torch.testing.assert_close(back, row(largest, -largest), rtol=0.125, atol=0.0)
    for number in (2.0**-118, 2.0**-126, 2.0**-127, 2.0**-130):
        assert decode(encode(row(number), FORMATS[name]), torch.float32).item() == number
    assert decode(encode(row(least), FORMATS[name]), torch.float32).item() == 0.0


def test_scales_below_the_least_of_their_byte_are_that() -> None:
    for number, byte in ((2.0**-117, 2), (2.0**-118, 1), (2.0**-119, 0), (2.0**-130, 0), (2.0**-149, 0)):
        assert encode(row(number), MX_E4M3).scales.item() == byte
    assert encode(row(2.0**-128), MX_E4M3).values.float().item() == 0.5  # in units of 2^-127


def test_a_scale_in_fp32_is_one_division_and_a_code_one_product() -> None:
    x = row(0.3, -0.1, 0.07)
    codes = encode(x, FP8_ROWS)
    largest, top = torch.tensor(0.3), torch.tensor(448.0)
    assert codes.scales.item() == (largest / top).item()
    assert torch.equal(codes.values.float(), (x * (top / largest)).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", FORMATS)
def test_a_short_block_is_as_good_as_one_that_is_filled_up_with_zeros(name: str) -> None:
    format = FORMATS[name]
    x = hard_numbers((2, 131, 141), torch.float32, seed=3)
    found, whole = encode(x, format), encode(torch.nn.functional.pad(x, (0, 115, 0, 125)), format)
    assert torch.equal(found.values.view(torch.uint8), whole.values[..., :131, :141].view(torch.uint8))
    rows, cols = found.scales.shape[-2:]
    torch.testing.assert_close(found.scales, whole.scales[..., :rows, :cols], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_both_directions_are_the_codes_of_the_matrix_and_of_its_transpose(name: str, dtype: torch.dtype) -> None:
    x = hard_numbers((2, 40, 150), dtype, seed=4)
    before = x.clone()
    rows, cols = Codes.empty((2, 40, 150), FORMATS[name]), Codes.empty((2, 150, 40), FORMATS[name])
    encode_both_into(x, rows, cols)
    for found, expected in ((rows, encode(x, FORMATS[name])), (cols, encode(x.mT.contiguous(), FORMATS[name]))):
        assert code_bytes(found) == code_bytes(expected)
        torch.testing.assert_close(found.scales, expected.scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(x.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("name", MX)
def test_decoding_rounds_nothing_and_encoding_again_gives_the_same_numbers(name: str) -> None:
    x = torch.randn(64, 256) * 2.0 ** torch.randint(-30, 30, (64, 1))
    once = decode(encode(x, MX[name]))
    assert torch.equal(once.float(), decode(encode(x, MX[name]), torch.float32))
    assert torch.equal(decode(encode(once, MX[name])), once)


@pytest.mark.parametrize(("name", "bound"), [("mx e4m3", 2.0**-4), ("mx e5m2", 2.0**-3), ("fp8 rows", 2.0**-4)])
def test_a_number_near_the_largest_of_its_block_keeps_its_bits(name: str, bound: float) -> None:
    x = 1.0 + 0.74 * torch.rand(64, 256)
    back = decode(encode(x, FORMATS[name]), torch.float32)
    assert float(((back - x) / x).abs().max()) <= bound


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_counted_without_tensors(name: str) -> None:
    for shape in ((4, 64), (130, 259), (3, 5, 70), (0, 64), (1, 1)):
        assert Codes.empty(shape, FORMATS[name]).nbytes == codes_nbytes(shape, FORMATS[name])
        encode(torch.zeros(shape), FORMATS[name])


def test_what_cannot_be_encoded_is_refused() -> None:
    x = torch.zeros(4, 64)
    with pytest.raises(TypeError, match=r"only bf16 and fp32 are encoded, got torch\.float16"):
        encode(x.half(), MX_E4M3)
    with pytest.raises(ValueError, match=r"a tensor of shape \(64,\) has no blocks"):
        encode(x[0], MX_E4M3)
    with pytest.raises(
        ValueError, match=r"the values of the codes do not fit .* of shape \(4, 64\) .* of shape \(64, 4\)"
    ):
        encode_into(x, Codes.empty((64, 4), MX_E4M3))
    with pytest.raises(ValueError, match="the scales of the codes do not fit"):
        encode_into(x, Codes(Codes.empty((4, 64), MX_E4M3).values, torch.zeros(4, 1, dtype=torch.uint8), MX_E4M3))
    with pytest.raises(ValueError, match="the values of the codes do not fit"):
        encode_both_into(x, Codes.empty((4, 64), MX_E4M3), Codes.empty((4, 64), MX_E4M3))


HOPPER: dict[str, Any] = {
    "device": "cuda",
    "capability": (9, 0),
    "triton": "3.6.0",
    "format": MX_E4M3,
    "dtype": "bf16",
    "shape": (8, 4096, 64),
}


def test_on_a_gpu_with_triton_our_own_kernel_writes_codes() -> None:
    assert choose_encoder(**HOPPER) == Encoder("triton", "both directions from one read through Triton 3.6.0")
    for format in FORMATS.values():
        tall, wide = format.block
        assert choose_encoder(**{**HOPPER, "format": format}).backend == "triton"
        for rows, cols in ((True, True), (True, False), (False, True)):
            tile = encoder_tile(format, rows=rows, cols=cols)
            assert not rows or (tile.rows % tall, tile.cols % wide) == (0, 0)
            assert not cols or (tile.cols % tall, tile.rows % wide) == (0, 0)


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"device": "cpu"}, "cpu"),
        ({"capability": None}, "CUDA"),
        ({"triton": None}, "pip install triton"),
        ({"shape": (8, 2**21)}, "2097152"),
        ({"shape": (2**16, 8, 8)}, "65536"),
        ({"shape": (4, 64)}, "multiples of 8"),
        ({"shape": (64, 100)}, "multiples of 8"),
        ({"dtype": "fp32"}, "fp32"),
        ({"format": BlockFormat("e4m3", (1, 16), "fp32")}, "(1, 16)"),
    ],
)
def test_elsewhere_torch_writes_codes_and_the_reason_says_why(facts: dict[str, Any], word: str) -> None:
    chosen = choose_encoder(**{**HOPPER, **facts})
    assert chosen.backend == "torch"
    assert word in chosen.reason


def check_against_torchao(x: Tensor, name: str) -> int:
    """How many codes were compared bit by bit. Two things differ. The sign of a NaN code is that of the input there, or
    of the machine's Inf / Inf. And the byte 0 of a scale means 2^-126 where torchao divides and 2^-127 where it
    multiplies, so that blocks of numbers below 2^-118 (2^-111 for e5m2) come back halved; by the format's definition it
    is 2^-127 both times."""
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    format = MX[name]
    found = encode(x, format)
    scales, values = to_mx(x, found.values.dtype, 32, ScaleCalculationMode.FLOOR)
    assert torch.equal(scales.view(torch.uint8), found.scales)
    ours, theirs = found.values, values
    assert torch.equal(ours.float().isnan(), theirs.float().isnan())
    is_halved = (found.scales == 0).repeat_interleave(32, -1)
    is_number = ~ours.float().isnan()
    compared = is_number & ~is_halved
    assert int(compared.sum()) > x.numel() // 2
    assert torch.equal(ours.view(torch.uint8)[compared], theirs.view(torch.uint8)[compared])
    halved = (x.float() * 2.0**126).to(values.dtype)[is_halved]
    assert torch.equal(halved.view(torch.uint8), theirs.view(torch.uint8)[is_halved])
    return int(compared.sum())


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'layerwise[dev]'")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MX)
def test_codes_are_those_of_torchao(name: str, dtype: torch.dtype) -> None:
    check_against_torchao(hard_numbers((600, 320), dtype, seed=5), name)
    check_against_torchao(hard_numbers((600, 320), dtype, seed=6, run=1), name)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'layerwise[dev]'")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MX)
def test_ten_million_codes_are_those_of_torchao(name: str, dtype: torch.dtype) -> None:
    compared = sum(check_against_torchao(hard_numbers((4000, 256), dtype, seed=10 + seed), name) for seed in range(13))
    assert compared >= 10**7


def torchs_own(x: Tensor, rows: Codes, cols: Codes | None) -> None:
    encode_by_torch(x, rows)
    if cols is not None:
        encode_by_torch(x.mT, cols)


def one_code_off(x: Tensor, rows: Codes, cols: Codes | None) -> None:
    torchs_own(x, rows, cols)
    rows.values.view(torch.uint8).view(-1)[77] ^= 1


def no_compiler(x: Tensor, rows: Codes, cols: Codes | None) -> None:
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize(
    ("kernel", "calls", "said"),
    [(torchs_own, 4, ""), (one_code_off, 1, "other bits than torch"), (no_compiler, 1, "no compiler here")],
)
def test_a_kernel_that_has_other_bits_or_does_not_run_is_not_used(
    kernel: Callable[[Tensor, Codes, Codes | None], None], calls: int, said: str
) -> None:
    called = mock.Mock(side_effect=kernel)
    fake = SimpleNamespace(fused_encode=called)
    encoding._is_exact.cache_clear()
    x = torch.randn(64, 96).bfloat16()
    expected = encode(x, MX_E4M3)
    with (
        mock.patch.dict(sys.modules, {"layerwise.kernels.triton_codec": fake}),
        mock.patch.object(encoding, "encoder_for", return_value=Encoder("triton", "")),
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        for _ in range(2 if said else 1):
            found = encode(x, MX_E4M3)
    encoding._is_exact.cache_clear()
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert called.call_count == calls
    assert len(heard) == bool(said)
    assert all(said in str(warning.message) for warning in heard)

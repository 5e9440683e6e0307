"""Our own kernel for codes, on a GPU or, with TRITON_INTERPRET=1, on the CPU: bit by bit what torch writes on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerwise.kernels.codec import Codes, decode, encode_by_torch
from layerwise.kernels.encoding import encode, encode_both_into
from layerwise.kernels.triton_codec import fused_encode
from layerwise.layout.recipes import BlockFormat
from tests.codes import FORMATS, hard_numbers
from tests.gpu.lists import DEVICE, IS_INTERPRETED

AROUND = 4096
NEEDS_GPU = pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
SMALL = [(128, 128), (8, 8), (40, 264), (2, 136, 72), (1, 2, 144, 16)]
LARGE = [] if IS_INTERPRETED else [(144, 272), (1024, 1408), (2, 504, 1504), (8, 40_000), (40_000, 8)]
DTYPES = [torch.bfloat16, torch.float32]


class Guarded:
    """Memory for codes in which nothing is right by chance, with memory around it that must stay as it is."""

    def __init__(self, shape: torch.Size, format: BlockFormat) -> None:
        self._all: list[tuple[Tensor, int]] = []
        wanted = Codes.empty(tuple(shape), format, DEVICE)
        values, scales = (self._inside(tensor) for tensor in (wanted.values, wanted.scales))
        self.codes = Codes(values, scales, format)

    def _inside(self, tensor: Tensor) -> Tensor:
        whole = torch.full((tensor.nbytes + 2 * AROUND,), 0x55, dtype=torch.uint8, device=DEVICE)
        self._all.append((whole, tensor.nbytes))
        inside = whole[AROUND : AROUND + tensor.nbytes].view(tensor.dtype)
        return inside.as_strided(tensor.shape, tensor.stride())

    def check(self, expected: Codes) -> None:
        same(self.codes, expected)
        for whole, nbytes in self._all:
            assert bool((whole[:AROUND] == 0x55).all())
            assert bool((whole[AROUND + nbytes :] == 0x55).all())


def same(found: Codes, expected: Codes) -> None:
    for one, other in ((found.values, expected.values), (found.scales, expected.scales)):
        left, right = (tensor.flatten().view(torch.uint8) for tensor in (one, other.to(one.device)))
        assert torch.equal(left, right)


def check(x: Tensor, format: BlockFormat) -> None:
    rows, cols = Guarded(x.shape, format), Guarded(x.mT.shape, format)
    fused_encode(x, rows.codes, cols.codes)
    rows.check(encode(x.cpu(), format))
    cols.check(encode(x.cpu().mT, format))


@pytest.mark.parametrize("shape", SMALL + LARGE)
@pytest.mark.parametrize("name", FORMATS)
def test_both_directions_have_the_bits_that_torch_writes(name: str, shape: tuple[int, ...]) -> None:
    for run in (32,) if IS_INTERPRETED else (32, 1):
        check(hard_numbers(shape, torch.bfloat16, seed=sum(shape), run=run).to(DEVICE), FORMATS[name])


@pytest.mark.parametrize("name", FORMATS)
def test_one_direction_alone(name: str) -> None:
    x = hard_numbers((136, 56), torch.bfloat16, seed=1).to(DEVICE)
    rows, cols = Guarded(x.shape, FORMATS[name]), Guarded(x.mT.shape, FORMATS[name])
    fused_encode(x, rows.codes, None)
    fused_encode(x, None, cols.codes)
    rows.check(encode(x.cpu(), FORMATS[name]))
    cols.check(encode(x.cpu().mT, FORMATS[name]))


@pytest.mark.parametrize("name", FORMATS)
def test_views(name: str) -> None:
    whole = hard_numbers((2, 40, 112), torch.bfloat16, seed=2).to(DEVICE)
    cut = whole[:1, 16:, 16:], whole[0, 8:, 3:107], whole[0, ::5, ::2], whole[0, :8].mT
    for view in (whole[0].mT, *cut, whole.view(2, 5, 8, 112).transpose(0, 1)):
        check(view, FORMATS[name])


def test_nothing_to_encode() -> None:
    for shape in ((0, 64), (64, 0), (0, 8, 8)):
        x = torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
        check(x, FORMATS["mx e4m3"])


@NEEDS_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_torch_writes_and_reads_the_same_bits_on_both_devices(name: str, dtype: torch.dtype) -> None:
    x = hard_numbers((1024, 1000), dtype, seed=3)
    here, there = encode(x, FORMATS[name]), Codes.empty(tuple(x.shape), FORMATS[name], DEVICE)
    encode_by_torch(x.to(DEVICE), there)
    same(there, here)
    for back in DTYPES:
        found, expected = decode(there, back).cpu(), decode(here, back)
        bits = torch.int16 if back == torch.bfloat16 else torch.int32
        assert torch.equal(found.isnan(), expected.isnan())
        numbers = ~expected.isnan()
        assert torch.equal(found.view(bits)[numbers], expected.view(bits)[numbers])


@NEEDS_GPU
@pytest.mark.parametrize("name", FORMATS)
def test_sixteen_million_numbers_of_any_bits(name: str) -> None:
    """Half of them random bits, half of them normal, against torch on the same device, which is checked above."""
    torch.manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (2, 4, 1024, 2048), device=DEVICE).to(torch.int32).view(torch.float32)
    bits[1] = torch.randn_like(bits[1])
    x = bits.to(torch.bfloat16)
    rows, cols = Guarded(x.shape, FORMATS[name]), Guarded(x.mT.shape, FORMATS[name])
    fused_encode(x, rows.codes, cols.codes)
    for found, given in ((rows, x), (cols, x.mT)):
        expected = Codes.empty(tuple(given.shape), FORMATS[name], DEVICE)
        encode_by_torch(given, expected)
        found.check(expected)


def test_quotients_are_those_of_a_division_for_every_magnitude() -> None:
    """Every magnitude of bf16 is the largest of a row; what is beside it sees the last bit of its factor now and then."""
    largest = torch.arange(1 << 15, device=DEVICE).to(torch.int16).view(torch.bfloat16)[:: 64 if IS_INTERPRETED else 1]
    shares = (1.0, 0.9375, 0.6, -0.3, 0.05, -1.0, 0.7, 0.0)
    x = torch.stack([(largest.float() * share).bfloat16() for share in shares], -1)
    rows = Guarded(x.shape, FORMATS["fp8 rows"])
    fused_encode(x, rows.codes, None)
    expected = Codes.empty(tuple(x.shape), FORMATS["fp8 rows"], DEVICE)
    encode_by_torch(x, expected)
    rows.check(expected)


@NEEDS_GPU
def test_the_kernel_is_what_runs_on_a_gpu() -> None:
    x = hard_numbers((256, 384), torch.bfloat16, seed=4).to(DEVICE)
    encode(x, FORMATS["mx e4m3"])  # the kernel is tried first, once
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rows, cols = Guarded(x.shape, FORMATS["mx e4m3"]), Guarded(x.mT.shape, FORMATS["mx e4m3"])
        encode_both_into(x, rows.codes, cols.codes)
        torch.cuda.synchronize()
    assert sum(event.count for event in profile.key_averages() if "encode_kernel" in event.key) == 1

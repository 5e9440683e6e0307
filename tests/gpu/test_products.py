"""Our own product kernels against float64, on a GPU or, with TRITON_INTERPRET=1, on the CPU (fp16 only: the interpreter
rounds bf16 wrongly)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.kernels.products import FULL_TILE, SYMMETRIC_TILE, Tile

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if not IS_INTERPRETED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from layerwise.kernels import fused_newton_schulz, triton_products
from layerwise.kernels.triton_norms import normalised
from layerwise.kernels.triton_products import full, symmetric

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.float16, torch.bfloat16]
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 4e-3}
if IS_INTERPRETED:
    SHAPES = [(2, 37, 70)]
    TILES = [Tile(16, 16, 16, 4, 2), Tile(16, 32, 16, 4, 2), Tile(16, 16, 32, 4, 2, parts=1)]
else:
    SHAPES = [(3, 256, 512), (2, 201, 333), (2, 1000, 1304), (5, 8, 16)]
    TILES = [SYMMETRIC_TILE, FULL_TILE, Tile(128, 128, 64, 4, 4, parts=1)]
FIRST = TILES[0]


@pytest.fixture(autouse=True)
def nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element that no kernel writes shows as NaN."""
    fresh = triton_products.new_batch
    monkeypatch.setattr(triton_products, "new_batch", lambda *args: fresh(*args).fill_(torch.nan))


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values that `dtype` can hold, in rows that begin at multiples of 16 bytes."""
    batch, rows, cols = shape
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)
    return triton_products.new_batch(batch, rows, cols, dtype, values.device).copy_(values)


def symmetric_pair(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two batches that commute, so that their product is symmetric."""
    x = gaussian(2, size, 2 * size, dtype=torch.float64)
    a = x @ x.mT / (2 * size)
    return tuple(triton_products.new_batch(2, size, size, dtype, a.device).copy_(m) for m in (a, a @ a + 2 * a))  # type: ignore[return-value]


def assert_near(found: Tensor, expected: Tensor, *, dtype: torch.dtype) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e}"  # NaN is not


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_gram_matrix_is_right_and_symmetric_in_both_orientations(
    shape: tuple[int, int, int], dtype: torch.dtype, tile: Tile
) -> None:
    x = gaussian(*shape, dtype=dtype)
    scales = torch.rand(shape[0], device=DEVICE) + 0.5
    expected = x.double() @ x.double().mT * scales.double()[:, None, None]
    wide = symmetric(x, x, tile=tile, scales=scales, right_t=True)
    tall_x = triton_products.new_batch(shape[0], shape[2], shape[1], dtype, x.device).copy_(x.mT)
    tall = symmetric(tall_x, tall_x, tile=tile, scales=scales, left_t=True)
    for found in (wide, tall):
        assert_near(found, expected, dtype=dtype)
        assert torch.equal(found, found.mT)
    assert torch.equal(wide, tall)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [shape[1] for shape in SHAPES])
def test_addends_and_the_diagonal_are_added_once(size: int, dtype: torch.dtype, tile: Tile) -> None:
    a, z = symmetric_pair(size, dtype)
    wide_a, wide_z = a.double(), z.double()
    one = symmetric(a, a, tile=tile, alpha=2.0, addends=((a, -3.0),))
    assert_near(one, 2 * wide_a @ wide_a - 3 * wide_a, dtype=dtype)
    two = symmetric(a, z, tile=tile, addends=((a, 2.0), (z, 3.0)), diagonal=0.5)
    eye = torch.eye(size, dtype=torch.float64, device=DEVICE)
    assert_near(two, wide_a @ wide_z + 2 * wide_a + 3 * wide_z + 0.5 * eye, dtype=dtype)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_product_adds_and_scales(shape: tuple[int, int, int], dtype: torch.dtype, tile: Tile) -> None:
    _, rows, cols = shape
    left, right = gaussian(2, rows, rows, dtype=dtype, seed=1), gaussian(2, rows, cols, dtype=dtype, seed=2)
    scales = torch.tensor([0.5, 1.5], device=DEVICE)
    found = full(left, right, tile=tile, alpha=0.5, addend=right, beta=3.0, scales=scales)
    product = left.double() @ right.double()
    assert_near(found, (0.5 * product + 3 * right.double()) * scales.double()[:, None, None], dtype=dtype)
    out = triton_products.new_batch(*product.shape, torch.float16, product.device)
    assert full(left, right, tile=tile, out=out) is out
    assert_near(out, product, dtype=torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_change_no_bits(dtype: torch.dtype) -> None:
    x = gaussian(*SHAPES[0], dtype=dtype)
    a = symmetric(x, x, tile=FIRST, right_t=True)
    for tile in TILES[1:]:
        assert torch.equal(symmetric(x, x, tile=tile, right_t=True), a)
        assert torch.equal(full(a, x, tile=tile, addend=x, beta=2.0), full(a, x, tile=FIRST, addend=x, beta=2.0))


def test_normalised_times_its_scale_has_norm_one_at_any_magnitude() -> None:
    magnitudes = torch.tensor([1.0, 1e-45, 1e-38, 1e-20, 1e20, 3e38], device=DEVICE)
    signs = gaussian(6, 9, 40).sign()
    found, scales, squared = normalised(signs * magnitudes[:, None, None], torch.float16)
    expected = signs / (9 * 40) ** 0.5
    for unit, norm_one in zip(found.double() * scales.double()[:, None, None], expected.double(), strict=True):
        assert_near(unit, norm_one, dtype=torch.float16)
    torch.testing.assert_close(squared, scales**2)


def test_zero_stays_zero_and_what_is_not_finite_becomes_nan_alone() -> None:
    x = gaussian(4, 9, 40)
    x[0] = 0.0
    x[1, 2, 3] = torch.inf
    x[2, 2, 3] = torch.nan
    found, scales, _ = normalised(x, torch.float16)
    unit = found.float() * scales[:, None, None]
    assert unit[0].count_nonzero() == 0
    assert unit[1].isnan().all()
    assert unit[2].isnan().all()
    assert_near(unit[3], x[3].double() / x[3].double().norm(), dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "shape", "method"),
    [
        ("polar_express", (2, 20, 50), "gram"),
        ("polar_express", (2, 50, 20), "standard"),
        ("cubic5", (2, 50, 20), "gram"),
    ],
)
def test_the_fused_form_evaluates_the_schedule(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int, int], method: str
) -> None:
    if IS_INTERPRETED:
        monkeypatch.setattr(triton_products, "symmetric_tile", lambda *_: TILES[0])
        monkeypatch.setattr(triton_products, "full_tile", lambda *_: TILES[1])
    schedule = coefficient_schedule(name, 5)
    x = gaussian(*shape)
    x[1] = 0.0
    expected = orthogonalize(x.double().cpu(), schedule=schedule, method="standard", dtype=torch.float64)
    found = fused_newton_schulz.orthogonalize_fused(x, schedule, method, torch.float16)
    assert found.is_contiguous()
    assert found[1].count_nonzero() == 0
    error = float((found.cpu().double() - expected).norm() / expected.norm())
    assert error <= 0.02
    other = orthogonalize(x.double().cpu(), schedule=(*schedule[:4], (1.5, -0.5, 0.0)), method="standard", dtype=torch.float64)  # fmt: skip
    assert float((found.cpu().double() - other).norm() / other.norm()) > 0.02

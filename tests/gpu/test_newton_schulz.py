"""Newton-Schulz with our own kernels on a Hopper GPU: the same bits in any batch, accuracy, one compilation for many
shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels import newton_schulz
from layerwise.kernels.facts import products_for
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.kernels.products import Products

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a Hopper GPU"
)

BF16 = torch.bfloat16
SCHEDULE = coefficient_schedule("polar_express", 5)
METHODS = ("standard", "gram")
SHAPES = [(1024, 1024), (1024, 4096), (3072, 1024), (768, 3072), (501, 1003), (40, 24), (1, 7)]


def gaussian(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def exact(update: Tensor) -> Tensor:
    """The schedule in float64."""
    return orthogonalize(update.double(), schedule=SCHEDULE, method="standard", dtype=torch.float64)


def with_torch_products(update: Tensor, method: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(newton_schulz, "products_for", lambda *_: Products("torch", "asked for"))
        return orthogonalize(update, schedule=SCHEDULE, method=method)


def test_products_are_our_own_here() -> None:
    device = torch.device("cuda", 0)
    assert products_for(device, BF16, BF16).backend == "triton"
    assert products_for(device, torch.float32, torch.float32).backend == "torch"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows_cols", SHAPES)
def test_a_matrix_alone_among_7_and_among_64_gives_the_same_bits(rows_cols: tuple[int, int], method: str) -> None:
    updates = gaussian(64, *rows_cols).to(BF16)
    alone = orthogonalize(updates[5:6], schedule=SCHEDULE, method=method)[0]
    assert torch.equal(orthogonalize(updates[3:10], schedule=SCHEDULE, method=method)[2], alone)
    assert torch.equal(orthogonalize(updates, schedule=SCHEDULE, method=method)[5], alone)
    assert torch.equal(orthogonalize(updates.mT.contiguous().mT, schedule=SCHEDULE, method=method)[5], alone)
    assert not torch.equal(orthogonalize(updates[6:7], schedule=SCHEDULE, method=method)[0], alone)


def inputs(kind: str, rows: int, cols: int) -> Tensor:
    match kind:
        case "random":
            return gaussian(2, rows, cols)
        case "low rank":
            return gaussian(2, rows, 16) @ gaussian(2, 16, cols)
        case "tiny":
            return gaussian(2, rows, cols) * 1e-36
        case "huge":
            return gaussian(2, rows, cols) * 1e34
        case _:
            short = min(rows, cols)
            left, right = (torch.linalg.qr(gaussian(2, side, short).double())[0] for side in (rows, cols))
            return ((left * torch.logspace(0, -4, short, device="cuda")) @ right.mT).float()


@pytest.mark.parametrize("kind", ["random", "low rank", "ill-conditioned", "tiny", "huge"])
@pytest.mark.parametrize("rows_cols", [(1024, 1024), (1024, 4096), (3072, 1024)])
def test_as_near_to_float64_as_the_standard_form_with_torch_products(
    monkeypatch: pytest.MonkeyPatch, rows_cols: tuple[int, int], kind: str
) -> None:
    update = inputs(kind, *rows_cols).to(BF16)
    expected = exact(update)
    ours = orthogonalize(update, schedule=SCHEDULE).double()
    theirs = with_torch_products(update, "standard", monkeypatch).double()
    assert float((ours - expected).norm()) <= 1.02 * float((theirs - expected).norm())


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_matrix_gives_zeros_and_a_non_finite_one_nan_and_neighbours_do_not_notice(method: str) -> None:
    update = gaussian(4, 300, 700)
    expected = orthogonalize(update, schedule=SCHEDULE, method=method)
    update[1] = 0.0
    update[2, 7, 9] = torch.nan
    found = orthogonalize(update, schedule=SCHEDULE, method=method)
    assert found[1].count_nonzero() == 0
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("method", METHODS)
def test_a_power_of_two_in_the_input_changes_no_bit(method: str) -> None:
    update = gaussian(2, 200, 500).to(BF16)
    expected = orthogonalize(update, schedule=SCHEDULE, method=method)
    for exponent in (-100, -21, 20, 100):
        assert torch.equal(orthogonalize(update * 2.0**exponent, schedule=SCHEDULE, method=method), expected)


def test_24_shapes_compile_no_more_than_the_first_few() -> None:
    from layerwise.kernels import chain_driver, triton_norms, triton_products

    kernels = [triton_products.symmetric_kernel, triton_products.full_kernel]
    kernels += [getattr(triton_norms, name) for name in ("square_sums_kernel", "scales_kernel", "rescale_kernel")]

    def compiled() -> int:
        found = sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)
        return found + chain_driver._cubin.cache_info().currsize

    def run(rows: int, cols: int) -> None:
        for method in METHODS:
            orthogonalize(gaussian(2, rows, cols).to(BF16), schedule=SCHEDULE, method=method)

    run(64, 160)
    run(160, 64)
    run(33, 77)
    before = compiled()
    for index in range(24):
        run(96 + 17 * index, 80 + 23 * index)
    assert compiled() == before

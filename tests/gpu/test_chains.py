"""Several products in one launch: the bits of one launch after the other, whatever the shapes, the batch and the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels.facts import has_own_kernels, why_no_chains

if not (torch.cuda.is_available() and has_own_kernels(torch.device("cuda", 0))):
    pytest.skip("needs a Hopper GPU and Triton", allow_module_level=True)

from layerwise.kernels import chain_driver, chains, facts
from layerwise.kernels.chain_driver import ChainUnavailable, Counted
from layerwise.kernels.fused_newton_schulz import orthogonalize_into, segment_products, workspace_nbytes
from layerwise.kernels.triton_products import Product, new_batch
from layerwise.layout import cost

DEVICE = torch.device("cuda", 0)
BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    *((24, 1024, 1024), (24, 1024, 4096), (24, 4096, 1024), (16, 768, 3072), (64, 768, 768), (9, 1920, 1920)),
    *((3, 1000, 1304), (2, 136, 136), (7, 520, 2048), (5, 137, 203), (5, 203, 137), (1, 64, 64), (3, 130, 130), (1, 1, 9)),
]  # fmt: skip


@contextmanager
def one_by_one() -> Iterator[None]:
    with mock.patch.object(chains, "chains_on", return_value=False):
        yield


@contextmanager
def launches() -> Iterator[list[int]]:
    """The numbers of products of all chains in here."""
    found: list[int] = []
    real = chains.launch_chain

    def noted(products: list[Product], *more: object) -> Counted:
        found.append(len(products))
        return real(products, *more)  # type: ignore[arg-type]

    with mock.patch.object(chains, "launch_chain", noted):
        yield found


def orthogonalized(x: Tensor, method: str, steps: int = 5, dtype: torch.dtype = BF16) -> Tensor:
    out = new_batch(*x.shape, dtype, x.device)
    # Whatever was in memory before must not matter: NaN in every dtype.
    workspace = torch.full((workspace_nbytes(x.shape, method, steps),), 255, dtype=torch.uint8, device=x.device)
    orthogonalize_into(out, x, workspace, coefficient_schedule("polar_express", steps), method)
    return out


def gaussian(*shape: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=DEVICE).to(BF16)


def test_there_are_chains_here() -> None:
    assert why_no_chains(DEVICE, FP16) == ""
    assert why_no_chains(DEVICE, BF16) == ""


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_chain_has_the_bits_of_single_launches(shape: tuple[int, int, int], method: str) -> None:
    x = gaussian(*shape)
    with one_by_one():
        expected = orthogonalized(x, method)
    with launches() as found:
        first = orthogonalized(x, method)
    assert expected.isfinite().all()
    assert torch.equal(first, expected)
    assert found == ([6, 10] if method == "gram" else [15] if shape[1] == shape[2] else [2] * 5)
    for _ in range(5):
        assert torch.equal(orthogonalized(x, method), expected)
    assert torch.equal(orthogonalized(x[-1:].contiguous(), method), expected[-1:])


@pytest.mark.parametrize("shape", [(16, 768, 3072), (7, 512, 2560), (5, 137, 1400)], ids=str)
def test_halves_of_a_batch_have_the_bits_of_the_whole(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = gaussian(*shape)
    whole, nbytes = orthogonalized(x, "gram"), workspace_nbytes(x.shape, "gram", 5)
    monkeypatch.setattr(cost, "HALVED_FROM", 0)
    workspace_nbytes.cache_clear()
    try:
        assert torch.equal(orthogonalized(x, "gram"), whole)
        assert workspace_nbytes(x.shape, "gram", 5) < nbytes
    finally:
        workspace_nbytes.cache_clear()


def test_large_matrices_go_one_by_one_and_so_do_steps_without_a_square() -> None:
    with launches() as found:
        orthogonalized(gaussian(1, 2056, 2056), "standard")
        assert not found
        out, x = (new_batch(2, 64, 64, BF16, DEVICE) for _ in range(2))
        workspace = torch.empty(workspace_nbytes(x.shape, "gram", 5), dtype=torch.uint8, device=DEVICE)
        orthogonalize_into(out, x.normal_(), workspace, coefficient_schedule("cubic5", 5), "gram")
    assert not found


def test_long_schedules_go_in_parts() -> None:
    x = gaussian(3, 64, 64)
    with launches() as found:
        long = orthogonalized(x, "standard", steps=10)
    assert found == [20, 10]
    with one_by_one():
        assert torch.equal(orthogonalized(x, "standard", steps=10), long)


def test_a_neighbour_that_is_zero_or_not_finite_changes_nothing() -> None:
    x = gaussian(8, 768, 768)
    expected = orthogonalized(x, "standard")
    bad = x.clone()
    bad[1], bad[4, 3, 3], bad[6] = 0.0, torch.nan, torch.inf
    found = orthogonalized(bad, "standard")
    assert found[1].count_nonzero() == 0
    assert found[4].isnan().all()
    for same in (0, 2, 3, 5, 7):
        assert torch.equal(found[same], expected[same])


@pytest.mark.parametrize("teams", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(8, 384), (5, 1000), (1, 128)], ids=str)
def test_teams_of_any_size_give_the_same_bits(shape: tuple[int, int], teams: int) -> None:
    """Small teams wait for each other all the time, which is what a deadlock would need."""
    batch, size = shape
    x = gaussian(batch, size, size).to(FP16) / size
    p, *others = (new_batch(batch, size, size, FP16, DEVICE) for _ in range(4))
    products, _ = segment_products((x,), None, coefficient_schedule("polar_express", 5)[2:], p, others)
    counters = torch.zeros(batch + 1, dtype=torch.int32, device=DEVICE)
    with one_by_one():
        chains.run([products], counters)
    expected = p.clone()
    with mock.patch.object(chain_driver, "teams_of", return_value=min(teams, batch)):
        for _ in range(20):
            p.fill_(torch.nan)
            counters.zero_()
            chains.run([products], counters)
            assert torch.equal(p, expected)
    assert len(set(counters[:-1].tolist())) == 1


def test_a_chain_that_cannot_be_launched_is_given_up_with_the_reason_and_its_products_run() -> None:
    x = gaussian(3, 256, 256)
    expected = orthogonalized(x, "gram")
    failing = mock.patch.object(
        chains, "launch_chain", side_effect=ChainUnavailable("cuLaunchKernel failed with error 1")
    )
    with mock.patch.dict(facts._chains), failing as launched:
        assert torch.equal(orthogonalized(x, "gram"), expected)
        assert launched.call_count == 1
        assert why_no_chains(DEVICE, FP16) == "cuLaunchKernel failed with error 1"
        words = facts.products_in_words(DEVICE, BF16, BF16)
    assert "one launch each: cuLaunchKernel failed" in words
    assert "several in one launch" in facts.products_in_words(DEVICE, BF16, BF16)


def test_beside_other_work_on_the_device() -> None:
    """Blocks that find no room wait for other kernels to end, and then for nothing else."""
    x, side = gaussian(12, 1024, 1024), gaussian(1, 4096, 4096)[0]
    expected = orthogonalized(x, "gram")
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(stream):
            for _ in range(20):
                side @ side
        found = orthogonalized(x, "gram")
        with torch.cuda.stream(stream):
            side @ side
        assert torch.equal(found, expected)
    torch.cuda.synchronize()

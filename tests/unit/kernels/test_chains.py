"""What chains rely on and no device is needed to see: that matrices do not get in each other's way, and that the driver and the
kernel mean the same numbers."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Iterator
from itertools import chain, product

import pytest
import torch
from torch import Tensor

from layerwise.config.coefficients import coefficient_schedule
from layerwise.kernels.facts import chains_on, products_in_words, why_no_chains
from layerwise.kernels.products import chain_pays, teams_of
from layerwise.layout import cost

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from layerwise.kernels import chain_driver, fused_newton_schulz
from layerwise.kernels.chains import Multiple, Strand
from layerwise.kernels.triton_products import Product
from tests.unit.kernels.chain_source import SOURCE, constant

SHAPES = [
    (3, 16, 16),
    (4, 16, 64),
    (5, 64, 16),
    (3, 16, 40),
    (2, 24, 16),
    (1, 16, 64),
    (3, 13, 13),
    (4, 9, 30),
    (5, 50, 11),
]


def strands(shape: tuple[int, int, int], method: str, steps: int, patch: pytest.MonkeyPatch) -> list[Strand]:
    """The products of a batch, in memory of its own, with nothing launched."""
    patch.setattr(fused_newton_schulz, "normalise_into", lambda *_: None)
    batch, rows, cols = shape
    update = torch.zeros(batch, rows, -(-cols // 8) * 8, dtype=torch.bfloat16)[:, :, :cols]
    nbytes = fused_newton_schulz.workspace_nbytes.__wrapped__(shape, method, steps)
    places = fused_newton_schulz._Places.of(update, torch.zeros(nbytes, dtype=torch.uint8))
    form = fused_newton_schulz._gram if method == "gram" else fused_newton_schulz._standard
    return form(places, update, coefficient_schedule("polar_express", steps))


def matrices(batches: tuple[Tensor, ...]) -> Iterator[range]:
    """The bytes of each matrix of a batch that lies in one memory, or in several."""
    for batch in batches:
        rows, cols = batch.shape[1:]
        for index in range(batch.shape[0]):
            first = batch.data_ptr() + index * batch.stride(0) * batch.element_size()
            yield range(first, first + ((rows - 1) * batch.stride(1) + cols) * batch.element_size())


def in_the_way(products: list[Product]) -> bool:
    """Whether what is written for one matrix lies on anything of another."""
    written: dict[int, set[range]] = {}
    touched: dict[int, set[range]] = {}
    for one in products:
        read = [one.left, *((right,) for right in (one.right,) if right is not None), *((x,) for x, _ in one.addends)]
        for operand in (*read, (one.out,)):
            for matrix, place in enumerate(matrices(operand)):
                touched.setdefault(matrix, set()).add(place)
        for matrix, place in enumerate(matrices((one.out,))):
            written.setdefault(matrix, set()).add(place)
    return any(
        mine.start < other.stop and other.start < mine.stop
        for matrix, neighbour in product(written, touched)
        if matrix != neighbour
        for mine, other in product(written[matrix], touched[neighbour])
    )


@pytest.mark.parametrize("halved_from", [0, cost.HALVED_FROM])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_a_strand_no_matrix_writes_where_another_has_anything(
    shape: tuple[int, int, int], method: str, steps: int, halved_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "HALVED_FROM", halved_from)
    for strand in strands(shape, method, steps, monkeypatch):
        assert not in_the_way([one for one in strand if isinstance(one, Product)])


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_strands_are_as_long_as_that_allows(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where small matrices lie in the place of the next large one, all in one strand would be too long: it is seen."""
    found = strands((4, 16, 24), method, 5, monkeypatch)
    assert [len(strand) for strand in found] == ([6, 1, 10, 1] if method == "gram" else [2, 1] * 5)
    assert in_the_way([one for one in chain(*found) if isinstance(one, Product)])
    assert [len(strand) for strand in strands((3, 16, 16), "standard", 5, monkeypatch)] == [15]


def test_a_step_without_a_square_has_no_product_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_newton_schulz, "normalise_into", lambda *_: None)
    update = torch.zeros(2, 16, 64, dtype=torch.bfloat16)
    nbytes = fused_newton_schulz.workspace_nbytes(update.shape, "gram", 5)
    places = fused_newton_schulz._Places.of(update, torch.zeros(nbytes, dtype=torch.uint8))
    found = list(chain(*fused_newton_schulz._gram(places, update, coefficient_schedule("cubic5", 5))))
    assert sum(isinstance(one, Multiple) for one in found) == 5


def test_the_driver_has_the_numbers_of_the_kernel() -> None:
    assert constant("STAGES") == chain_driver._STAGES
    assert constant("MAPS") == chain_driver._MAPS
    assert constant("PRODUCTS") == chain_driver.MOST_PRODUCTS
    assert constant("DEPTH") == chain_driver._DEPTH
    assert constant("BOX") == chain_driver._BOX
    box = 2 * constant("BOX") ** 2
    assert 4 * box == chain_driver._STAGE_NBYTES
    assert 6 * box == chain_driver._STAGING_NBYTES
    assert 3 * constant("GROUP") == chain_driver._THREADS
    barriers = 8 * (2 * constant("STAGES") + constant("TURNS") + 2 * 4 + 4) + 16 * constant("TURNS")
    assert barriers <= chain_driver._BARRIERS_NBYTES
    assert chain_driver._SHARED_NBYTES <= 227 * 1024


@pytest.mark.parametrize(("name", "layout"), [("Product", chain_driver._Product), ("Chain", chain_driver._Chain)])
def test_the_driver_lays_its_arguments_out_as_the_kernel_does(name: str, layout: type[ctypes.Structure]) -> None:
    body = re.search(rf"struct {name} {{(.*?)}};", SOURCE, re.DOTALL)
    assert body is not None
    fields = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        if line.strip():
            kind, names = re.match(r"\s*(.*?[\s*])(\w+(?:\[\w+\])?(?:,\s*\w+)*)\s*$", line, re.DOTALL).groups()  # type: ignore[union-attr]
            fields += [(kind.strip(), re.sub(r"\[.*", "", one.strip())) for one in names.split(",")]
    sizes = {
        "int": 4,
        "u32": 4,
        "float": 4,
        "Map": 8 * 128,
        "Product": 20 * ctypes.sizeof(chain_driver._Product),
    }
    offset = 0
    for kind, field in fields:
        size = 8 if kind.endswith("*") else sizes[kind]
        offset = -(-offset // min(size, 8)) * min(size, 8)
        assert getattr(layout, field).offset == offset, field
        assert getattr(layout, field).size == size, field
        offset += size
    alignment = 64 if name == "Chain" else 8
    assert ctypes.sizeof(layout) == -(-offset // alignment) * alignment


def test_teams_are_as_many_as_keep_a_device_busy() -> None:
    assert teams_of(24, 1024) == 1
    assert teams_of(24, 2048) == 4
    assert teams_of(1, 128) == 1
    assert teams_of(1000, 1024) == 45
    assert teams_of(2, 16384) == 2
    assert chain_pays(1024)
    assert not chain_pays(4096)


def test_there_are_no_chains_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert not chains_on(cpu, torch.float16)
    assert why_no_chains(cpu, torch.float16) == "there are none on cpu"
    assert products_in_words(cpu, torch.bfloat16, torch.bfloat16) == "torch: products on cpu are torch's"

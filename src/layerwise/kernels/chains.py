"""Products as values, and who computes a list of them: one launch after the other, or several in one.

[Note: Chains]
Products of a small batch leave much of a device idle while they begin and end, and Newton-Schulz is twenty of them in a row.
A chain (`chain.cu`) is one launch for several products of the same batch: a matrix goes on to its next product as soon as its
last one is in memory, whatever the others do. So nothing that a product writes may lie where another matrix has something
that is still read. Small matrices have a place of their own each, always; larger ones may have several matrices of another
memory in theirs, so they are products of a chain only where all matrices are of one size.

What a product gives is the same to the bit either way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.kernels.chain_driver import ChainProduct, launch_chain
from layerwise.kernels.facts import chains_on
from layerwise.kernels.products import CHAIN_TILE, full_tile, symmetric_tile, team_of
from layerwise.kernels.triton_products import all_tiles, full, lower_tiles, symmetric

# B: batch of equal-shaped matrices, P: part of it, R: rows, C: columns, M: the shorter of the two.


class Product(NamedTuple):
    """out = scale * (alpha * left @ right + sum of factor * addend + diagonal * I), of batches."""

    left: tuple[Tensor, ...]
    """One memory, or two that follow each other in the batch."""
    right: Tensor | None
    """None: left's own transpose, on the side where the product is the smaller one."""
    out: Tensor
    alpha: float = 1.0
    addends: tuple[tuple[Tensor, float], ...] = ()
    diagonal: float = 0.0
    scales: Tensor | None = None
    is_symmetric: bool = True


class Multiple(NamedTuple):
    """out = factor * matrix."""

    matrix: Tensor
    factor: float
    out: Tensor


def run(products: Sequence[Product | Multiple], counters: Tensor, team: int | None = None) -> None:
    """Compute them in this order. `counters` are as many int32 zeros as there are matrices."""
    tiles_done = 0
    for some in _in_chains(products):
        if isinstance(some, Multiple):
            torch.mul(some.matrix, some.factor, out=some.out)
        elif len(some) > 1 and chains_on(some[0].out.device, some[0].out.dtype):
            tiles_done = _run_chain(some, counters, tiles_done, team)
        else:
            for product in some:
                _run_alone(product)


def _in_chains(products: Sequence[Product | Multiple]) -> Iterator[list[Product] | Multiple]:
    """Products that may be one launch, together."""
    chain: list[Product] = []
    for product in products:
        is_next = isinstance(product, Product) and (product.is_symmetric or _is_square(product.out))
        if not is_next and chain:
            yield chain
            chain = []
        if isinstance(product, Multiple):
            yield product
        elif is_next:
            chain.append(product)
        else:
            yield [product]
    if chain:
        yield chain


def _is_square(x_BRC: Tensor) -> bool:
    return x_BRC.shape[1] == x_BRC.shape[2]


def _run_chain(products: Sequence[Product], counters: Tensor, tiles_done: int, team: int | None) -> int:
    """Returns how many tiles of each matrix have been counted by then."""
    batch, size, _ = products[0].out.shape
    found = []
    for product in products:
        rows, cols = product.out.shape[1:]
        tiles = (lower_tiles if product.is_symmetric else all_tiles)(rows, cols, CHAIN_TILE, product.out.device)
        found.append(ChainProduct(*product, tiles))
    return launch_chain(found, counters, tiles_done, team_of(batch, size) if team is None else team)


def _run_alone(product: Product) -> None:
    left, right, out, alpha, addends, diagonal, scales, is_symmetric = product
    if not is_symmetric:
        (addend, beta) = addends[0] if addends else (None, 0.0)
        assert right is not None
        full(
            left[0],
            right,
            tile=full_tile(*out.shape[1:]),
            alpha=alpha,
            addend=addend,
            beta=beta,
            scales=scales,
            out=out,
        )
        return
    tile, first = symmetric_tile(out.shape[1]), 0
    for x_PRC in left:
        which = slice(first, first + x_PRC.shape[0])
        first = which.stop
        is_tall = right is None and x_PRC.shape[1] > x_PRC.shape[2]
        symmetric(
            x_PRC,
            x_PRC if right is None else right,
            tile=tile,
            alpha=alpha,
            addends=addends,
            diagonal=diagonal,
            scales=None if scales is None else scales[which],
            left_t=is_tall,
            right_t=right is None and not is_tall,
            out=out[which],
        )

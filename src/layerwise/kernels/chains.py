"""Products as values, and who computes a list of them: one launch after the other, or several in one.

[Note: Chains]
Products of a small batch leave much of a device idle while they begin and end, and Newton-Schulz is twenty of them in a row.
A chain (`chain.cu`) is one launch for one or several products of the same batch: a matrix goes on to its next product as soon as its
last one is in memory, whatever the others do. So nothing that one of its products writes may lie where another matrix has
something that the chain still reads: who arranges memory says which products may be one.

What a product gives is the same to the bit either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from layerwise.kernels.chain_driver import MOST_PRODUCTS, ChainProduct, ChainUnavailable, Counted, launch_chain
from layerwise.kernels.facts import chains_on, give_up_chains
from layerwise.kernels.products import CHAIN_TILE, chain_pays, full_tile, symmetric_tile, teams_of
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


Section = list[Product | Multiple]
"""Products of one batch in whose course matrices do not get in each other's way."""


def run(sections: Iterable[Section], counters: Tensor) -> None:
    """Compute them in this order. `counters` are int32 zeros, one for each matrix and one more."""
    counted = Counted()
    for section in sections:
        done = 0
        try:
            while done < len(section) and _is_chain(section):
                counted = _run_chain(section[done : done + MOST_PRODUCTS], counters, counted)
                done += MOST_PRODUCTS
        except ChainUnavailable as error:  # at its first launch, if ever
            give_up_chains(section[0].out.device, _dtype(section[0]), str(error))
        for product in section[done:]:
            if isinstance(product, Multiple):
                torch.mul(product.matrix, product.factor, out=product.out)
            else:
                _run_alone(product)


def _is_chain(section: Section) -> TypeGuard[list[Product]]:
    """Also of one product: tiles that are taken one by one leave less idle at the end than tiles that are dealt out before."""
    if any(isinstance(product, Multiple) for product in section):
        return False
    out_BRC, dtype = section[0].out, _dtype(section[0])
    return chain_pays(min(out_BRC.shape[1:])) and chains_on(out_BRC.device, dtype)


def _dtype(product: Product | Multiple) -> torch.dtype:
    """That of its operands."""
    return product.matrix.dtype if isinstance(product, Multiple) else product.left[0].dtype


def _run_chain(products: Sequence[Product], counters: Tensor, counted: Counted) -> Counted:
    batch, size, _ = products[0].out.shape
    found = []
    for product in products:
        rows, cols = product.out.shape[1:]
        tiles = (lower_tiles if product.is_symmetric else all_tiles)(rows, cols, CHAIN_TILE, product.out.device)
        found.append(ChainProduct(*product, tiles))
    return launch_chain(found, counters, counted, teams_of(batch, size))


def _run_alone(product: Product) -> None:
    left, right, out, alpha, addends, diagonal, scales, is_symmetric = product
    if right is not None and not is_symmetric:
        addend, beta = addends[0] if addends else (None, 0.0)
        tile = full_tile(*out.shape[1:])
        full(left[0], right, tile=tile, alpha=alpha, addend=addend, beta=beta, scales=scales, out=out)
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

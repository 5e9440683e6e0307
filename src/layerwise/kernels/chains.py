"""Products as values, and who computes a list of them: one launch after the other, or several in one.

[Note: Chains]
Products of a small batch leave much of a device idle while they begin and end, and Newton-Schulz is twenty of them in a row.
A chain (`chain.cu`) is one launch for several products of the same batch: a matrix goes on to its next product as soon as its
last one is in memory, whatever the others do. So nothing that one of its products writes may lie where another matrix has
something that the chain still reads: who arranges memory says which products may be one.

What a product gives is the same to the bit either way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from layerwise.kernels.chain_driver import MOST_PRODUCTS, ChainUnavailable, Counted, launch_chain
from layerwise.kernels.facts import chains_on, give_up_chains
from layerwise.kernels.products import chain_pays
from layerwise.kernels.triton_products import Product, multiply

# B: batch of equal-shaped matrices, P: part of it, R: rows, C: columns, M: the shorter of the two.


class Multiple(NamedTuple):
    """out = factor * matrix."""

    matrix: Tensor
    factor: float
    out: Tensor


Strand = list[Product | Multiple]
"""Products of one batch in whose course matrices do not get in each other's way."""


def run(strands: Iterable[Strand], counters: Tensor) -> None:
    """Compute them in this order. `counters` are int32 zeros, one for each matrix and one more."""
    counted = Counted()
    for strand in strands:
        done = 0
        try:
            while done < len(strand) and _is_chain(strand):
                counted = launch_chain(strand[done : done + MOST_PRODUCTS], counters, counted)
                done += MOST_PRODUCTS
        except ChainUnavailable as error:  # at its first launch, if ever
            give_up_chains(strand[0].out.device, _dtype(strand[0]), str(error))
        for product in strand[done:]:
            if isinstance(product, Multiple):
                torch.mul(product.matrix, product.factor, out=product.out)
            else:
                multiply(product)


def _is_chain(strand: Strand) -> TypeGuard[list[Product]]:
    """Not of one product: those are long, and Triton's larger tiles are sooner done with them."""
    if len(strand) == 1 or any(isinstance(product, Multiple) for product in strand):
        return False
    out_BRC, dtype = strand[0].out, _dtype(strand[0])
    return chain_pays(min(out_BRC.shape[1:])) and chains_on(out_BRC.device, dtype)


def _dtype(product: Product | Multiple) -> torch.dtype:
    """That of its operands."""
    return product.matrix.dtype if isinstance(product, Multiple) else product.left[0].dtype

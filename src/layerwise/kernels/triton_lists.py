"""What Triton kernels share that work on lists of tensors in one launch.

Imported only where `has_own_kernels` says so, as all who import it. A program finds in tables which tensor its block belongs
to and where that lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl

from layerwise.kernels.lists import Tensors, facts_of

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

ALIGNMENT = tl.constexpr(16)
"""Bytes of the widest access. A block whose tensors all begin at multiples of it is read and written so: `multiple_of`
says it where the pointers are made, for no compiler sees it in a table, and a called function does not pass it on."""


@triton.jit
def find_block(blocks, numels, BLOCK: tl.constexpr):
    """The number of this program's tensor, the block's first element in it, and how many there are from there on."""
    packed = tl.load(blocks + tl.program_id(0))
    tensor = packed >> 32
    first = (packed & 0xFFFFFFFF) * BLOCK
    return tensor, first, tl.load(numels + tensor) - first


@triton.jit
def as_pointer(address, DTYPE: tl.constexpr):
    return address.to(tl.pointer_type(DTYPE))


@triton.jit
def taken(verdict, count):
    """How many elements there are: none in a step that is not taken."""
    return tl.where(tl.load(verdict) != 0.0, count, 0)


def by_dtypes(lists: Sequence[Tensors]) -> Iterator[tuple[tuple[torch.dtype, ...], Sequence[Tensors], Sequence[int]]]:
    """The dtypes of each group of entries that share them, those entries, and their places; no places: all of them."""
    every = [facts_of(tensors) for tensors in lists]
    shared = tuple(facts.one_dtype for facts in every if facts.one_dtype is not None)
    if len(shared) == len(lists):
        yield shared, lists, ()
        return
    groups: dict[tuple[torch.dtype, ...], list[int]] = {}
    for index, key in enumerate(zip(*(facts.dtypes for facts in every), strict=True)):
        groups.setdefault(key, []).append(index)
    for key, some in groups.items():
        yield key, [[tensors[index] for index in some] for tensors in lists], some

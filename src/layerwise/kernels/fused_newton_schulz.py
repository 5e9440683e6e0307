"""Newton-Schulz on our own kernels: the same polynomials as `newton_schulz`, with symmetric products and no passes over
the matrices but one for their norm and one that brings them into the dtype of the products.

[Note: The Gram form without a diagonal]
Q of a segment is held as P + q I, with q the product of the a so far: P <- P Z + a P + q Z. The large q never drowns P's
own diagonal, and no step needs a pass of its own to add it; the last step of a segment adds it on the way. Every
n x n matrix here is a polynomial of one symmetric matrix, so all of their products are symmetric. Rounding makes the
blocks on the diagonal a little unsymmetric, and the steps damp that as they damp other errors, but only as long as it is
R Z that is computed: R Z^T lets it grow tenfold in a segment.

[Note: The norm is folded]
Matrices are multiplied by a power of two, which rounds nothing, and what is left to Frobenius norm 1 goes into the first
products: R = s^2 X X^T, and X <- s (a X + Z X).

[Note: Where things lie]
X changes places with its successor: one is the memory of the result, the other a part of the workspace, and whichever
comes first is chosen so that the last one is the result. The Gram form needs four n x n matrices at a time while there is
one X, and one of them, P, while there are two. So P has a place of its own, and the other three lie where the next X
will be: in the workspace, or in the result as far as they fit. So does the standard form's Gram matrix, beside which there
is its polynomial. Where it takes less memory, half of a batch of the Gram form goes to the workspace, and the other half to
where that was: `GramRoom` says so, for the plan too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.config.coefficients import Coefficient
from layerwise.kernels.chains import Multiple, Strand, run
from layerwise.kernels.triton_norms import Norms, normalise_into, norms_nbytes
from layerwise.kernels.triton_products import Product, new_batch
from layerwise.layout.cost import GRAM_OTHERS, GramRoom, gram_segments

# B: batch of equal-shaped matrices, P: part of it, R: rows, C: columns, M: the shorter of the two.

_ALIGNED = 8
"""Elements of 16 bits, to the multiple of which rows begin."""


def orthogonalize_fused(update_BRC: Tensor, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype) -> Tensor:
    """As `orthogonalize`, for a non-empty batch on a device that has these kernels; `dtype` has 16 bits."""
    batch, rows, cols = update_BRC.shape
    out_BRC = new_batch(batch, rows, cols, dtype, update_BRC.device)
    nbytes = workspace_nbytes(update_BRC.shape, method, len(schedule))
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=update_BRC.device)
    orthogonalize_into(out_BRC, with_rows(update_BRC), workspace, schedule, method)
    return out_BRC.contiguous()


def with_rows(update_BRC: Tensor) -> Tensor:
    """A batch whose columns lie side by side."""
    return update_BRC if update_BRC.stride(2) == 1 else update_BRC.contiguous()


def orthogonalize_into(
    out_BRC: Tensor, update_BRC: Tensor, workspace: Tensor, schedule: Sequence[Coefficient], method: str
) -> None:
    """Launches and nothing else: `update` in `out`, which may be the same memory and has what `new_batch` promises. What is
    in `workspace`, of `workspace_nbytes`, does not matter before or after."""
    form = _gram if method == "gram" else _standard
    with torch.cuda.device_of(update_BRC):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        places = _Places.of(out_BRC, workspace)
        run(form(places, update_BRC, schedule), places.norms.counters)


@lru_cache(maxsize=256)  # asked for every batch of a step
def workspace_nbytes(shape: tuple[int, ...], method: str, steps: int) -> int:
    """Bytes that a batch of this shape needs."""
    batch, rows, cols = shape
    large, small = _sizes(rows, cols)
    beside = GramRoom.of(batch, large, small, len(gram_segments(steps))).numel if method == "gram" else batch * large
    return 2 * (batch * small + beside) + norms_nbytes(batch, rows, cols)


def _sizes(rows: int, cols: int) -> tuple[int, int]:
    """Elements of a matrix and of its Gram matrix, rows padded."""
    short = min(rows, cols)
    return rows * _padded(cols), short * _padded(short)


def _padded(cols: int) -> int:
    return -(-cols // _ALIGNED) * _ALIGNED


class _Places(NamedTuple):
    """The memory of a batch at work; flat."""

    out_BRC: Tensor
    own: Tensor  # of the workspace, 16 bits each
    norms: Norms

    @classmethod
    def of(cls, out_BRC: Tensor, workspace: Tensor) -> _Places:
        batch, rows, cols = out_BRC.shape
        used = norms_nbytes(batch, rows, cols)
        return cls(out_BRC, workspace[used:].view(torch.int16), Norms.of(batch, rows, cols, workspace[:used]))

    def large(self, first: int, dtype: torch.dtype, count: int | None = None) -> Tensor:
        """A batch like the result, or the first few of it, from an element of the workspace on."""
        batch, rows, cols = self.out_BRC.shape
        return _carved(self.own, first, batch if count is None else count, rows, cols, dtype)

    def small(self, first: int, dtype: torch.dtype, *, in_result: bool = False) -> Tensor:
        """A batch of small matrices, from an element of the workspace on, or of the result."""
        batch, rows, cols = self.out_BRC.shape
        memory = self.own
        if in_result:
            memory = self.out_BRC.view(torch.int16).as_strided((batch * rows * _padded(cols),), (1,))
        short = min(rows, cols)
        return _carved(memory, first, batch, short, short, dtype)


def _carved(memory: Tensor, first: int, batch: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    padded = _padded(cols)
    found = memory[first : first + batch * rows * padded].view(dtype).view(batch, rows, padded)
    return found if padded == cols else found[:, :, :cols]


def _standard(places: _Places, update_BRC: Tensor, schedule: Sequence[Coefficient]) -> list[Strand]:
    dtype = places.out_BRC.dtype
    large, small = (update_BRC.shape[0] * size for size in _sizes(*update_BRC.shape[1:]))
    polynomial_BMM = places.small(0, dtype)
    # X and its successor in turn, each with the small matrix that lies where it will.
    here, there = (
        (places.out_BRC, places.small(0, dtype, in_result=True)),
        (places.large(small, dtype), places.small(small, dtype)),
    )
    if len(schedule) % 2:
        here, there = there, here
    normalise_into(here[0], update_BRC, places.norms)
    found: list[Strand] = []
    scales: tuple[Tensor | None, Tensor | None] = places.norms.scales, places.norms.squared
    for a, b, c in schedule:
        x_BRC, next_BRC, gram_BMM = here[0], *there
        if c == 0.0:
            small_ones: Strand = [Product((x_BRC,), None, polynomial_BMM, scales=scales[1])]
            times = _times(polynomial_BMM, x_BRC, next_BRC, alpha=b, beta=a, scales=scales[0])
        else:
            small_ones = [Product((x_BRC,), None, gram_BMM, scales=scales[1]), _square(gram_BMM, b, c, polynomial_BMM)]
            times = _times(polynomial_BMM, x_BRC, next_BRC, beta=a, scales=scales[0])
        found += [small_ones, [times]]
        here, there = there, here
        scales = None, None
    # Where a matrix is as large as its Gram matrix, the next X lies on nothing but its own.
    return [list(chain(*found))] if large == small else found


def _gram(places: _Places, update_BRC: Tensor, schedule: Sequence[Coefficient]) -> list[Strand]:
    """See [Note: The Gram form without a diagonal], [Note: Where things lie], and in newton_schulz why it works in fp16
    and restarts."""
    half, batch = torch.float16, update_BRC.shape[0]
    large, small = _sizes(*update_BRC.shape[1:])
    segments = gram_segments(len(schedule))
    room = GramRoom.of(batch, large, small, len(segments))
    part, small = room.part, batch * small
    p_BMM, own_PRC = places.small(0, half), places.large(small, half, part)
    free = 0 if part == batch else part * large  # where nothing lies in the result while matrices are away
    left_over = range(GRAM_OTHERS - room.fitting)
    others_by_side = {
        False: [places.small((1 + slot) * small, half) for slot in range(GRAM_OTHERS)],
        True: [places.small(free + slot * small, half, in_result=True) for slot in range(room.fitting)]
        + [places.small(small + part * large + slot * small, half) for slot in left_over],
    }
    result_BRC = places.out_BRC.view(half)
    at_home = [(result_BRC, slice(0, batch))]
    away = [(own_PRC, slice(0, part)), (result_BRC[: batch - part], slice(part, batch))][: 1 + (part < batch)]
    is_away = len(segments) % 2 == 1
    normalise_into(own_PRC if is_away else result_BRC, update_BRC, places.norms)
    found: list[Strand] = []
    scales: tuple[Tensor | None, Tensor | None] = places.norms.scales, places.norms.squared
    done = 0
    for length in segments:
        segment = schedule[done : done + length]
        done += length
        x_PRCs = tuple(x_PRC for x_PRC, _ in (away if is_away else at_home))
        products, q = segment_products(x_PRCs, scales[1], segment, p_BMM, others_by_side[is_away])
        found.append(products)
        target_BRC = places.out_BRC if done == len(schedule) else result_BRC
        # Who goes first leaves its place to the other.
        if is_away:
            moves = [(x_PRC, target_BRC[which], which) for x_PRC, which in reversed(away)]
        else:
            moves = [(result_BRC[which], x_PRC, which) for x_PRC, which in away]
        for here_PRC, there_PRC, which in moves:
            part_scales = None if scales[0] is None else scales[0][which]
            # Another memory, where matrices lie otherwise.
            found.append([_times(p_BMM[which], here_PRC, there_PRC, beta=q, scales=part_scales)])
        is_away = not is_away
        scales = None, None
    return found


def segment_products(
    x_PRCs: tuple[Tensor, ...],
    scales: Tensor | None,
    segment: Sequence[Coefficient],
    last_BMM: Tensor,
    others: Sequence[Tensor],
) -> tuple[Strand, float]:
    """What leaves in `last` the P, and the q, such that P X + q X is X after the steps of `segment`. X lies in parts."""
    r_BMM, spare_BMM, other_BMM = others
    # P is written to one place and to another in turn, and ends in the last.
    p_BMM, next_BMM = (last_BMM, other_BMM) if len(segment) % 2 else (other_BMM, last_BMM)
    a, b, c = segment[0]
    q, z_BMM = a, p_BMM
    found: Strand = [Product(x_PRCs, None, r_BMM, scales=scales), _square(r_BMM, b, c, z_BMM)]
    for later, (next_a, b, c) in enumerate(segment[1:], start=2):
        # Until there is a new P, its place is free.
        rz_BMM = next_BMM
        found.append(Product((r_BMM,), z_BMM, rz_BMM, addends=((r_BMM, a),)))
        found.append(Product((z_BMM,), rz_BMM, r_BMM, addends=((rz_BMM, a),)))
        z_BMM = spare_BMM
        found.append(_square(r_BMM, b, c, z_BMM))
        a, diagonal = next_a, q * next_a if later == len(segment) else 0.0
        addends = ((p_BMM, a), (z_BMM, q))
        found.append(Product((p_BMM,), z_BMM, next_BMM, addends=addends, diagonal=diagonal))
        p_BMM, next_BMM = next_BMM, p_BMM
        q = q * a - diagonal
    return found, q


def _square(gram_BMM: Tensor, b: float, c: float, out_BMM: Tensor) -> Product | Multiple:
    """b A + c A^2."""
    if c == 0.0:
        return Multiple(gram_BMM, b, out_BMM)
    return Product((gram_BMM,), gram_BMM, out_BMM, alpha=c, addends=((gram_BMM, b),))


def _times(
    p_BMM: Tensor, x_BRC: Tensor, out_BRC: Tensor, *, beta: float, alpha: float = 1.0, scales: Tensor | None = None
) -> Product:
    """alpha P X + beta X, or alpha X P + beta X of tall ones."""
    rows, cols = x_BRC.shape[1:]
    left, right = (x_BRC, p_BMM) if rows > cols else (p_BMM, x_BRC)
    addends = () if beta == 0.0 else ((x_BRC, beta),)
    return Product((left,), right, out_BRC, alpha, addends, scales=scales, is_symmetric=False)

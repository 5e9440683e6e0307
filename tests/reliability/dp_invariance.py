"""S4, dp_invariance: the same global batch on 1 to 8 ranks, in every layout, bucket size and order of reduction, gives the same bits: reduced gradients of
every step, momenta, masters and weights after sixty.

A step's batch is eight gradients that ranks share out among themselves, unevenly where they are three. They are integers over a power of two, so that sums
and averages are exact however they are shared out. With sabotage they are Gaussian: then sums round, in an order that depends on ranks and layout, and what
is compared must differ.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

import torch
from torch import Tensor

import layerwise
from tests.ranks import RankFailure, run_ranks
from tests.reference.oracle import Hyper
from tests.reliability import Outcome, tally
from tests.worlds import Case, deliver, gradient, hash_tensors, hash_whole, put_together, rules, wrap

WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = ("flat", "padded", "compact", "replicated")
BUCKETS: dict[str, float | None] = {"a bucket a param": 2**-18, "64": 2**-12, "128": 2**-11, "one bucket": None}
"""Bucket sizes in MiB by what they are in elements, for params of 3 to 72."""
SHAPES = [(6, 4), (5, 9), (8, 8), (12, 6)]
BATCH = 8
STEPS, QUICK_STEPS = 60, 4


class Cell(NamedTuple):
    """One way to run the same training."""

    layout: str
    bucket: str
    overlap: bool

    def describe(self, world: int) -> str:
        return f"{world} ranks, {self.layout}, {self.bucket}, {'overlap' if self.overlap else 'no overlap'}"


REFERENCE = Cell("flat", "one bucket", overlap=False)


def batch_share(fqn: str, shape: torch.Size, rank: int, world: int, step: int, *, exact: bool) -> Tensor:
    """A rank's part of a step's batch, scaled so that the average over ranks is that over the batch."""
    total = torch.zeros(shape)
    for sample in range(rank, BATCH, world):
        total += gradient(fqn, shape, sample, step, 0, exact=exact)
    return total * (world / BATCH)


def train(rank: int, world: int, cells: list[Cell], steps: int, exact: bool) -> dict[str, str]:
    """The hash of each cell's training: of all ranks' shards together, and of this rank's weights."""
    return {cell.describe(world): _train_one(rank, world, cell, steps, exact) for cell in cells}


def _train_one(rank: int, world: int, cell: Cell, steps: int, exact: bool) -> str:
    case = Case(
        shapes=SHAPES,
        layout=cell.layout,
        bucket_mib=BUCKETS[cell.bucket],
        options={"overlap_grad_reduce": cell.overlap},
    )
    model = wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, **rules(Hyper(weight_decay=0.1, clip=1.0)))
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    digest = hashlib.sha256()
    for step in range(steps):
        grads = {fqn: batch_share(fqn, shape, rank, world, step, exact=exact) for fqn, shape in shapes.items()}
        deliver(model, grads, sync=True)
        model.engine.reducer.finish()
        # Sums grow with ranks, averages do not.
        whole = put_together(model)
        digest.update(hash_tensors(whole[name] / world for name in whole if name.startswith("gradient")).encode())
        optimizer.step()
    digest.update(hash_whole(model, gradients=False).encode())
    digest.update(hash_tensors(param.detach() for _, param in sorted(model.engine.storage.params.items())).encode())
    return digest.hexdigest()


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every cell on every number of ranks against one rank; with sabotage some of them, with gradients whose sums round."""
    few = quick or sabotage
    steps, worlds = (QUICK_STEPS, (1, 2, 3)) if few else (STEPS, WORLDS)
    cells = [
        Cell(layout, bucket, overlap) for layout, bucket, overlap in itertools.product(LAYOUTS, BUCKETS, (True, False))
    ]
    if few:
        cells = cells[::6]
    expected = run_ranks(1, train, [REFERENCE], steps, not sabotage)[0][REFERENCE.describe(1)]
    complaints: dict[str, str] = {}
    for world in worlds:
        for layout in LAYOUTS:
            mine = [cell for cell in cells if cell.layout == layout]
            complaints.update(_complaints(world, mine, steps, expected, exact=not sabotage))
    return tally(complaints)


def _complaints(world: int, cells: list[Cell], steps: int, expected: str, *, exact: bool) -> dict[str, str]:
    try:
        everyone = run_ranks(world, train, cells, steps, exact, timeout_s=600.0)
    except RankFailure as failure:
        return {cell.describe(world): str(failure)[-300:] for cell in cells}
    found = {}
    for name in everyone[0]:
        others = [rank for rank, hashes in enumerate(everyone) if hashes[name] != expected]
        found[name] = f"ranks {others} have other bits than one rank alone" if others else ""
    return found

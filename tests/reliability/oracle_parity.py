"""S5, oracle_parity: matrices of many shapes on 1 to 8 ranks, 0 ulp from the single-process oracle in gradients, momenta, masters and weights."""

from __future__ import annotations

import re

from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.worlds import Case, train_and_compare

SHAPES: list[tuple[int, int]] = [
    *[(1, 1), (1, 2), (1, 7), (1, 64), (1, 129), (2, 1), (7, 1), (64, 1), (129, 1)],  # rows and columns
    *[(2, 2), (3, 3), (5, 5), (8, 8), (16, 16), (33, 33), (48, 48)],  # squares
    *[
        (2, 3),
        (3, 2),
        (3, 64),
        (5, 7),
        (7, 5),
        (7, 31),
        (31, 7),
        (13, 17),
        (17, 13),
        (11, 37),
        (41, 3),
        (2, 97),
    ],  # primes
    *[(3, 128), (5, 64), (6, 96), (7, 100)],  # fewer rows than 8 ranks
    *[
        (16, 33),
        (33, 16),
        (12, 24),
        (24, 12),
        (20, 50),
        (63, 65),
        (64, 96),
        (96, 64),
        (10, 15),
        (15, 10),
        (128, 4),
        (30, 42),
    ],
]
PER_RUN = 11
"""Shapes that share a model: small enough for one of them to be found, large enough for shards that hold parts of several."""


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every shape on every world; with sabotage, one gradient element is moved by one ulp on one rank, in the library's run only."""
    complaints: dict[str, str] = {}
    worlds = (2,) if sabotage else (1, 2, 3) if quick else (1, 2, 3, 4, 8)
    for world in worlds:
        for start in range(0, len(SHAPES), PER_RUN):
            shapes = SHAPES[start : start + PER_RUN]
            layout = "replicated" if (world + start // PER_RUN) % 4 == 0 else "flat"
            case = Case(
                shapes=shapes,
                steps=2 if quick else 3,
                bucket_mib=0.004,
                layout=layout,
                hyper={"weight_decay": 0.1, "clip": 1.0},
                sabotage="gradient" if sabotage else "",
            )
            for index, text in enumerate(_complaints(world, case)):
                rows, cols = shapes[index]
                complaints[f"({rows}, {cols}) on {world} ranks, {layout}"] = text
    return tally(complaints)


def _complaints(world: int, case: Case) -> list[str]:
    """What differs, shape by shape; what belongs to no shape in particular (a norm, a byte count) counts against all."""
    assert case.shapes is not None
    try:
        found = [text for texts in run_ranks(world, train_and_compare, case) for text in texts]
    except RankFailure as failure:
        return [str(failure)[-300:]] * len(case.shapes)
    general = [text for text in found if not re.search(r"\blayer\d+\.", text)]
    return [
        "; ".join([*(text for text in found if re.search(rf"\blayer{index}\.", text)), *general][:3])
        for index in range(len(case.shapes))
    ]

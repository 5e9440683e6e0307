"""S5, oracle_parity: 0 ulp from the single-process oracle in gradients, momenta, masters and weights, in every layout.

Matrices of many shapes on 1 to 8 ranks; then experts, pipeline stages, chunks and ties, each with every way to reduce and to publish.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.arrangements import Arrangement, fitting, train_arranged
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.worlds import Case, train_and_compare

LAYOUTS = ("flat", "padded", "compact", "replicated")

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

ARRANGEMENTS: list[tuple[int, Arrangement]] = [
    (1, Arrangement()),
    (2, Arrangement()),
    (2, Arrangement(ep=2)),
    (3, Arrangement()),
    (3, Arrangement(ep=3)),
    (4, Arrangement()),
    (4, Arrangement(ep=2)),
    (4, Arrangement(ep=4)),
    (2, Arrangement(chunks=2, tied="matrix")),
    (3, Arrangement(chunks=2, tied="embedding")),
    (2, Arrangement(pp=2, tied="embedding")),
    (4, Arrangement(pp=2, tied="matrix")),
    (4, Arrangement(pp=2, ep=2, tied="embedding")),
    (4, Arrangement(pp=2, chunks=2, tied="embedding")),
    (3, Arrangement(pp=3, tied="matrix")),
    (6, Arrangement(pp=3, tied="embedding")),
]
WAYS: list[dict[str, Any]] = [
    {},
    {"overlap_grad_reduce": False},
    {"reducer": "ordered"},
    {"reducer": "ordered_bf16"},
    {"shard_grads": True},
    {"shard_grads": True, "reducer": "ordered"},
    {"shard_grads": True, "reducer": "ordered_bf16", "overlap_grad_reduce": False},
    {"param_sync": "broadcast"},
    {"check_collectives": True},
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, BF16), (FP16, FP16), (BF16, FP16)]
HYPERS: list[dict[str, Any]] = [
    {"clip": 0.5},
    {"matrix": "normuon"},
    {"matrix": "adamuon", "clip": 0.25, "other": "lion"},
]


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every shape on every world, every arrangement by every way. With sabotage one gradient element is moved by one ulp on one rank, in the library's
    run only, and the oracle forgets one copy of a tied weight."""
    complaints: dict[str, str] = {}
    worlds = (2,) if sabotage else (1, 2, 3) if quick else (1, 2, 3, 4, 8)
    for world in worlds:
        for start in range(0, len(SHAPES), PER_RUN):
            shapes = SHAPES[start : start + PER_RUN]
            case = Case(
                shapes=shapes,
                steps=2 if quick else 3,
                bucket_mib=0.004,
                hyper={"weight_decay": 0.1, "clip": 1.0},
                sabotage="gradient" if sabotage else "",
            )
            # The quick profile has every layout, but not on every world.
            layouts = LAYOUTS if not quick or sabotage else (LAYOUTS[(world + start // PER_RUN) % len(LAYOUTS)],)
            complaints.update(_complaints(world, case, layouts))
    product = list(arranged_product())
    if sabotage:
        product = [(world, replace(found, sabotage="tie")) for world, found in product if found.pp == 2][:1]
    for world, arrangement in product[::47] if quick and not sabotage else product:
        complaints.update(_arranged_complaints(world, arrangement))
    return tally(complaints)


def arranged_product() -> list[tuple[int, Arrangement]]:
    """All arrangements times all ways; dtypes, rules, accumulation and missing gradients take turns."""
    found = []
    for number, ((world, arrangement), way) in enumerate(itertools.product(ARRANGEMENTS, WAYS)):
        dtype, grad_dtype = DTYPES[number % len(DTYPES)]
        if way.get("reducer") == "ordered_bf16":
            grad_dtype = FP32
        changed = replace(
            arrangement,
            options=way,
            dtype=dtype,
            grad_dtype=grad_dtype,
            hyper=HYPERS[number % len(HYPERS)],
            accumulation=1 + number % 2,
            missing=number % 4 > 1,
            bucket_mib=0.001,
        )
        found.append((world, fitting(changed, LAYOUTS)))
    return found


def _complaints(world: int, case: Case, layouts: Sequence[str]) -> dict[str, str]:
    """What differs, shape by shape and layout by layout; what belongs to no shape in particular (a norm, a byte count) counts against all."""
    assert case.shapes is not None
    names = {
        (index, layout): f"({rows}, {cols}) on {world} ranks, {layout}"
        for index, (rows, cols) in enumerate(case.shapes)
        for layout in layouts
    }
    try:
        found = [text for texts in run_ranks(world, train_and_compare, case, layouts) for text in texts]
    except RankFailure as failure:
        return dict.fromkeys(names.values(), str(failure)[-300:])
    complaints = {}
    for (index, layout), name in names.items():
        here = [text for text in found if f" {layout}:" in text]
        general = [text for text in here if not re.search(r"\blayer\d+\.", text)]
        mine = [text for text in here if re.search(rf"\blayer{index}\.", text)]
        complaints[name] = "; ".join([*mine, *general][:3])
    return complaints


def _arranged_complaints(world: int, arrangement: Arrangement) -> dict[str, str]:
    """What differs, layout by layout."""
    spread = f"{world} ranks, pp {arrangement.pp}, ep {arrangement.ep}, chunks {arrangement.chunks}, tied {arrangement.tied or 'nothing'}"
    way = ", ".join(f"{name}={value}" for name, value in arrangement.options.items())
    names = {layout: f"{spread}, {layout}, {way or 'defaults'}" for layout in arrangement.layouts}
    try:
        found = [text for texts in run_ranks(world, train_arranged, arrangement) for text in texts]
    except RankFailure as failure:
        return dict.fromkeys(names.values(), str(failure)[-300:])
    return {name: "; ".join([text for text in found if f" {layout}:" in text][:3]) for layout, name in names.items()}

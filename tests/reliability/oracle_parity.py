"""S5, oracle_parity: 0 ulp from the single-process oracle in gradients, momenta, masters and weights, in every layout.

Matrices of many shapes on 1 to 8 ranks; then experts, pipeline stages, chunks and ties, each with every way to reduce and to publish; then models
that torch has cut over meshes of every kind, and models in a DistributedDataParallel.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.arrangements import Arrangement, fitting, train_arranged
from tests.distributed.test_ddp import EXPLICIT, RUNS, Given, beside_oracle
from tests.mesh_zoo import Scene, play, problems, with_rule
from tests.meshes import MESHES, MODELS, fits
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally, tally_control
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
    {"shard_grads": True},
    {"shard_grads": True, "reducer": "ordered"},
    {"shard_grads": True, "reducer": "ordered", "overlap_grad_reduce": False},
    {"check_collectives": True},
]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP32, BF16), (FP16, FP16), (BF16, FP16)]
HYPERS: list[dict[str, Any]] = [
    {"clip": 0.5},
    {"matrix": "normuon"},
    {"matrix": "adamuon", "clip": 0.25, "other": "lion"},
]

MESH_SCENES: list[Scene] = [
    Scene("fsdp 2", "grouped"),
    Scene("fsdp 3", "odd", rule="normuon", clip=0.75),
    Scene("blocks only 2", "tied"),
    Scene("hsdp 2x2", "dense", rule="adamuon"),
    Scene("tp 2", "few"),
    Scene("tp 3", "fusions", clip=0.75),
    Scene("fsdp+tp 2x2", "fours", dtype=BF16),
    Scene("fsdp+tp 2x2", "grouped", rule="normuon", dtype=BF16, tp_mode="blockwise"),
    Scene("ep 2", "mixture", rule="normuon"),
    Scene("ep x fsdp 2x2 dim 1", "mixture", dtype=BF16),
    Scene("apart ep x fsdp 2x2 dim 0", "quartet", clip=0.75),
]
"""One of every kind of mesh, for the quick profile."""
DDP_RUNS: dict[str, tuple[str, ...]] = {
    "2 ranks, bf16, tied": ("replicated", "compact"),
    "3 ranks, optimizer first": ("replicated",),
}
"""For the quick profile: runs of a DistributedDataParallel, and their layouts."""


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every shape on every world, every arrangement by every way. With sabotage one gradient element is moved by one ulp on one rank, in the library's
    run only, with every kind of mesh too, and the oracle forgets one copy of a tied weight."""
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
    given = given_complaints(quick=quick, sabotage=sabotage)
    return tally_control(complaints, given) if sabotage else tally({**complaints, **given})


def given_complaints(*, quick: bool, sabotage: bool) -> dict[str, str]:
    """What differs where gradients are given: by mesh and model for what torch has cut, by layout for what a DistributedDataParallel has copied. With
    sabotage every one of them must differ."""
    scenes = MESH_SCENES if quick or sabotage else mesh_product()
    if sabotage:
        scenes = [replace(scene, sabotage="gradient") for scene in scenes]
    complaints: dict[str, str] = {}
    for world in sorted({MESHES[scene.mesh].world for scene in scenes}):
        complaints.update(_mesh_complaints(world, [scene for scene in scenes if MESHES[scene.mesh].world == world]))
    for name, layouts in DDP_RUNS.items() if quick or sabotage else dict.fromkeys(RUNS, EXPLICIT).items():
        world, given = RUNS[name]
        if sabotage:
            given = replace(given, case=replace(given.case, sabotage="gradient"))
        complaints.update(_ddp_complaints(name, world, given, layouts))
    return complaints


def mesh_product() -> list[Scene]:
    """Every mesh with every model that fits it; rules and dtypes take turns. Tensor parallelism once more, with one model each in blocks."""
    pairs = [(mesh, model) for mesh in MESHES for model in MODELS if model != "even" and fits(mesh, model)]
    rules = ("muon", "normuon", "adamuon")
    whole = [
        with_rule(Scene(mesh, model, dtype=(FP32, BF16)[number % 2]), rules[number % 3])
        for number, (mesh, model) in enumerate(pairs)
    ]
    cut = [mesh for mesh in MESHES if "tp" in dict(MESHES[mesh].axes)]
    models = ("dense", "grouped", "fusions", "odd", "fours")
    blocks = [
        with_rule(Scene(mesh, models[number % len(models)], tp_mode="blockwise"), rules[number % 3])
        for number, mesh in enumerate(cut)
    ]
    return whole + blocks


def arranged_product() -> list[tuple[int, Arrangement]]:
    """All arrangements times all ways; dtypes, rules, accumulation and missing gradients take turns."""
    found = []
    for number, ((world, arrangement), way) in enumerate(itertools.product(ARRANGEMENTS, WAYS)):
        dtype, grad_dtype = DTYPES[number % len(DTYPES)]
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


def _mesh_complaints(world: int, scenes: list[Scene]) -> dict[str, str]:
    """What differs, scene by scene, all of them on the same ranks."""
    names = [f"{scene.model} on {scene.mesh}, {scene.rule}, {scene.dtype}, {scene.tp_mode}" for scene in scenes]
    try:
        by_rank = run_ranks(world, play, scenes)
    except RankFailure as failure:
        return dict.fromkeys(names, str(failure)[-300:])
    by_scene = zip(scenes, zip(*by_rank, strict=True), strict=True)
    return dict(zip(names, ("; ".join(problems(scene, seen)[:3]) for scene, seen in by_scene), strict=True))


def _ddp_complaints(name: str, world: int, given: Given, layouts: Sequence[str]) -> dict[str, str]:
    """What differs, layout by layout."""
    names = {layout: f"DistributedDataParallel, {name}, {layout}" for layout in layouts}
    try:
        found = [text for texts in run_ranks(world, beside_oracle, given, layouts) for text in texts]
    except RankFailure as failure:
        return dict.fromkeys(names.values(), str(failure)[-300:])
    return {name: "; ".join([text for text in found if f" {layout}:" in text][:3]) for layout, name in names.items()}

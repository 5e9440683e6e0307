"""Models that torch has cut over meshes of every kind step like the whole model in one process: bit for bit, each matrix
orthogonalised once, copies equal, and no byte on the wire that is not in the plan.

Gradients are made up, averaged already and exact. Newton-Schulz on CPU takes each matrix by itself, in one thread, so what a
matrix becomes does not depend on who else is in its batch: nothing here needs a tolerance.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch

import layerwise
from tests.marks import sampled
from tests.mesh_zoo import Scene, play, problems, with_rule
from tests.meshes import MESHES, MODELS, fits
from tests.ranks import RankFailure, run_ranks

RULES = ("muon", "normuon", "adamuon")
ZOO = ("dense", "grouped", "mixture", "fusions", "tied", "few", "odd")

QUICK: dict[str, list[tuple[str, str]]] = {
    "fsdp 2": [("grouped", "muon"), ("tied", "normuon"), ("few", "adamuon")],
    "fsdp 3": [("dense", "adamuon"), ("grouped", "normuon"), ("odd", "muon")],
    "fsdp 4": [("mixture", "muon"), ("few", "normuon")],
    "zero-2 3": [("dense", "muon"), ("fusions", "adamuon")],
    "blocks only 2": [("tied", "adamuon"), ("odd", "normuon")],
    "hsdp 2x2": [("grouped", "adamuon"), ("mixture", "normuon")],
    "fsdp+tp 2x2": [("dense", "normuon"), ("grouped", "muon")],
    "fsdp+tp 3x2": [("odd", "adamuon"), ("fusions", "normuon")],
    "tp 2": [("tied", "muon"), ("grouped", "adamuon")],
    "tp 3": [("odd", "normuon"), ("few", "muon"), ("fusions", "muon")],
    "ddp 2": [("grouped", "normuon"), ("tied", "muon")],
    "ep 3": [("mixture", "adamuon")],
    "ep beside fsdp 2": [("mixture", "muon")],
    "ep x fsdp 2x2 dim 0": [("mixture", "normuon")],
    "ep x fsdp 2x2 dim 1": [("mixture", "muon")],
    "apart ep x fsdp 2x2 dim 1": [("quartet", "normuon")],
}
"""What everybody runs: every kind of mesh, and every model under every rule."""


def scenes_of(mesh: str, *, quick: bool) -> list[Scene]:
    every = [(model, rule) for model in (*ZOO, "quartet") for rule in RULES if fits(mesh, model)]
    chosen = QUICK.get(mesh, []) if quick else [pair for pair in every if pair not in QUICK.get(mesh, [])]
    return [with_rule(Scene(mesh, model), rule) for model, rule in chosen]


def found_in(scenes: list[Scene]) -> dict[str, list[str]]:
    """What is wrong, by scene; all of them on the same ranks."""
    by_rank = run_ranks(MESHES[scenes[0].mesh].world, play, scenes)
    found = {}
    for scene, seen in zip(scenes, zip(*by_rank, strict=True), strict=True):
        found[f"{scene.model} {scene.rule}"] = problems(scene, seen)
    return found


def right(scenes: list[Scene]) -> dict[str, list[str]]:
    return {f"{scene.model} {scene.rule}": [] for scene in scenes}


@pytest.mark.broad
@pytest.mark.parametrize("mesh", QUICK)
def test_a_cut_model_steps_like_the_whole_one(mesh: str) -> None:
    scenes = scenes_of(mesh, quick=True)
    assert found_in(scenes) == right(scenes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_other_model_and_rule_on_every_mesh(mesh: str) -> None:
    scenes = scenes_of(mesh, quick=False)
    assert found_in(scenes) == right(scenes)


def test_what_everybody_runs_has_every_model_under_every_rule() -> None:
    pairs = Counter(pair for chosen in QUICK.values() for pair in chosen)
    assert set(pairs) == {(model, rule) for model in ZOO for rule in RULES} | {("quartet", "normuon")}
    assert set(ZOO) < set(MODELS)


@pytest.mark.parametrize("mesh", sampled(["fsdp 2", "hsdp 2x2", "fsdp+tp 3x2", "ep x fsdp 2x2 dim 1"], "fsdp 2"))
def test_bf16_params_have_fp32_masters_that_step_like_the_whole_ones(mesh: str) -> None:
    model = "mixture" if MESHES[mesh].experts else "grouped"
    scenes = [Scene(mesh, model, rule, clip=0.75, dtype=torch.bfloat16) for rule in RULES]
    assert found_in(scenes) == right(scenes)


BLOCKWISE: dict[str, list[tuple[str, str]]] = {
    "tp 2": [("dense", "muon"), ("fusions", "adamuon")],
    "tp 3": [("odd", "normuon"), ("grouped", "muon"), ("fusions", "normuon")],
    "fsdp+tp 2x2": [("grouped", "adamuon"), ("tied", "normuon")],
    "fsdp+tp 3x2": [("odd", "muon")],
}
"""Rows and columns, even and not, fused weights and stacks, and blocks that fully_shard() cuts again."""


def blockwise(mesh: str, pairs: list[tuple[str, str]]) -> list[Scene]:
    return [replace(with_rule(Scene(mesh, model), rule), tp_mode="blockwise") for model, rule in pairs]


@pytest.mark.broad
@pytest.mark.parametrize("mesh", BLOCKWISE)
def test_blocks_of_tensor_parallelism_step_like_the_same_blocks_in_one_process(mesh: str) -> None:
    scenes = blockwise(mesh, BLOCKWISE[mesh])
    assert found_in(scenes) == right(scenes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if "tp" in mesh])
def test_blocks_of_every_other_model(mesh: str) -> None:
    every = [(model, rule) for model in ZOO for rule in RULES]
    scenes = blockwise(mesh, [pair for pair in every if pair not in BLOCKWISE.get(mesh, [])])
    assert found_in(scenes) == right(scenes)


def test_blocks_that_are_whole_on_a_rank_stay_there() -> None:
    scenes = blockwise("tp 3", [("odd", "muon"), ("grouped", "normuon")])
    for seen in run_ranks(3, play, scenes):
        assert [scene.wire_nbytes for scene in seen] == [0, 0]
        assert all(scene.orthogonalised for scene in seen)


@pytest.mark.parametrize(
    ("mesh", "model"), sampled([("fsdp 2", "dense"), ("ep 2", "mixture"), ("ddp 2", "dense")], ("fsdp 2", "dense"))
)
def test_blockwise_changes_nothing_where_nothing_is_cut_by_tensor_parallelism_and_says_so(
    mesh: str, model: str, recwarn: pytest.WarningsRecorder
) -> None:
    scenes = blockwise(mesh, [(model, "muon")])
    assert found_in(scenes) == right(scenes)
    texts = [text for seen in run_ranks(MESHES[mesh].world, warned, scenes[0]) for text in seen]
    assert texts == [
        "tp_mode='blockwise' of param group 'matrix' changes nothing: tensor parallelism has cut none of its matrices, and each is "
        "orthogonalised whole."
    ]


def warned(rank: int, world: int, scene: Scene) -> list[str]:
    """What is said when the optimizer of a scene is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layerwise.Optimizer(MESHES[scene.mesh].cut(scene.build()), **scene.options())
    return [str(warning.message) for warning in caught if "tp_mode" in str(warning.message)]


CONTROLS: dict[str, tuple[Scene, str]] = {
    "a gradient that is one ulp off on one rank": (Scene("fsdp 3", "dense", sabotage="gradient"), "of embed.weight"),
    "an oracle that does not split": (Scene("fsdp 2", "grouped", sabotage="unsplit"), "weight of blocks.0.qkv.weight"),
    "boxes in the wrong place": (Scene("fsdp+tp 2x2", "fours", sabotage="order"), "weight of blocks.0.qkv.weight"),
    "an oracle that knows no blocks": (
        Scene("tp 2", "dense", tp_mode="blockwise", sabotage="whole"),
        "weight of blocks.0.query.weight",
    ),
    "blocks that are scaled as such": (
        Scene("tp 2", "dense", tp_mode="blockwise", sabotage="scale"),
        "weight of blocks.0.up.weight",
    ),
    "a replica that drifts": (Scene("hsdp 2x2", "few", sabotage="replica"), "copies of ('only.weight'"),
    "a matrix that is orthogonalised twice": (Scene("fsdp 2", "dense", sabotage="twice"), "orthogonalised {"),
}
"""What must be seen, and by which words. (Rows in the wrong place show where they belong to other matrices: in one matrix
Newton-Schulz gives every row the same direction wherever it is, but for rounding.)"""


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_wrong_is_seen(name: str) -> None:
    scene, words = CONTROLS[name]
    (found,) = found_in([scene]).values()
    assert any(words in text for text in found), found


def test_boxes_that_are_not_what_is_there_are_refused_in_words() -> None:
    words = r"param 'blocks\.0\.rows\.weight' of shape \(13, 4\) has a local tensor of shape"
    with pytest.raises(RankFailure, match=words):
        found_in([Scene("fsdp+tp 3x2", "odd", sabotage="order")])


@pytest.mark.parametrize(("replicas", "shards"), sampled([(2, 2), (2, 3), (2, 4)], (2, 2)))
def test_replicas_share_the_way_there_and_each_gets_the_way_back(replicas: int, shards: int) -> None:
    """With R replicas of S shards a rank sends P/(R S) to homes, and P/S comes back to it: less what stays where it is."""
    world, scene = replicas * shards, Scene(f"hsdp {replicas}x{shards}", "even")
    seen = [seen for (seen,) in run_ranks(world, play, [scene])]
    assert problems(scene, seen) == []
    numel = sum(param.numel() for param in MODELS["even"]().parameters())
    # A home has one of the S shards of its matrix itself, as do the other R - 1 copies of that shard.
    assert sum(rank.there for rank in seen) == numel * (shards - 1) // shards
    # All R copies of a matrix come from its home, but for the shard that is there.
    assert sum(rank.back for rank in seen) == numel * replicas - numel // shards
    for rank in seen:
        assert rank.there <= numel / world
        assert rank.back == pytest.approx(numel / shards, rel=1 / world)

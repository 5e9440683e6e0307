"""Experts, pipeline stages, chunks, ties and every way to reduce and to publish: all layouts agree with one oracle of the whole model, bitwise.

Each case trains in all layouts that its options allow, side by side on the same ranks (`tests.arrangements`). The full product of what is chosen here is
in the reliability figure `oracle_parity`; controls at the end show that the comparison can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise.layout.storage import GRAD_SLOTS
from tests.arrangements import Arrangement, Stage, fitting, mesh_of, train_arranged
from tests.marks import sampled
from tests.ranks import raised, run_ranks
from tests.reference.oracle import Hyper
from tests.worlds import BUILDERS, MIXED, Case, deliver, gradient, hashes_by_layout, rules, wrap

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EXPLICIT = ("flat", "padded", "compact", "replicated")
LAYOUTS = (*EXPLICIT, "mixed experts")

# (world, arrangement). Experts are in a domain of world / pp / ep ranks.
ARRANGEMENTS: dict[str, tuple[int, Arrangement]] = {
    "1 rank": (1, Arrangement(accumulation=2)),
    "2 ranks, experts on both": (2, Arrangement(dtype=BF16)),
    "2 ranks, each with experts of its own": (2, Arrangement(ep=2, missing=True)),
    "3 ranks, experts on all, missing gradients": (3, Arrangement(missing=True, dtype=FP16)),
    "3 ranks, each with experts of its own": (3, Arrangement(ep=3, dtype=BF16, grad_dtype=BF16)),
    "4 ranks, experts on all": (4, Arrangement(steps=2, dtype=FP16, grad_dtype=FP16)),
    "4 ranks, experts on pairs, accumulation": (4, Arrangement(ep=2, accumulation=2, dtype=BF16)),
    "4 ranks, each with experts of its own": (4, Arrangement(ep=4, missing=True, grad_dtype=BF16)),
    "4 ranks, dense": (4, Arrangement(experts=False, accumulation=3, missing=True)),
    "1 rank, two chunks that share a weight": (1, Arrangement(chunks=2, tied="embedding")),
    "2 ranks, two chunks that share a weight": (2, Arrangement(chunks=2, tied="matrix", dtype=BF16)),
    "3 ranks, three chunks": (3, Arrangement(chunks=3, accumulation=2)),
    "2 stages of one rank": (2, Arrangement(pp=2, missing=True)),
    "2 stages of one rank, tied": (2, Arrangement(pp=2, tied="embedding", dtype=BF16)),
    "2 stages of one rank, a matrix tied": (2, Arrangement(pp=2, tied="matrix", accumulation=2)),
    "2 stages of two ranks, tied, experts on both": (4, Arrangement(pp=2, tied="embedding", accumulation=2)),
    "2 stages of two ranks, a matrix tied, experts of its own each": (
        4,
        Arrangement(pp=2, ep=2, tied="matrix", missing=True),
    ),
    "2 stages of two ranks, two chunks each, tied": (4, Arrangement(pp=2, chunks=2, tied="embedding")),
    "3 stages of one rank, tied over the first and the last": (3, Arrangement(pp=3, tied="embedding", dtype=BF16)),
    "3 stages of one rank, a matrix tied over all": (3, Arrangement(pp=3, tied="matrix", grad_dtype=BF16)),
}

# Every way to reduce and to publish, on worlds where sums have an order and shards are uneven.
WAYS: dict[str, tuple[int, Arrangement]] = {
    "ordered": (3, Arrangement(options={"reducer": "ordered"}, accumulation=2, missing=True)),
    "ordered, bf16 gradients": (4, Arrangement(options={"reducer": "ordered"}, ep=2, dtype=BF16, grad_dtype=BF16)),
    "ordered, fp16": (3, Arrangement(options={"reducer": "ordered"}, dtype=FP16, missing=True)),
    "ordered, 2 stages, tied": (4, Arrangement(options={"reducer": "ordered"}, pp=2, tied="matrix")),
    "ordered, 2 stages of one rank, tied": (2, Arrangement(options={"reducer": "ordered"}, pp=2, tied="embedding")),
    "released gradients": (3, Arrangement(options={"shard_grads": True}, accumulation=3, missing=True)),
    "released gradients, one microbatch": (2, Arrangement(options={"shard_grads": True}, dtype=BF16)),
    "released gradients, bf16, experts of its own each": (
        4,
        Arrangement(options={"shard_grads": True}, ep=4, accumulation=2, dtype=BF16, grad_dtype=BF16),
    ),
    "released gradients, 2 stages, tied, two chunks": (
        4,
        Arrangement(options={"shard_grads": True}, pp=2, chunks=2, tied="matrix", accumulation=2),
    ),
    "released gradients, ordered": (
        3,
        Arrangement(options={"shard_grads": True, "reducer": "ordered"}, accumulation=3, dtype=BF16, grad_dtype=BF16),
    ),
    "released gradients, ordered, no overlap": (
        3,
        Arrangement(options={"shard_grads": True, "reducer": "ordered", "overlap_grad_reduce": False}, accumulation=2),
    ),
    "checked": (4, Arrangement(options={"check_collectives": True}, ep=2, pp=2)),
    "checked, ordered, released": (
        3,
        Arrangement(
            options={"check_collectives": True, "reducer": "ordered", "shard_grads": True},
            accumulation=2,
        ),
    ),
    "no overlap": (2, Arrangement(options={"overlap_grad_reduce": False}, chunks=2, accumulation=2)),
}

# Home state, clipping and norms where matrices, domains and stages differ.
RULES: dict[str, tuple[int, Arrangement]] = {
    "normuon, experts on pairs": (
        4,
        Arrangement(ep=2, hyper={"matrix": "normuon", "clip": 0.25, "weight_decay": 0.1}),
    ),
    "adamuon, a matrix tied over two stages": (
        4,
        Arrangement(pp=2, tied="matrix", hyper={"matrix": "adamuon", "clip": 0.5}),
    ),
    "normuon in fp32 with lion, three stages": (
        3,
        Arrangement(pp=3, tied="matrix", hyper={"matrix": "normuon", "other": "lion", "ns_dtype": FP32}),
    ),
    "adamuon in fp16, two chunks": (2, Arrangement(chunks=2, hyper={"matrix": "adamuon", "ns_dtype": FP16})),
    "norm groups over stages, experts and ties": (
        4,
        Arrangement(
            pp=2,
            ep=2,
            tied="matrix",
            norm_groups={"experts": "*experts.*", "qkv": "qkv.*", "tied": "shared.weight"},
            hyper={"clip": 0.25},
        ),
    ),
    "a norm group on one stage only": (
        3,
        Arrangement(pp=3, norm_groups={"embedding": "embed.weight", "head": "head.*"}, hyper={"clip": 0.1}),
    ),
    "norm groups of experts, each rank with its own": (
        3,
        Arrangement(ep=3, norm_groups={"biases": "*.bias", "up": "experts.up"}, hyper={"clip": 0.1}),
    ),
    "clip that is never reached": (2, Arrangement(ep=2, hyper={"clip": 1e6, "other_weight_decay": 0.1})),
}


def assert_bitwise(world: int, arrangement: Arrangement, layouts: Sequence[str] = EXPLICIT) -> None:
    found = [text for texts in run_ranks(world, train_arranged, fitting(arrangement, layouts)) for text in texts]
    assert not found, "\n".join(found[:10])


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    sampled(
        ARRANGEMENTS,
        "1 rank, two chunks that share a weight",
        "2 ranks, each with experts of its own",
        "3 ranks, experts on all, missing gradients",
        "4 ranks, experts on pairs, accumulation",
        "2 stages of one rank, a matrix tied",
        "2 stages of two ranks, two chunks each, tied",
        "3 stages of one rank, tied over the first and the last",
    ),
)
def test_experts_stages_chunks_and_ties_match_the_oracle_bitwise(name: str) -> None:
    assert_bitwise(*ARRANGEMENTS[name])


@pytest.mark.broad
@pytest.mark.parametrize(
    ("world", "arrangement"),
    [
        (2, Arrangement(ep=2, dtype=BF16)),
        (3, Arrangement(chunks=2, accumulation=2)),
        (4, Arrangement(pp=2, tied="embedding")),
        (4, Arrangement(ep=2, options={"shard_grads": True}, accumulation=2)),
    ],
    ids=["experts", "chunks", "stages", "released gradients"],
)
def test_a_layout_of_each_buffer_matches_the_oracle_bitwise(world: int, arrangement: Arrangement) -> None:
    assert_bitwise(world, arrangement, ("mixed experts",) if "shard_grads" in arrangement.options else tuple(MIXED))


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    sampled(
        WAYS,
        "ordered",
        "ordered, 2 stages of one rank, tied",
        "released gradients, 2 stages, tied, two chunks",
        "released gradients, ordered",
        "checked, ordered, released",
    ),
)
def test_every_way_to_reduce_and_to_publish_matches_the_oracle_bitwise(name: str) -> None:
    assert_bitwise(*WAYS[name])


@pytest.mark.broad
@pytest.mark.parametrize(
    "name",
    sampled(
        RULES,
        "adamuon, a matrix tied over two stages",
        "normuon in fp32 with lion, three stages",
        "norm groups of experts, each rank with its own",
    ),
)
def test_home_state_clipping_and_norms_match_the_oracle_bitwise(name: str) -> None:
    assert_bitwise(*RULES[name])


def test_the_cases_cover_what_they_are_meant_to() -> None:
    every = [*ARRANGEMENTS.values(), *WAYS.values(), *RULES.values()]
    assert {world // a.pp // a.ep for world, a in every if a.experts} >= {1, 2, 3, 4}
    assert {(a.dtype, a.grad_dtype) for _, a in every} >= {
        *((dtype, FP32) for dtype in (FP32, BF16, FP16)),
        *((dtype, BF16) for dtype in (FP32, BF16)),
        (FP16, FP16),
    }
    assert {a.options.get("reducer", "collective") for _, a in every} == {"collective", "ordered"}
    for name in ("shard_grads", "check_collectives"):
        assert sum(name in a.options for _, a in every) >= 2
    assert {world for world, _ in every} >= {1, 2, 3, 4}
    assert {a.pp for _, a in every if a.tied == "embedding"} >= {2, 3}
    for _, arrangement in WAYS.values():
        assert len(fitting(arrangement, LAYOUTS).layouts) >= 2


SHARDED = ("flat", "padded", "compact")


def gaussian(**changes: Any) -> Case:
    """Gradients whose sums round, so that bits tell in which order they were added."""
    return Case(exact=False, **changes)


@pytest.mark.parametrize("world", sampled([3, 4], 3))
def test_sums_in_the_order_of_ranks_have_the_same_bits_in_every_layout(world: int) -> None:
    for case in (
        gaussian(options={"reducer": "ordered"}),
        gaussian(options={"reducer": "ordered"}, dtype=BF16, grad_dtype=BF16, bucket_mib=None, accumulation=2),
    ):
        for hashes in run_ranks(world, hashes_by_layout, case, SHARDED):
            assert len(set(hashes.values())) == 1, hashes


@pytest.mark.slow
def test_sums_in_the_order_of_ranks_do_not_depend_on_buckets_overlap_or_released_gradients() -> None:
    options = {"reducer": "ordered"}
    others = [
        gaussian(options=options),
        gaussian(options=options, bucket_mib=None),
        gaussian(options=options | {"overlap_grad_reduce": False}),
        gaussian(options=options | {"shard_grads": True}),
    ]
    found = {digest for case in others for digest in run_ranks(3, hashes_by_layout, case, ("padded",))[0].values()}
    assert len(found) == 1


@pytest.mark.parametrize("world", sampled([3, 4], 3))
def test_control_sums_by_collectives_have_other_bits_in_other_layouts(world: int) -> None:
    hashes = run_ranks(world, hashes_by_layout, gaussian(), SHARDED)[0]
    assert len(set(hashes.values())) > 1, "Gaussian gradients came out equal: the comparison sees nothing"
    exact = run_ranks(world, hashes_by_layout, replace(gaussian(), exact=True), SHARDED)[0]
    assert len(set(exact.values())) == 1


def test_two_ranks_have_the_same_bits_in_every_layout_and_by_every_reducer_that_does_not_round() -> None:
    found = set()
    for options in ({}, {"reducer": "ordered"}):
        found.update(run_ranks(2, hashes_by_layout, gaussian(options=options), SHARDED)[0].values())
    assert len(found) == 1


def slots_used(rank: int, world: int, layout: str, accumulation: int, overlap: bool) -> list[tuple[int, int, int, int]]:
    """Train with released gradients; per buffer: buckets, most slots leased at once, slots kept, and slots leased now."""
    options = {"shard_grads": True, "overlap_grad_reduce": overlap}
    case = Case(shapes=[(16, 16)] * 12, layout=layout, bucket_mib=0.002, options=options)
    model = wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    for step in range(3):
        for micro in range(accumulation):
            grads = {fqn: gradient(fqn, shape, rank, step, micro) for fqn, shape in shapes.items()}
            deliver(model, grads, sync=micro == accumulation - 1)
        optimizer.step()
    found = []
    for buffer in model.plan.buffers:
        ring = model.engine.storage.replicas[buffer.buckets[0].index].ring
        assert ring is not None
        found.append((len(buffer.buckets), ring.peak, len(ring.tensors), len(ring._leased)))
    return found


@pytest.mark.broad
@pytest.mark.parametrize(
    ("layout", "accumulation", "overlap"),
    [
        ("flat", 1, True),
        ("padded", 1, False),
        ("flat", 3, True),
        ("padded", 2, False),
    ],
)
def test_full_gradients_on_real_ranks_are_at_most_those_of_one_microbatch(
    layout: str, accumulation: int, overlap: bool
) -> None:
    """gloo cannot say that a reduction is over before it is waited for; `test_reducer` shows two slots where it can."""
    for found in run_ranks(3, slots_used, layout, accumulation, overlap):
        for buckets, peak, kept, leased in found:
            assert kept <= GRAD_SLOTS
            assert leased == 0
            assert peak <= buckets
        assert max(buckets for buckets, *_ in found) >= 4


def bytes_held(rank: int, world: int, layout: str, shard_grads: bool) -> tuple[int, int, int, int]:
    """After a step: bytes held, and of them those of full gradients, of reduced shards and of slots."""
    case = Case(shapes=[(16, 16)] * 12, layout=layout, bucket_mib=0.002, options={"shard_grads": shard_grads})
    model = wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    storage = model.engine.storage
    shapes = {fqn: param.shape for fqn, param in storage.params.items()}
    deliver(model, {fqn: gradient(fqn, shape, rank, 0, 0) for fqn, shape in shapes.items()}, sync=True)
    optimizer.step()
    rings = {id(replica.ring): replica.ring for replica in storage.replicas if replica.ring is not None}
    slots = [slot for ring in rings.values() for slot in ring.tensors]
    assert len(slots) <= GRAD_SLOTS * len(rings)
    full = sum(replica.plan.numel for replica in storage.replicas)
    mine = sum(shard.plan.shard_numel(rank) for shard in storage.shards)
    return storage.nbytes(), 4 * full, 4 * mine, sum(slot.nbytes for slot in slots)


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_released_gradients_leave_a_shard_and_two_slots_of_every_full_gradient(layout: str) -> None:
    kept, released = run_ranks(3, bytes_held, layout, False), run_ranks(3, bytes_held, layout, True)
    for (before, full, _, _), (after, _, mine, slots) in zip(kept, released, strict=True):
        assert after == before - full + mine + slots
        assert after < before


def weights_after(rank: int, world: int, options: dict[str, Any], accumulation: int) -> list[tuple[str, Any]]:
    """What a rank without any gradient in one microbatch ends with."""
    case = Case(options=options, accumulation=accumulation)
    model = wrap(case, case.build())
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    shapes = {fqn: param.shape for fqn, param in model.engine.storage.params.items()}
    for step in range(2):
        for micro in range(accumulation):
            idle = rank == (step + micro) % world
            grads = {} if idle else {fqn: gradient(fqn, shape, rank, step, micro) for fqn, shape in shapes.items()}
            deliver(model, grads, sync=micro == accumulation - 1)
        optimizer.step()
    return [(fqn, param.detach().tolist()) for fqn, param in model.engine.storage.params.items()]


def test_a_rank_without_any_gradient_in_a_microbatch_keeps_nobody_waiting() -> None:
    plain = run_ranks(3, weights_after, {}, 3)
    assert plain[0] == plain[1] == plain[2]
    assert run_ranks(3, weights_after, {"shard_grads": True}, 3) == plain


def tie_with(rank: int, world: int, change: str) -> str:
    """Wrap two stages that disagree about a tie, or whose copies would be treated differently."""
    arrangement = Arrangement(pp=2)
    module: nn.Module = Stage(0, has_experts=False, has_embedding=rank == 0, has_head=rank == 1)
    mesh = mesh_of(arrangement, world)
    fqn = "embed.weight" if rank == 0 else "head.weight"
    ties: dict[str, str] = {"embedding": fqn}
    rules_here, layout, norm_groups = None, "flat", {}
    match change:
        case "no copy":
            ties = ties if rank == 0 else {}
        case "no param":
            ties = {"embedding": "embed.weight"}
        case "shape":
            ties = {"embedding": fqn if rank == 0 else "qkv.weight"}
        case "dtype":
            module = module.bfloat16() if rank == 1 else module
        case "layout":
            layout = "flat" if rank == 0 else "replicated"
        case "family":
            rules_here = [layerwise.RouteRule(pattern="head.weight", to="matrix")] if rank else None
        case "lr":
            faster = layerwise.RouteRule(pattern="head.weight", to="other", options={"lr": 0.5})
            rules_here = [faster] if rank else None
        case "norm group":
            norm_groups = {"embedding": "embed.weight"}

    def build() -> None:
        model = layerwise.DataParallel(module, mesh=mesh, ties=ties, layout=layout, rules=rules_here)
        layerwise.Optimizer(model, **rules(Hyper(), norm_groups=norm_groups))

    return raised(build)


TIES = {
    "no copy": "tie 'embedding' is on stage 0 only ('embed.weight', of 2 stages): expected a copy on another one. Name it in ties= of both.",
    "no param": "tie 'embedding' names 'embed.weight', which is no trainable param of this stage.",
    "shape": "tie 'embedding' has shape [17, 12] on stage 0 ('embed.weight') and [20, 12] on stage 1 ('qkv.weight'): copies of one weight must be alike.",
    "dtype": "tie 'embedding' has dtype torch.float32 on stage 0 ('embed.weight') and torch.bfloat16 on stage 1 ('head.weight')",
    "layout": "tie 'embedding' is stored with layout flat on stage 0 ('embed.weight') and replicated on stage 1 ('head.weight')",
    "family": "tie 'embedding' is stored with route other on stage 0 ('embed.weight') and matrix on stage 1 ('head.weight')",
    "lr": "tie 'embedding' is stored with options {} on stage 0 ('embed.weight') and {'lr': 0.5} on stage 1 ('head.weight')",
    "norm group": "tie 'embedding' is updated with norm group embedding on stage 0 ('embed.weight') and other on stage 1 ('head.weight')",
}


@pytest.mark.parametrize("change", TIES)
def test_stages_that_disagree_about_a_tie_or_would_update_it_differently_are_told_so_on_every_rank(change: str) -> None:
    world = 4 if change == "layout" else 2
    for answer in run_ranks(world, tie_with, change) if world == 2 else run_ranks(world, tie_on_four, change):
        assert TIES[change] in answer, answer


@pytest.mark.slow
def test_checked_collectives_between_stages_know_a_tie_by_its_name() -> None:
    assert_bitwise(4, Arrangement(options={"check_collectives": True}, pp=2, tied="matrix"))


def test_a_mapping_may_name_experts_that_other_stages_have() -> None:
    arrangement = Arrangement(pp=2, tied="matrix", experts=False, layouts=("mixed experts",), steps=1)
    assert not any(run_ranks(4, train_arranged, arrangement))


def tie_on_four(rank: int, world: int, change: str) -> str:
    return tie_with(rank // 2, world, change)


def find_ranks(rank: int, world: int, dims: tuple[str, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """This rank's place in everything that a mesh arranges."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=dims)
    model = layerwise.DataParallel(BUILDERS["few"](), mesh=mesh)
    groups = model.engine.groups
    dense, expert = groups.domains["dense"], groups.domains["expert"]
    return groups.stages, groups.stage, (dense.rank, dense.world), (expert.rank, expert.world)


def test_ranks_find_their_stage_and_their_place_in_both_domains() -> None:
    everyone = run_ranks(4, find_ranks, ("pp", "ep"), (2, 2))
    assert {stages for stages, *_ in everyone} == {((0, 1), (2, 3))}
    assert [place for _, *place in everyone] == [
        [0, (0, 2), (0, 1)],
        [0, (1, 2), (0, 1)],
        [1, (0, 2), (0, 1)],
        [1, (1, 2), (0, 1)],
    ]
    # Dims in another order: stages are every other rank, and experts are shared within pairs.
    everyone = run_ranks(4, find_ranks, ("dp", "pp"), (2, 2))
    assert {stages for stages, *_ in everyone} == {((0, 2), (1, 3))}
    assert [place for _, *place in everyone] == [
        [0, (0, 2), (0, 2)],
        [1, (0, 2), (0, 2)],
        [0, (1, 2), (1, 2)],
        [1, (1, 2), (1, 2)],
    ]


@pytest.mark.parametrize(("sabotage", "world"), [("tie", 2), ("experts", 4)])
def test_control_a_copy_or_a_place_that_is_left_out_of_the_sums_is_seen_in_every_layout(
    sabotage: str, world: int
) -> None:
    arrangement = Arrangement(
        pp=2 if sabotage == "tie" else 1, ep=1 if sabotage == "tie" else 2, tied="matrix", sabotage=sabotage
    )
    arrangement = fitting(arrangement, LAYOUTS)
    found = [text for texts in run_ranks(world, train_arranged, arrangement) for text in texts]
    culprit = "shared.weight" if sabotage == "tie" else "experts."
    for layout in arrangement.layouts:
        assert any(culprit in text and f" {layout}:" in text for text in found), found[:5]

"""Gathers that run on under the next forward give the bits of gathers that `step()` waits for: in every layout, on 2, 3 and 4 ranks, over more than ten
steps with all that can come in between.

After a step, masters and state are looked at without touching a weight; weights only where a user would read them, so that they are stale until then.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.marks import sampled
from tests.ranks import run_ranks
from tests.walks import Action, Seen, Walk, Way, difference, transport

BF16 = torch.bfloat16

IN_ORDER = """
    backward, step, hash, backward, eval, step, eval, eval, forward, accumulate, accumulate, backward, step, save, overflow and step, hash,
    backward, step, read, raise in forward, other modules, step, raise in backward, zero grad, raise in block, backward, step twice, metric,
    free, backward, zero grad, zero grad, backward, step, edit, backward, step, edit behind, idle and step, foreach, backward, step, load,
    hash, raise alone and step, backward, step, save, backward, step, resume, backward, step, ensure, scheduler, backward, step, copy,
    idle block, other settings and step, load nothing, backward, late backward, free, eval, backward, step, hash
"""
SCENARIO: list[Action] = [(name.strip(), number) for number, name in enumerate(IN_ORDER.split(","))]


def ways(world: int, *prefetches: int | None, **fields: object) -> list[Way]:
    """The same model, gathered in several ways; in every second of them nothing arrives before it was waited for."""
    found = []
    for number, prefetch in enumerate(prefetches):
        way = Way(world=world, prefetch=prefetch, late=number % 2 == 1, **fields)  # type: ignore[arg-type]
        if way.chunks > 1:  # twice as many params: in as many buckets
            way = replace(way, aligned=prefetch is not None, bucket_mib=0.001)
        found.append(way)
    return found


WAYS: list[Way] = [
    *ways(2, None, 0, 1, 3, layout="flat", checkpointing=True),
    *ways(2, 1, layout="flat", dtype=BF16, shard_grads=True, nonfinite="raise"),
    *ways(2, 1, None, layout="padded", dtype=BF16, ep=2, shuffled=True),
    *ways(2, None, 0, layout="compact", dtype=BF16, chunks=2),
    *ways(2, 3, layout="replicated"),
    *ways(2, 1, None, layout="mixed experts", ep=2, chunks=2, reducer="ordered", shard_grads=True),
    *ways(3, 0, None, layout="flat", dtype=BF16, chunks=2, reducer="ordered"),
    *ways(3, None, layout="padded", checked=True, grad_overlap=False, matrix="normuon"),
    *ways(3, 3, layout="padded", shard_grads=True, shuffled=True),
    *ways(3, 1, layout="compact", reducer="ordered", compared=True),
    *ways(3, None, layout="mixed experts", ep=3),
    *ways(3, None, layout="replicated", dtype=BF16),
    *ways(4, 1, None, layout="flat", pp=2, chunks=2, dtype=BF16),
    *ways(4, None, layout="padded", ep=2),
    *ways(4, 3, layout="compact", pp=2, ep=2),
    *ways(4, 0, layout="mixed experts", ep=2, chunks=2, dtype=BF16),
    *ways(4, None, layout="replicated", ep=2),
]
PLACES = sorted({(way.world, way.layout) for way in WAYS})


def take_both(
    rank: int, world: int, cases: Sequence[Way], actions: Sequence[Action] = SCENARIO, drop: int | None = None
) -> list[tuple[str, Counter[str], list[str]]]:
    """Every way beside the same without overlap: what differs, what was met, and every hash of all weights."""
    warnings.filterwarnings("ignore", message="modules run in another order")
    expected: dict[Way, list[Seen]] = {}
    found = []
    for way in cases:
        # How far gathers run ahead is nothing to a run without overlap; who may read alone is.
        synchronous = replace(way.without_overlap(), prefetch=0 if way.lazy else None, aligned=False)
        if synchronous not in expected:
            walk = Walk(rank, synchronous)
            walk.take(actions)
            expected[synchronous] = walk.seen
        with transport(late=way.late, drop=drop):
            walk = Walk(rank, way)
            walk.take(actions)
        hashes = [seen.words for seen in walk.seen if seen.action == "hash"]
        found.append((difference(walk.seen, expected[synchronous]), walk.met, hashes))
    return found


@pytest.mark.broad
@pytest.mark.parametrize(
    ("world", "layout"), sampled(PLACES, (2, "padded"), (3, "flat"), (3, "compact"), (3, "mixed experts"))
)
def test_overlapped_gathers_give_the_bits_of_those_that_step_waits_for(world: int, layout: str) -> None:
    mine = [way for way in WAYS if (way.world, way.layout) == (world, layout)]
    everyone = run_ranks(world, take_both, mine)
    for way, answers in zip(mine, zip(*everyone, strict=True), strict=True):
        for rank, (unlike, met, _) in enumerate(answers):
            assert not unlike, f"rank {rank}, {way}: {unlike}"
            assert met["steps"] > 10, way
            assert met["buckets stale after a step"] + met["buckets in flight after a step"] > met["steps"], way
            if way.lazy and way.prefetch != 3:  # where there are more buckets than that
                assert met["buckets stale after a step"] > 0, way
            assert met["reads of stale weights"] > 0, way
            assert met["failures"] >= 3, way
            assert met["named errors"] == 2, way
            assert met["skipped steps"] == 2, way  # one with an infinite gradient, one without any
        if way.pp == 1 and way.ep == 1:
            hashes = [hashes for _, _, hashes in answers]
            assert hashes == hashes[:1] * world, f"weights differ between ranks: {way}"


def test_every_layout_is_met_with_experts_chunks_stages_reducers_and_every_prefetch() -> None:
    assert len(PLACES) == 3 * 5
    for layout in ("flat", "padded", "compact", "mixed experts"):
        mine = [way for way in WAYS if way.layout == layout]
        assert {way.lazy for way in mine} == {way.late for way in mine} == {True, False}
        assert {way.dtype for way in mine} == {torch.float32, BF16}
        assert any(way.ep > 1 for way in mine) or any(way.pp > 1 for way in mine)
    assert {way.prefetch for way in WAYS} == {None, 0, 1, 3}
    assert {way.reducer for way in WAYS} == {"collective", "ordered"}
    assert any(way.pp > 1 and way.aligned for way in WAYS)
    assert any(1 < way.ep < way.world // way.pp for way in WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, 1])
def test_control_one_wait_less_is_seen(prefetch: int | None) -> None:
    answers = run_ranks(2, take_both, [Way(prefetch=prefetch, late=True)], SCENARIO[:10], 2)
    assert all(unlike for found in answers for unlike, _, _ in found)

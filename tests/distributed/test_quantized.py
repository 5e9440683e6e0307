"""Weights that are kept as codes: the same bits as with a bf16 replica of which codes are made whenever they are used."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from layerwise.errors import StateError
from layerwise.kernels.stored import Stored
from tests.marks import sampled
from tests.quantizing import Way, on_and_off, train
from tests.ranks import run_ranks

LAYOUTS = ("flat", "padded", "compact", "replicated")
STEPS = 30
PLACES = [(world, layout) for world in (1, 2, 3, 4) for layout in LAYOUTS]

# What may be asked for beside a layout, one after the other.
MORE = {
    "experts": Way(experts=2),
    "accumulation, evaluation in between": Way(accumulation=2, evaluates=True),
    "gathers that step() waits for": Way(overlap=False),
    "gradients released": Way(options=(("shard_grads", True),)),
    "gradients released, gathers waited for": Way(overlap=False, options=(("shard_grads", True),)),
    "gradients released, padded, experts": Way("padded", experts=2, options=(("shard_grads", True),)),
    "ordered sums": Way(options=(("reducer", "ordered"),)),
    "one bucket ahead": Way(options=(("prefetch", 1),)),
    "blockwise": Way(recipe="blockwise", experts=2),
    "blockwise, compact": Way("compact", recipe="blockwise"),
}


def all_found(found: list[list[str]]) -> list[str]:
    return [text for texts in found for text in texts]


@pytest.mark.parametrize(("world", "layout"), sampled(PLACES))
def test_codes_kept_and_codes_made_at_use_give_the_same_bits(world: int, layout: str) -> None:
    ways = [Way(layout, overlap=overlap, experts=2 if overlap else 0) for overlap in (True, False)]
    assert all_found(run_ranks(world, on_and_off, ways, STEPS)) == []


@pytest.mark.parametrize("name", sampled(MORE, "gradients released", "accumulation, evaluation in between"))
def test_whatever_else_is_asked_for_does_not_matter(name: str) -> None:
    assert all_found(run_ranks(2 if "prefetch" in str(MORE[name]) else 3, on_and_off, [MORE[name]], 8)) == []


@pytest.mark.parametrize(("world", "ep"), sampled([(2, 2), (4, 2), (4, 4)], (2, 2)))
@pytest.mark.parametrize("layout", sampled(["flat", "padded", "compact"], "flat"))
def test_experts_that_ranks_share_also_where_each_has_its_own(world: int, ep: int, layout: str) -> None:
    ways = [Way(layout, experts=2, ep=ep, overlap=overlap) for overlap in (True, False)]
    assert all_found(run_ranks(world, on_and_off, ways, 10)) == []


def made_wrong(rank: int, world: int, where: str) -> list[str]:
    """The same comparison where codes are made of values that are slightly wrong, on one rank or on all of them."""
    real = Stored.settle

    def settle(self: Stored, values: Any) -> None:
        wrong = values.clone()
        if rank == 0 or where == "everywhere":
            wrong.view(-1)[0] = wrong.view(-1)[0] * 1.25 + 0.01
        real(self, wrong)

    with mock.patch.object(Stored, "settle", settle):
        try:
            return on_and_off(rank, world, [Way(overlap=False)], 4)
        except StateError as error:
            return [str(error)]


@pytest.mark.parametrize(
    ("where", "said"), [("on one rank", "has other values on rank 1"), ("everywhere", "are not those of its master")]
)
def test_control_a_code_that_is_off_is_seen(where: str, said: str) -> None:
    found = all_found(run_ranks(2, made_wrong, where))
    assert len(found) == 2
    assert all(said in text for text in found)


def same_twice(rank: int, world: int) -> list[str]:
    """Runs from different data must not look alike: a comparison of nothing would pass everything."""
    one, other = train(rank, Way(), 3), train(rank + 7, Way(), 3)
    return [] if one.facts != other.facts else ["runs on other data look the same"]


def test_control_runs_on_other_data_differ() -> None:
    assert all_found(run_ranks(2, same_twice)) == []

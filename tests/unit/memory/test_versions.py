"""A bucket's replica is fresh, stale or in flight, and goes round in that order only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import layerwise
from layerwise.errors import StateError
from layerwise.memory.storage import Bucket, ReplicaState

MOVES: dict[str, Callable[[Bucket], None]] = {"advance": Bucket.advance, "launch": Bucket.launch, "land": Bucket.land}
LEGAL = {
    ReplicaState.FRESH: ("advance", ReplicaState.STALE),
    ReplicaState.STALE: ("launch", ReplicaState.IN_FLIGHT),
    ReplicaState.IN_FLIGHT: ("land", ReplicaState.FRESH),
}
TARGET = dict(LEGAL.values())


def bucket_in(state: ReplicaState) -> Bucket:
    """A bucket that has been around twice and is in this state."""
    bucket = layerwise.DataParallel(nn.Linear(3, 3)).engine.storage.shards[0]
    for _ in range(2):
        for move in MOVES.values():
            move(bucket)
    while bucket.replica_state is not state:
        MOVES[LEGAL[bucket.replica_state][0]](bucket)
    return bucket


def versions(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.master_version, bucket.launched_version, bucket.replica_version


def test_a_bucket_begins_fresh() -> None:
    bucket = layerwise.DataParallel(nn.Linear(3, 3)).engine.storage.shards[0]
    assert bucket.replica_state is ReplicaState.FRESH
    assert versions(bucket) == (0, 0, 0)


@pytest.mark.parametrize("state", ReplicaState)
def test_the_legal_move_leads_to_the_next_state(state: ReplicaState) -> None:
    bucket = bucket_in(state)
    move, target = LEGAL[state]
    MOVES[move](bucket)
    assert bucket.replica_state is target


@pytest.mark.parametrize("state", ReplicaState)
@pytest.mark.parametrize("move", MOVES)
def test_any_other_move_names_both_states_and_changes_nothing(state: ReplicaState, move: str) -> None:
    if LEGAL[state][0] == move:
        return
    bucket = bucket_in(state)
    before = versions(bucket)
    with pytest.raises(StateError) as caught:
        MOVES[move](bucket)
    text = str(caught.value)
    assert f"cannot become {TARGET[move].value}" in text
    assert f"its replica is {state.value}" in text
    assert bucket.plan.label in text
    assert versions(bucket) == before


def test_versions_count_steps() -> None:
    bucket = bucket_in(ReplicaState.FRESH)
    assert versions(bucket) == (2, 2, 2)
    bucket.advance()
    assert versions(bucket) == (3, 2, 2)
    bucket.launch()
    assert versions(bucket) == (3, 3, 2)
    bucket.land()
    assert versions(bucket) == (3, 3, 3)

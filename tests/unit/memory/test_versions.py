"""A bucket's replica is fresh, stale or in flight, and goes round in that order only."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import layerwise
from layerwise.errors import StateError
from layerwise.memory.replicas import Replica, ReplicaState


def advance(replica: Replica) -> None:
    """A step moves the master."""
    replica.expect_fresh()
    replica.shard.version += 1


MOVES: dict[str, Callable[[Replica], None]] = {"advance": advance, "launch": Replica.launch, "land": Replica.land}
LEGAL = {
    ReplicaState.FRESH: ("advance", ReplicaState.STALE),
    ReplicaState.STALE: ("launch", ReplicaState.IN_FLIGHT),
    ReplicaState.IN_FLIGHT: ("land", ReplicaState.FRESH),
}
TARGET = dict(LEGAL.values())


def replica_in(state: ReplicaState) -> Replica:
    """A replica that has been around twice and is in this state."""
    replica = layerwise.DataParallel(nn.Linear(3, 3)).engine.storage.replicas[0]
    for _ in range(2):
        for move in MOVES.values():
            move(replica)
    while replica.state is not state:
        MOVES[LEGAL[replica.state][0]](replica)
    return replica


def versions(replica: Replica) -> tuple[int, int, int]:
    return replica.shard.version, replica.launched_version, replica.version


def test_a_replica_begins_fresh() -> None:
    replica = layerwise.DataParallel(nn.Linear(3, 3)).engine.storage.replicas[0]
    assert replica.state is ReplicaState.FRESH
    assert versions(replica) == (0, 0, 0)


@pytest.mark.parametrize("state", ReplicaState)
def test_the_legal_move_leads_to_the_next_state(state: ReplicaState) -> None:
    replica = replica_in(state)
    move, target = LEGAL[state]
    MOVES[move](replica)
    assert replica.state is target


@pytest.mark.parametrize("state", ReplicaState)
@pytest.mark.parametrize("move", MOVES)
def test_any_other_move_names_both_states_and_changes_nothing(state: ReplicaState, move: str) -> None:
    if LEGAL[state][0] == move:
        return
    replica = replica_in(state)
    before = versions(replica)
    with pytest.raises(StateError) as caught:
        MOVES[move](replica)
    text = str(caught.value)
    assert f"cannot become {TARGET[move].value}" in text
    assert f"its replica is {state.value}" in text
    assert replica.plan.label in text
    assert versions(replica) == before


def test_versions_count_steps() -> None:
    replica = replica_in(ReplicaState.FRESH)
    assert versions(replica) == (2, 2, 2)
    advance(replica)
    assert versions(replica) == (3, 2, 2)
    replica.launch()
    assert versions(replica) == (3, 3, 2)
    replica.land()
    assert versions(replica) == (3, 3, 3)


def test_what_is_sent_of_a_stale_replica_is_its_shard_rounded_to_what_forward_reads() -> None:
    module = nn.Linear(3, 3).bfloat16()
    (replica, *_) = layerwise.DataParallel(module).engine.storage.replicas
    advance(replica)
    replica.shard.master.fill_(1.0 + 2.0**-12)
    message = replica.message()
    assert message.data_ptr() == replica.shard.weight.data_ptr()
    assert message.unique().tolist() == [1.0]
    assert replica.state is ReplicaState.STALE


@pytest.mark.parametrize("state", [ReplicaState.FRESH, ReplicaState.IN_FLIGHT])
def test_only_a_stale_replica_has_something_to_send(state: ReplicaState) -> None:
    replica = replica_in(state)
    before = versions(replica)
    with pytest.raises(StateError, match=f"cannot become in flight: its replica is {state.value}"):
        replica.message()
    assert versions(replica) == before

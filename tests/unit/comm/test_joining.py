from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerwise
from layerwise.errors import StateError
from tests.ranks import RankFailure, raised, run_ranks
from tests.worlds import Net


def optimizer_of(model: nn.Module, **more: Any) -> layerwise.Optimizer:
    return layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.01), **more)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of one of two ranks that torchrun started, with nobody to meet."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def test_alone_init_makes_no_group_and_says_so() -> None:
    ranks = layerwise.init(device="cpu")
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.device.type) == (0, 1, 0, "cpu")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("build", [layerwise.DataParallel, optimizer_of])
def test_ranks_that_never_met_do_not_train_a_model_each(build: Any) -> None:
    with pytest.raises(StateError, match=r"2 ranks \(WORLD_SIZE=2\).*no process group.*Call layerwise.init\(\)"):
        build(Net())


def test_a_launcher_of_one_rank_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert layerwise.DataParallel(Net()).plan.world == 1


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 says that there are several ranks, and RANK is not set: expected both"),
        ({"RANK": "1"}, "RANK=1 says that there are several ranks, and WORLD_SIZE is not set: expected both"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is none of WORLD_SIZE=2 ranks: expected 0 to 1."),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x' in the environment: expected a number"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1' in the environment: expected a number"),
    ],
)
def test_half_of_a_launcher_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(said)):
        layerwise.init(device="cpu")


def test_one_rank_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "1"), ("RANK", ""), ("LOCAL_RANK", "")):
        monkeypatch.setenv(name, value)
    assert layerwise.init(device="cpu").world == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout_s": -1}, "timeout_s must be a number of seconds above 0, got -1."),
        ({"timeout_s": "x"}, "timeout_s must be a number of seconds above 0, got 'x'."),
        ({"device": "foo"}, "device must be 'auto', 'cuda' or 'cpu', got 'foo'."),
    ],
)
def test_wrong_arguments_of_init_are_named_also_where_nobody_is_met(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        layerwise.init(**given)


def init_twice(rank: int, world: int) -> list[Any]:
    before = dist.group.WORLD
    ranks = layerwise.init(device="cpu")
    return [ranks.rank, ranks.world, dist.group.WORLD is before]


def test_init_leaves_a_group_that_is_there_as_it_is() -> None:
    assert run_ranks(2, init_twice) == [[0, 2, True], [1, 2, True]]


def wrap_before_meeting(rank: int, world: int, meet: str) -> str:
    model = layerwise.DataParallel(Net())
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    return raised(lambda: optimizer_of(model))


def test_a_model_that_was_wrapped_before_ranks_met_is_refused_by_the_optimizer(tmp_path: Path) -> None:
    for text in run_ranks(2, wrap_before_meeting, str(tmp_path / "meet"), meet=False):
        assert text.startswith("StateError: the model was wrapped for a single process")
        assert "2 ranks" in text
        assert "layerwise.init() first" in text


def train_in_groups(rank: int, world: int) -> list[Any]:
    """Ranks 0 and 2 train one model, rank 1 another."""
    from tests.worlds import hash_tensors, net_loss

    pair, single = dist.new_group([0, 2]), dist.new_group([1])
    mine = single if rank == 1 else pair
    model = layerwise.DataParallel(Net(), process_group=mine, layout="flat")
    optimizer = optimizer_of(model)
    for step in range(3):
        net_loss(model, rank, step).backward()
        optimizer.step()
    foreign = raised(lambda: layerwise.DataParallel(Net(), process_group=pair)) if rank == 1 else ""
    return [hash_tensors([param.detach() for param in model.parameters()]), model.plan.world, foreign]


def test_a_process_group_has_the_ranks_to_train_on_and_no_others() -> None:
    first, alone, third = run_ranks(3, train_in_groups)
    assert (first[1], alone[1], third[1]) == (2, 1, 2)
    assert first[0] == third[0]
    assert first[0] != alone[0]
    assert "process_group must be a torch ProcessGroup that this rank is in" in alone[2]


def train_in_groups_that_overlap(rank: int, world: int) -> list[Any]:
    """Rank 1 is in more groups than the others, and one of them goes."""
    pairs, spare = [dist.new_group([0, 1]), dist.new_group([1, 2])], dist.new_group()
    found = [
        layerwise.DataParallel(Net(), process_group=pair).plan.world
        for ranks, pair in zip(((0, 1), (1, 2)), pairs, strict=True)
        if rank in ranks
    ]
    dist.destroy_process_group(spare)
    found.extend(layerwise.DataParallel(Net(), process_group=dist.group.WORLD).plan.world for _ in range(2))
    dist.destroy_process_group(pairs[0]) if rank < 2 else None
    return [*found, layerwise.DataParallel(Net(), process_group=dist.group.WORLD).plan.world]


def test_ranks_of_a_process_group_may_be_in_other_numbers_of_groups() -> None:
    assert run_ranks(3, train_in_groups_that_overlap) == [
        [2, 3, 3, 3],
        [2, 2, 3, 3, 3],
        [2, 3, 3, 3],
    ]


def wrap_in_what_is_gone(rank: int, world: int) -> str:
    group = dist.new_group([0, 1])
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group(group)
    return raised(lambda: layerwise.DataParallel(Net(), process_group=group))


def test_a_process_group_that_was_destroyed_is_refused_in_words() -> None:
    for text in run_ranks(2, wrap_in_what_is_gone):
        assert text.startswith("ValueError: process_group was destroyed")


def test_a_process_group_beside_a_mesh_is_refused() -> None:
    assert "Leave process_group out" in run_ranks(2, _both)[0]


def _both(rank: int, world: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    return raised(lambda: layerwise.DataParallel(Net(), mesh=mesh, process_group=dist.group.WORLD))


def come(rank: int, world: int, port: int, restarts: int, timeout_s: float) -> int:
    """Meet as a rank that torchrun started, and add up 1 over all ranks; the process ends without a word to the others."""
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    # Agents of two nodes do not always count restarts alike.
    os.environ.update(agent, RANK=str(rank), WORLD_SIZE=str(world), TORCHELASTIC_RESTART_COUNT=str(restarts * rank))
    if rank == world - 1 and timeout_s < 10:
        return 0
    layerwise.init(device="cpu", timeout_s=timeout_s)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=dist.new_group())
    return int(ones)


def test_ranks_that_are_started_again_meet_in_the_store_of_those_before_them() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, world in enumerate([2, 2, 3, 2]):
        assert run_ranks(world, come, store.port, attempt, 60.0, meet=False) == [world] * world


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(
        RankFailure, match=r"ranks 2 of 3 did not come to layerwise.init\(\) in 3 s: expected every rank"
    ):
        run_ranks(3, come, store.port, 0, 3.0, meet=False)

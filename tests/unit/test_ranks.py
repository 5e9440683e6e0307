"""The harness: ranks that gloo does not connect are started again, once; whatever else goes wrong is a failure at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests import ranks
from tests.ranks import SILENCE, RankFailure, _Answers, raised, run_ranks

LOST = "Gloo connectFullMesh failed with [pair.cc:144] no error"
PEER = "Traceback ... RuntimeError: [pair.cc:537] Connection closed by peer [127.0.0.1]:1"


def failing(rank: int, world: int) -> None:
    raise RuntimeError("of the job")


def unlucky(rank: int, world: int, folder: str, misses: int, swallow: bool) -> str:
    """A group of the job's own that gloo does not connect, as often as told; every rank leaves a note of each time."""
    dist.barrier()  # who fails leaves at once, and would cut off a peer that is still connecting the first group
    times = len(list(Path(folder).glob(f"{rank}.*")))
    (Path(folder) / f"{rank}.{times}").touch()

    def gloo(*_: Any, **__: Any) -> None:
        raise RuntimeError(LOST)

    real = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = gloo if times < misses else real
    return raised(dist.new_group) if swallow else str(dist.get_world_size(dist.new_group()))


@pytest.mark.parametrize("swallow", [False, True])
def test_ranks_that_do_not_find_each_other_are_started_once_more(tmp_path: Path, swallow: bool) -> None:
    good = "nothing was raised" if swallow else "2"
    assert run_ranks(2, unlucky, str(tmp_path), 1, swallow) == [good] * 2
    assert len(list(tmp_path.iterdir())) == 2 * 2


def test_ranks_that_do_not_find_each_other_twice_are_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="connectFullMesh failed"):
        run_ranks(2, unlucky, str(tmp_path), 3, False)
    assert len(list(tmp_path.iterdir())) == 2 * 2


def test_a_job_that_raises_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, times = ranks._run_once, 0

    def counted(*given: Any) -> Any:
        nonlocal times
        times += 1
        return real(*given)

    monkeypatch.setattr(ranks, "_run_once", counted)
    with pytest.raises(RankFailure, match="of the job"):
        run_ranks(2, failing)
    assert times == 1


@pytest.mark.parametrize(
    ("errors", "lost", "is_gloos"),
    [
        ({0: LOST, 1: PEER}, {0, 1}, True),
        ({0: LOST, 1: PEER}, {0}, True),  # the other was past this group, and saw its peer go
        ({0: LOST, SILENCE: "ranks [1] did not answer"}, {0}, True),
        ({0: "ValueError: of the job", 1: LOST}, {1}, False),  # the first one's end is why the second was not connected
        ({0: LOST, 1: "died with exit code -11 and no answer"}, {0}, False),
        ({0: PEER, 1: PEER}, set(), False),  # in a collective, and not when a group was made
        ({SILENCE: "ranks [0, 1] did not answer"}, set(), False),
        ({}, set(), False),
    ],
)
def test_only_groups_that_were_not_connected_and_what_follows_from_them_are_gloos_fault(
    errors: dict[int, str], lost: set[int], is_gloos: bool
) -> None:
    assert _Answers(errors=errors, lost=lost).is_gloos_fault is is_gloos

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.contract import Contract
from layerwise.comm.facts import gather_facts
from layerwise.comm.groups import NO_GROUPS, agree, derive_together
from layerwise.dtypes import DType
from layerwise.errors import ContractError
from layerwise.layout.schedule import CommOp
from tests.ranks import raised, run_ranks

NUMEL = 12


def op(
    kind: str, *, numel: int = NUMEL, dtype: DType = DType.FP32, world: int = 1, sent: tuple[int, ...] = ()
) -> CommOp:
    return CommOp("reduce", kind, "bucket 7", dtype, numel, world, sent)  # type: ignore[arg-type]


def ones(numel: int = NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(numel, dtype=dtype)


def test_one_rank_takes_the_same_path_and_sends_nothing() -> None:
    alone = Communicator(None)
    values = torch.arange(12.0)
    assert torch.equal(alone.reduce_scatter(op("reduce_scatter"), values, torch.zeros(12)).wait(), values)
    assert torch.equal(alone.all_reduce(op("all_reduce"), values.clone()).wait(), values)
    assert torch.equal(alone.all_gather(op("all_gather"), values, torch.zeros(12)).wait(), values)
    nothing = torch.zeros(0)
    assert alone.all_to_all(op("all_to_all", numel=0, sent=(0,)), nothing, nothing, [0], [0]).wait().numel() == 0
    whole = alone.uneven_all_gather(op("uneven_all_gather", sent=(0,)), values.clone(), [12]).wait()
    assert torch.equal(whole, values)
    alone.broadcast(values, label="bucket 7")
    assert set(alone.sent_nbytes.values()) == {0}


WRONG_CALLS: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "another kind": (
        lambda comm: comm.all_reduce(op("all_gather"), ones()),
        "the schedule has a all_gather here, the call is a all_reduce",
    ),
    "another dtype": (
        lambda comm: comm.all_reduce(op("all_reduce"), ones(dtype=torch.bfloat16)),
        "dtype fp32, the tensor torch.bfloat16",
    ),
    "another size": (
        lambda comm: comm.all_reduce(op("all_reduce"), ones(11)),
        "the schedule has 12 elements, the tensor 11",
    ),
    "a shard of another size": (
        lambda comm: comm.reduce_scatter(op("reduce_scatter"), ones(), ones(5)),
        "a shard of 5 elements times 1 ranks is not 12",
    ),
    "a shard of another dtype": (
        lambda comm: comm.all_gather(op("all_gather"), ones(dtype=torch.bfloat16), ones()),
        "torch.float32 and torch.bfloat16",
    ),
    "a strided tensor": (
        lambda comm: comm.all_reduce(op("all_reduce"), ones(24)[::2]),
        r"shape \(12,\) is not contiguous. Pass a contiguous tensor",
    ),
    "a strided shard": (lambda comm: comm.all_gather(op("all_gather"), ones(24)[::2], ones()), "is not contiguous"),
    "a bucket of another size in an uneven gather": (
        lambda comm: comm.uneven_all_gather(op("uneven_all_gather", sent=(0,)), ones(11), [11]),
        "the schedule has 12 elements, the tensor 11",
    ),
    "a bucket of another dtype in an uneven gather": (
        lambda comm: comm.uneven_all_gather(op("uneven_all_gather", sent=(0,)), ones(dtype=torch.float16), [12]),
        "dtype fp32, the tensor torch.float16",
    ),
    "a strided bucket in an uneven gather": (
        lambda comm: comm.uneven_all_gather(op("uneven_all_gather", sent=(0,)), ones(24)[::2], [12]),
        "is not contiguous",
    ),
    "an even gather where an uneven one is due": (
        lambda comm: comm.all_gather(op("uneven_all_gather", sent=(0,)), ones(), ones()),
        "the schedule has a uneven_all_gather here, the call is a all_gather",
    ),
    "an all-to-all that sends more than was planned": (
        lambda comm: comm.all_to_all(op("all_to_all", sent=(0,)), ones(), ones(), [11, 1], [12]),
        "the schedule has 0 elements, the tensor 1",
    ),
    "splits that miss elements": (
        lambda comm: comm.all_to_all(op("all_to_all", sent=(0,)), ones(), ones(), [12], [11]),
        "splits 12 and 11 do not match tensors of 12 and 12 elements",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_call_that_is_not_in_the_schedule_is_refused_by_name(name: str) -> None:
    call, text = WRONG_CALLS[name]
    with pytest.raises(ContractError, match=rf"bucket 7: .*{text}"):
        call(Communicator(None))


def every_collective(rank: int, world: int) -> tuple[list[list[float]], dict[str, int], dict[str, int]]:
    """Each kind once; the results, the bytes that were counted and those that the schedule has."""
    comm = Communicator(dist.group.WORLD)
    full = torch.arange(float(NUMEL)) * (rank + 1)
    shard = torch.full((NUMEL // world,), float(rank))
    sends, receives = [[0, 2, 1], [0, 0, 0], [3, 0, 0]], [[0, 0, 3], [2, 0, 0], [1, 0, 0]]
    ops = {
        "reduce_scatter": op("reduce_scatter", world=world),
        "all_reduce": op("all_reduce", world=world),
        "all_gather": op("all_gather", world=world),
        "all_to_all": op("all_to_all", numel=6, world=world, sent=(3, 0, 3)),
    }
    sent = torch.arange(float(sum(sends[rank]))) + 10 * rank
    results = [
        comm.reduce_scatter(ops["reduce_scatter"], full, torch.zeros(NUMEL // world)).wait(),
        comm.all_reduce(ops["all_reduce"], full.clone()).wait(),
        comm.all_gather(ops["all_gather"], shard, torch.zeros(NUMEL)).wait(),
        comm.all_to_all(ops["all_to_all"], sent, torch.zeros(sum(receives[rank])), sends[rank], receives[rank]).wait(),
    ]
    comm.broadcast(full, label="weights", source=1)
    predicted = {kind: entry.nbytes(rank) for kind, entry in ops.items()}
    return [result.tolist() for result in [*results, full]], dict(comm.sent_nbytes), predicted


def test_three_ranks_get_what_each_collective_promises_and_count_what_the_schedule_says() -> None:
    total = [6.0 * index for index in range(NUMEL)]
    arrived = [[20.0, 21.0, 22.0], [0.0, 1.0], [2.0]]
    for rank, (results, counted, predicted) in enumerate(run_ranks(3, every_collective)):
        scattered, reduced, gathered, exchanged, spread = results
        assert scattered == total[4 * rank : 4 * rank + 4]
        assert reduced == total
        assert gathered == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
        assert exchanged == arrived[rank]
        assert spread == [2.0 * index for index in range(NUMEL)]
        assert counted == predicted


def gathered_in_place(rank: int, world: int, numel: int) -> tuple[bool, int]:
    """A gather of which this rank's part lies where it is to be; whether all is there, and the most memory that it took."""
    comm, full = Communicator(dist.group.WORLD, on_one_machine=True), torch.full((numel * world,), -1.0)
    mine = full[rank * numel : (rank + 1) * numel].fill_(rank)
    comm.all_gather(op("all_gather", numel=numel * world, world=world), mine, full).wait()  # buffers of the transport
    full.fill_(-1.0)
    mine.fill_(rank)
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = _most_resident()
    comm.all_gather(op("all_gather", numel=numel * world, world=world), mine, full).wait()
    more = _most_resident() - before
    return all(bool((part == source).all()) for source, part in enumerate(full.chunk(world))), more


def _most_resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux, which counts memory")
def test_a_gather_on_one_machine_goes_from_where_it_lies_to_where_it_belongs() -> None:
    numel = 4 << 20
    for is_right, more in run_ranks(2, gathered_in_place, numel):
        assert is_right
        assert more < numel * 4 // 2, f"{more >> 20} MiB beside a gather of {numel * 8 >> 20}"


def facts_of_all(rank: int, world: int) -> list[object]:
    return gather_facts({"rank": rank, "word": "é" * 50 * rank, "splits": (rank, 1)})


def test_facts_of_different_lengths_come_back_whole_and_in_rank_order() -> None:
    expected = [{"rank": rank, "word": "é" * 50 * rank, "splits": [rank, 1]} for rank in range(3)]
    assert run_ranks(3, facts_of_all) == [expected] * 3


def test_one_process_agrees_with_itself_and_keeps_its_own_errors() -> None:
    agree(NO_GROUPS, "plans", {"world": 1})
    assert derive_together(NO_GROUPS, "plans", lambda: 7, lambda _: {}) == 7
    with pytest.raises(ZeroDivisionError):
        derive_together(NO_GROUPS, "plans", lambda: 1 // 0, lambda _: {})


STRETCHES = [5, 0, 7]


def spread(rank: int, world: int, dtype: torch.dtype) -> tuple[list[float], dict[str, int], dict[str, int]]:
    """Every rank's own values into its stretch: the whole tensor afterwards, the bytes counted, and the bytes planned."""
    comm = Communicator(dist.group.WORLD)
    plain = DType.FP32 if dtype == torch.float32 else DType.BF16
    sent = tuple(NUMEL - STRETCHES[(other + 1) % world] for other in range(world))
    gather = op("uneven_all_gather", dtype=plain, world=world, sent=sent)
    full = (torch.arange(NUMEL) + 100 * rank).to(dtype)
    gathered = comm.uneven_all_gather(gather, full, STRETCHES).wait()
    assert gathered.data_ptr() == full.data_ptr()  # in place
    return gathered.float().tolist(), dict(comm.sent_nbytes), {"uneven_all_gather": gather.nbytes(rank)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uneven_stretches_reach_all_ranks_also_those_that_own_nothing(dtype: torch.dtype) -> None:
    for gathered, counted, predicted in run_ranks(3, spread, dtype):
        assert gathered == [0, 1, 2, 3, 4, *(200 + index for index in range(5, 12))]
        assert counted == predicted


def spread_in_pair(rank: int, world: int) -> list[float]:
    """In a group whose numbers are not those of the world."""
    pair = dist.new_group([1, 3])
    if rank not in (1, 3):
        return []
    comm = Communicator(pair)
    full = torch.arange(4.0) + 10 * rank
    comm.uneven_all_gather(op("uneven_all_gather", numel=4, world=2, sent=(3, 1)), full, [1, 3]).wait()
    last = torch.tensor([float(rank)])
    comm.broadcast(last, label="x", source=1)
    return [*full.tolist(), *last.tolist()]


def test_sources_are_numbers_within_their_group() -> None:
    found = [10.0, 31.0, 32.0, 33.0, 3.0]
    assert run_ranks(4, spread_in_pair) == [[], found, [], found]


def differ_in_stretches(rank: int, world: int) -> str:
    """Two ranks that agree on the bucket and not on who owns what in it."""
    comm = Communicator(dist.group.WORLD, Contract(dist.new_group()))
    full = torch.arange(float(NUMEL))
    stretches, sent = ([8, 4], (8, 4)) if rank == 0 else ([4, 8], (4, 8))
    entry = op("uneven_all_gather", world=world, sent=sent)
    return raised(lambda: comm.uneven_all_gather(entry, full, stretches).wait())


def test_ranks_that_disagree_about_stretches_are_stopped() -> None:
    for answer in run_ranks(2, differ_in_stretches):
        assert answer.startswith("ContractError")

"""S7, comm_contract: ways in which three ranks can be about to issue different collectives, each stopped on every rank before data moves.

Rank 1 is the culprit. Nine classes, and those of them again that a gather of uneven stretches, an ordered sum and a domain of two of the ranks can have;
in a domain only its members are stopped. Without the contract most of these come out as wrong numbers or as a hang; the control shows some that pass in
silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.contract import Contract, Fingerprint
from layerwise.dtypes import DType
from layerwise.errors import ContractError
from layerwise.layout.schedule import CommOp
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.worlds import hash_tensors

CULPRIT = 1
SLOWEST_S = 10.0
"""A violation that takes longer was noticed by a timeout, and not by the contract."""
_NUMEL = 12


@dataclass
class Attempt:
    """One rank's part in a violation: the tensors it brings and the call it is about to make."""

    tensors: list[Tensor]
    call: Callable[[], object] | None
    """None for a rank that has no part in it."""


def _op(
    kind: str, numel: int = _NUMEL, dtype: DType = DType.FP32, label: str = "bucket 0", sent: tuple[int, ...] = ()
) -> CommOp:
    return CommOp("reduce", kind, label, dtype, numel, 3, sent)  # type: ignore[arg-type]


def _values(rank: int, numel: int = _NUMEL, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(numel).to(dtype) + 100 * rank


def _dtype(comm: Communicator, rank: int) -> Attempt:
    wide = rank == CULPRIT
    mine = _values(rank, dtype=torch.float64 if wide else torch.float32)
    return Attempt(
        [mine], lambda: comm.all_reduce(_op("all_reduce", dtype=DType.FP64 if wide else DType.FP32), mine).wait()
    )


def _numel(comm: Communicator, rank: int) -> Attempt:
    mine = _values(rank, _NUMEL - 3 * (rank == CULPRIT))
    return Attempt([mine], lambda: comm.all_reduce(_op("all_reduce", mine.numel()), mine).wait())


def _kind(comm: Communicator, rank: int) -> Attempt:
    mine, full = _values(rank, 4), _values(rank)
    if rank == CULPRIT:
        return Attempt([mine, full], lambda: comm.reduce_scatter(_op("reduce_scatter"), full, mine).wait())
    return Attempt([mine, full], lambda: comm.all_gather(_op("all_gather"), mine, full).wait())


def _order(comm: Communicator, rank: int) -> Attempt:
    first, second = _values(rank), _values(rank) + 1000

    def call() -> None:
        calls = [(_op("all_reduce", label="bucket 0"), first), (_op("all_reduce", label="bucket 1"), second)]
        for op, tensor in reversed(calls) if rank == CULPRIT else calls:
            comm.all_reduce(op, tensor).wait()

    return Attempt([first, second], call)


class _OtherReduction(Communicator):
    """What a rank with another reduction would do: its fingerprint says max, and so does its collective."""

    def all_reduce(self, op: CommOp, tensor: Tensor) -> object:  # type: ignore[override]
        if self.contract is None:
            return dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        self.contract = _SaysMax(self.contract.control)
        return super().all_reduce(op, tensor).wait()


class _SaysMax(Contract):
    def check(self, mine: Fingerprint) -> None:
        super().check(replace(mine, reduce="max"))


def _reduction(comm: Communicator, rank: int) -> Attempt:
    mine = _values(rank)
    if rank == CULPRIT:
        other = _OtherReduction(comm.group, comm.contract)
        return Attempt([mine], lambda: other.all_reduce(_op("all_reduce"), mine))
    return Attempt([mine], lambda: comm.all_reduce(_op("all_reduce"), mine).wait())


def _root(comm: Communicator, rank: int) -> Attempt:
    mine = _values(rank)
    return Attempt([mine], lambda: comm.broadcast(mine, label="bucket 0", source=1 if rank == CULPRIT else 0))


def _splits(comm: Communicator, rank: int) -> Attempt:
    splits = (4, 4, 4)
    mine, incoming = _values(rank), _values(rank)
    receives = (4, 6, 2) if rank == CULPRIT else splits
    op = _op("all_to_all", numel=24, sent=(8, 8, 8))
    return Attempt([mine, incoming], lambda: comm.all_to_all(op, mine, incoming, splits, receives).wait())


def _strided(comm: Communicator, rank: int) -> Attempt:
    whole = _values(rank, 2 * _NUMEL)
    mine = whole[::2] if rank == CULPRIT else whole[:_NUMEL]
    return Attempt([whole], lambda: comm.all_reduce(_op("all_reduce"), mine).wait())


def _outsider(comm: Communicator, rank: int) -> Attempt:
    pair = dist.new_group([0, 2])
    mine = _values(rank)
    inside = Communicator(pair, comm.contract)
    return Attempt([mine], lambda: inside.all_reduce(_op("all_reduce"), mine).wait())


_STRETCHES = (5, 0, 7)
_RING = (12, 5, 7)
"""What each rank sends of these in a ring: all but what its successor owns."""


def _uneven(comm: Communicator, tensor: Tensor, **changes: Any) -> Callable[[], object]:
    """A gather of uneven stretches, of whatever the tensor is."""
    numel = changes.get("numel", tensor.numel())
    op = _op("uneven_all_gather", numel, changes.get("dtype", DType.FP32), changes.get("label", "bucket 0"), _RING)
    stretches = (numel - 7, 0, 7)
    return lambda: comm.uneven_all_gather(op, tensor, stretches).wait()


def _uneven_dtype(comm: Communicator, rank: int) -> Attempt:
    wide = rank == CULPRIT
    mine = _values(rank, dtype=torch.float64 if wide else torch.float32)
    return Attempt([mine], _uneven(comm, mine, dtype=DType.FP64 if wide else DType.FP32))


def _uneven_numel(comm: Communicator, rank: int) -> Attempt:
    mine = _values(rank, _NUMEL - (rank == CULPRIT))
    return Attempt([mine], _uneven(comm, mine))


def _uneven_order(comm: Communicator, rank: int) -> Attempt:
    first, second = _values(rank), _values(rank) + 1000
    calls = [_uneven(comm, first, label="bucket 0"), _uneven(comm, second, label="bucket 1")]

    def call() -> None:
        for each in reversed(calls) if rank == CULPRIT else calls:
            each()

    return Attempt([first, second], call)


def _uneven_kind(comm: Communicator, rank: int) -> Attempt:
    mine, full = _values(rank, 4), _values(rank)
    if rank == CULPRIT:
        return Attempt([full], lambda: comm.all_gather(_op("all_gather"), mine, full).wait())
    return Attempt([full], _uneven(comm, full))


def _uneven_strided(comm: Communicator, rank: int) -> Attempt:
    whole = _values(rank, 2 * _NUMEL)
    return Attempt([whole], _uneven(comm, whole[::2] if rank == CULPRIT else whole[:_NUMEL]))


def _ordered_splits(comm: Communicator, rank: int) -> Attempt:
    """An ordered sum: every rank sends each owner its stretch, and gets its own from all. The culprit owns another."""
    splits = _STRETCHES[::-1] if rank == CULPRIT else _STRETCHES
    mine, incoming = _values(rank), _values(rank, 3 * splits[rank])
    op = _op("all_to_all", numel=24, sent=tuple(_NUMEL - split for split in splits))
    return Attempt([mine, incoming], lambda: comm.all_to_all(op, mine, incoming, splits, [splits[rank]] * 3).wait())


def _ordered_wire(comm: Communicator, rank: int) -> Attempt:
    """The culprit rounds for the wire, the others do not."""
    narrow = rank == CULPRIT
    dtype = torch.bfloat16 if narrow else torch.float32
    mine, incoming = _values(rank, dtype=dtype), _values(rank, 3 * _STRETCHES[rank], dtype=dtype)
    sent = tuple(_NUMEL - stretch for stretch in _STRETCHES)
    op = _op("all_to_all", numel=24, dtype=DType.BF16 if narrow else DType.FP32, sent=sent)
    return Attempt(
        [mine, incoming], lambda: comm.all_to_all(op, mine, incoming, _STRETCHES, [_STRETCHES[rank]] * 3).wait()
    )


def _in_domain(violation: Callable[[Communicator, int], Attempt]) -> Callable[[Communicator, int], Attempt]:
    """The same violation in a domain of ranks 0 and 1; rank 2 is alone in its own and must notice nothing."""

    def attempt(comm: Communicator, rank: int) -> Attempt:
        control = dist.new_group([0, 1])
        pair = dist.new_group([0, 1])
        if rank == 2:
            return Attempt([_values(rank)], None)
        contract = Contract(control) if comm.contract is not None else None
        return violation(Communicator(pair, contract), rank)

    return attempt


VIOLATIONS: dict[str, Callable[[Communicator, int], Attempt]] = {
    "another dtype": _dtype,
    "another number of elements": _numel,
    "another kind of collective": _kind,
    "two collectives in another order": _order,
    "another reduction": _reduction,
    "another root": _root,
    "other splits": _splits,
    "a strided tensor": _strided,
    "a rank outside the group": _outsider,
    "another dtype in an uneven gather": _uneven_dtype,
    "another number of elements in an uneven gather": _uneven_numel,
    "two uneven gathers in another order": _uneven_order,
    "an even gather among uneven ones": _uneven_kind,
    "a strided tensor in an uneven gather": _uneven_strided,
    "other stretches in an ordered sum": _ordered_splits,
    "a narrower wire in an ordered sum": _ordered_wire,
    "another dtype in a domain": _in_domain(_dtype),
    "another number of elements in a domain": _in_domain(_numel),
    "two collectives in another order in a domain": _in_domain(_order),
    "another root in a domain": _in_domain(_root),
}
SILENT = (
    "two collectives in another order",
    "another reduction",
    "two uneven gathers in another order",
    "two collectives in another order in a domain",
)
"""Violations that gloo carries out without a word: the ones that a switched-off contract is shown with."""


def violate(rank: int, world: int, name: str, checked: bool) -> str:
    """Commit one violation; what is wrong with how it was taken on this rank, or nothing."""
    contract = Contract(dist.new_group()) if checked else None
    attempt = VIOLATIONS[name](Communicator(dist.group.WORLD, contract), rank)
    before = hash_tensors(attempt.tensors)
    dist.barrier()
    begin = time.monotonic()
    if attempt.call is None:
        return ""
    try:
        attempt.call()
    except ContractError as error:
        caught = str(error)
    except Exception as error:
        return f"raised {type(error).__name__} ({str(error)[:120]}), expected ContractError"
    else:
        return "nothing was raised"
    seconds = time.monotonic() - begin
    if hash_tensors(attempt.tensors) != before:
        return "data moved"
    if f"rank {CULPRIT}" not in caught:
        return f"the culprit is not named: {caught}"
    return f"took {seconds:.1f} s" if seconds > SLOWEST_S else ""


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every violation on three ranks; with sabotage without a contract, those that then pass in silence."""
    complaints: dict[str, str] = {}
    for name in SILENT if sabotage else VIOLATIONS:
        try:
            answers = run_ranks(3, violate, name, not sabotage, timeout_s=160.0, pg_timeout_s=40.0)
        except RankFailure as failure:
            complaints[name] = str(failure)[-300:]
        else:
            complaints[name] = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(answers) if text)
    return tally(complaints)

"""Collectives with names: each call is checked against its entry in the schedule, counted, and returned as a handle.

World size 1 takes the same path with handles that are complete at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.contract import Contract, Fingerprint
from layerwise.comm.handles import Handle
from layerwise.comm.leaving import blocking
from layerwise.comm.lifetimes import Made, check_alive
from layerwise.comm.scopes import scope
from layerwise.errors import ContractError
from layerwise.layout.schedule import CommOp, wire_nbytes
from layerwise.models.table import torch_dtype

# torch 2.13 renames the *_into_tensor and *_tensor spellings and warns about the old ones; 2.11 has only those.
_all_gather: Callable[..., dist.Work] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Communicator:
    """The ranks of one domain, and every collective they may issue together."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        contract: Contract | None = None,
        sent_nbytes: Counter[str] | None = None,
        made: Made | None = None,
        *,
        on_one_machine: bool = False,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1
        self.contract = contract
        # Communicators of one engine count into the same book.
        self.sent_nbytes: Counter[str] = Counter() if sent_nbytes is None else sent_nbytes
        # The group lives for as long as this is held.
        self._made = made
        self._on_one_machine = on_one_machine
        self._group_name = getattr(group, "group_name", "")  # one that this rank is not in has none

    def counting_in(self, sent_nbytes: Counter[str]) -> Communicator:
        """The same ranks, with another book."""
        return Communicator(self.group, self.contract, sent_nbytes, self._made, on_one_machine=self._on_one_machine)

    def reduce_scatter(self, op: CommOp, full: Tensor, out: Tensor) -> Handle:
        """Sum `full` over ranks; this rank's shard of the sum lands in `out`."""
        self._check(_name(op), "reduce_scatter", full, out, op=op)
        self._count("reduce_scatter", wire_nbytes("reduce_scatter", full.nbytes, self.world))
        if self.group is None or self.world == 1:
            if out.data_ptr() != full.data_ptr():
                out.copy_(full)
            return Handle(_name(op), out)
        source, target = full.detach(), out.detach()
        with self._launching(op):
            work = _reduce_scatter(target, source, group=self.group, async_op=True)
        return Handle(_name(op), out, (source, target), (work,))

    def all_reduce(self, op: CommOp, tensor: Tensor) -> Handle:
        """Sum `tensor` over ranks, or take what is largest, as the op says; in place."""
        self._check(_name(op), "all_reduce", tensor, op=op)
        self._count("all_reduce", wire_nbytes("all_reduce", tensor.nbytes, self.world))
        if self.group is None or self.world == 1:
            return Handle(_name(op), tensor)
        alias = tensor.detach()
        with self._launching(op):
            work = dist.all_reduce(alias, _REDUCE_OPS[op.reduce], group=self.group, async_op=True)
        return Handle(_name(op), tensor, (alias,), (work,))

    def all_gather(self, op: CommOp, shard: Tensor, full: Tensor) -> Handle:
        """Every rank's `shard` into `full`, in rank order.

        On the host of one machine as one broadcast per rank, of memory where it lies: gloo brings a gather together in
        memory of its own, as much as `full` has, and takes three to five times as long. Over a wire its ring is the quicker
        one, by up to two times: a broadcast is passed on only once all of it has come.
        """
        self._check(_name(op), "all_gather", full, shard, op=op)
        self._count("all_gather", wire_nbytes("all_gather", full.nbytes, self.world))
        in_place = self._on_one_machine and full.device.type == "cpu"
        if in_place or self.group is None or self.world == 1:
            parts = full.view(self.world, full.numel() // self.world)
            if parts[self.rank].data_ptr() != shard.data_ptr():
                parts[self.rank].copy_(shard)
            return self._broadcasts(op, full, list(enumerate(parts)))
        source, target = shard.detach(), full.detach()
        with self._launching(op):
            work = _all_gather(target, source, group=self.group, async_op=True)
        return Handle(_name(op), full, (source, target), (work,))

    def uneven_all_gather(self, op: CommOp, full: Tensor, numels: Sequence[int]) -> Handle:
        """Every rank's stretch of `full`, `numels[r]` elements of rank r, to all of them, in place.

        As one broadcast per rank that has any: gloo knows no uneven all-gather. All ranks issue all of them, also those that
        own nothing, and sizes and dtype are the bucket's. Who has any has a whole param: there are no more broadcasts in a
        step than params, on however many ranks.
        """
        self._check(_name(op), "uneven_all_gather", full, op=op, parts=list(enumerate(numels)))
        self._count("uneven_all_gather", full.nbytes - numels[(self.rank + 1) % self.world] * full.element_size())
        stretches = torch.split(full, list(numels))
        return self._broadcasts(op, full, [(source, part) for source, part in enumerate(stretches) if part.numel()])

    def _broadcasts(self, op: CommOp, full: Tensor, pieces: Sequence[tuple[int, Tensor]]) -> Handle:
        """Pieces of `full`, from their sources, as views that nobody else keeps."""
        if self.group is None or self.world == 1:
            return Handle(_name(op), full)
        with self._launching(op):
            works = [
                dist.broadcast(piece, dist.get_global_rank(self.group, source), group=self.group, async_op=True)
                for source, piece in pieces
            ]
        return Handle(_name(op), full, tuple(piece for _, piece in pieces), works)

    def all_to_all(
        self, op: CommOp, send: Tensor, receive: Tensor, send_splits: Sequence[int], receive_splits: Sequence[int]
    ) -> Handle:
        """`send_splits[r]` elements of `send` to each rank r, `receive_splits[r]` from it."""
        self._check(_name(op), "all_to_all", send, receive, op=op, splits=(tuple(send_splits), tuple(receive_splits)))
        self._count("all_to_all", (send.numel() - send_splits[self.rank]) * send.element_size())
        if self.group is None or self.world == 1:
            receive.copy_(send)
            return Handle(_name(op), receive)
        source, target = send.detach(), receive.detach()
        with self._launching(op):
            work = dist.all_to_all_single(
                target, source, list(receive_splits), list(send_splits), group=self.group, async_op=True
            )
        return Handle(_name(op), receive, (source, target), (work,))

    def broadcast(self, tensor: Tensor, *, label: str, source: int = 0) -> None:
        """Rank `source`'s tensor to all, in place and at once. Used at construction only, so it is in no step's
        schedule."""
        name = f"broadcast of {label}"
        self._check(name, "broadcast", tensor, root=source)
        if self.group is not None and self.world > 1:
            with scope(name):
                first = dist.get_global_rank(self.group, source)
                blocking(lambda alias: dist.broadcast(alias, first, group=self.group), tensor)

    def gather_numbers(self, numbers: Tensor, *, label: str) -> Tensor:
        """Every rank's few numbers, one row each. For comparisons beside a step, so it is in no schedule."""
        name = f"comparison of {label}"
        self._check(name, "all_gather", numbers)
        if self.group is None or self.world == 1:
            return numbers[None]
        rows = numbers.new_empty(self.world * numbers.numel())
        with scope(name):
            blocking(_all_gather, rows, numbers, group=self.group)
        return rows.view(self.world, -1)

    def add_bits(self, bits: Tensor, *, label: str) -> None:
        """Add up integers over ranks, in place. Where one rank has a number and all others zero it is a copy. For what is put
        together beside a step, so it is in no schedule."""
        name = f"putting together {label}"
        self._check(name, "all_reduce", bits)
        if self.group is not None and self.world > 1:
            with scope(name):
                blocking(dist.all_reduce, bits, group=self.group)

    def check_alive(self, what: str) -> None:
        """Raise if there is something to send, and the group to send it over is gone."""
        if self.group is not None and self.world > 1:
            check_alive(self.group, what)

    def _launching(self, op: CommOp) -> AbstractContextManager[object]:
        """A collective is about to be under way."""
        if self._made is not None:
            self._made.issued[self._group_name] += 1
        return scope(_name(op))

    def _count(self, kind: str, nbytes: int) -> None:
        self.sent_nbytes[kind] += nbytes

    def _check(
        self,
        name: str,
        kind: str,
        tensor: Tensor,
        other: Tensor | None = None,
        *,
        op: CommOp | None = None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        root: int | None = None,
        parts: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Compare the call with its schedule entry and, where a contract is kept, with what the other ranks are about
        to do."""
        self.check_alive(name)
        problem = self._memory_problem(tensor, other) or (
            self._schedule_problem(op, kind, tensor, other, splits) if op else None
        )
        if self.contract is not None:
            self.contract.check(
                Fingerprint(
                    label=name,
                    kind=kind,
                    reduce=(op.reduce if op is not None else "sum") if "reduce" in kind else "",
                    root=root,
                    dtype=str(tensor.dtype),
                    numel=None if kind == "all_to_all" else tensor.numel(),
                    send_splits=splits[0] if splits else None,
                    receive_splits=splits[1] if splits else None,
                    parts=None if parts is None else [list(part) for part in parts],
                    problem=problem,
                )
            )
        elif problem is not None:
            raise ContractError(f"{name}: {problem}")

    def _memory_problem(self, tensor: Tensor, other: Tensor | None) -> str | None:
        if self.rank < 0:
            return "this rank is not a member of the group. Call it on the group's ranks only."
        # gloo reads and writes the wrong memory for strided tensors without saying so.
        if not tensor.is_contiguous() or (other is not None and not other.is_contiguous()):
            return f"a tensor of shape {tuple(tensor.shape)} is not contiguous. Pass a contiguous tensor."
        return None

    def _schedule_problem(
        self,
        op: CommOp,
        kind: str,
        tensor: Tensor,
        other: Tensor | None,
        splits: tuple[tuple[int, ...], tuple[int, ...]] | None,
    ) -> str | None:
        if op.kind != kind:
            return f"the schedule has a {op.kind} here, the call is a {kind}."
        if tensor.dtype != torch_dtype(op.dtype):
            return f"the schedule has dtype {op.dtype}, the tensor {tensor.dtype}."
        if other is not None and other.dtype != tensor.dtype:
            return f"the tensors have dtypes {tensor.dtype} and {other.dtype}."
        expected, found = self._expected_numel(op), self._found_numel(tensor, splits)
        if expected is not None and found != expected:
            return f"the schedule has {expected} elements, the tensor {found}."
        if (
            kind in ("reduce_scatter", "all_gather")
            and other is not None
            and other.numel() * self.world != tensor.numel()
        ):
            return f"a shard of {other.numel()} elements times {self.world} ranks is not {tensor.numel()}."
        if (
            splits is not None
            and other is not None
            and (sum(splits[0]) != tensor.numel() or sum(splits[1]) != other.numel())
        ):
            return f"splits {sum(splits[0])} and {sum(splits[1])} do not match tensors of {tensor.numel()} and {other.numel()} elements."
        return None

    def _expected_numel(self, op: CommOp) -> int | None:
        """Elements that the call must bring; None where only its ranks know."""
        if op.kind == "all_to_all":
            return op.sent[self.rank]
        return None if op.phase == "tie" else op.numel

    def _found_numel(self, tensor: Tensor, splits: tuple[tuple[int, ...], tuple[int, ...]] | None) -> int:
        """Elements of the call, without what an all-to-all keeps here."""
        return tensor.numel() - (splits[0][self.rank] if splits is not None else 0)


def _name(op: CommOp) -> str:
    return f"{op.phase} {op.kind} of {op.label}"

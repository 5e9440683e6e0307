"""How one bucket's gradient becomes its sum over ranks. The kind comes from the bucket's own plan."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from layerwise.comm.collectives import Communicator
from layerwise.comm.handles import Handle
from layerwise.dtypes import DType
from layerwise.layout.schedule import reduce_op
from layerwise.memory.replicas import Replica
from layerwise.models.table import torch_dtype


def predivisor(grad_dtype: DType, ranks: int) -> int:
    """What gradients are divided by before they are summed over this many ranks, so that a sum stays in range wherever its
    average does. Only fp16 needs that; bf16 reaches as far as fp32. A power of two changes no bit of a gradient that is
    not subnormal then."""
    return 1 << (ranks - 1).bit_length() if grad_dtype is DType.FP16 else 1


class Reduction(Protocol):
    """Sums one bucket's gradient over ranks, divided by what `predivisor` says."""

    dtype: torch.dtype
    """Of the full gradient."""

    def start(self, full: Tensor, out: Tensor) -> Handle:
        """Begin: `full` is this rank's gradient of the whole bucket, its shard of the sum lands in `out`, which may lie
        in `full`. Both belong to the reduction, which may write to them, until the handle was waited for."""
        ...


class _Scattered:
    """Reduce-scatter: every rank gets its shard of the sum and nothing else."""

    def __init__(self, replica: Replica, grad_dtype: DType, communicator: Communicator, divide: int) -> None:
        self.dtype = torch_dtype(grad_dtype)
        self._predivisor = divide
        self._communicator = communicator
        self._op = reduce_op(replica.plan, grad_dtype)

    def start(self, full: Tensor, out: Tensor) -> Handle:
        return self._communicator.reduce_scatter(self._op, _divided(full, self._predivisor), out)


class _Everywhere:
    """All-reduce, in place: every rank gets the whole sum, and takes its shard of it."""

    def __init__(self, replica: Replica, grad_dtype: DType, communicator: Communicator, divide: int) -> None:
        self.dtype = torch_dtype(grad_dtype)
        self._predivisor = divide
        self._communicator = communicator
        self._op = reduce_op(replica.plan, grad_dtype)
        self._part = replica.plan.shard_part(communicator.rank)

    def start(self, full: Tensor, out: Tensor) -> Handle:
        mine = full[self._part]
        handle = self._communicator.all_reduce(self._op, _divided(full, self._predivisor))
        return handle if mine.data_ptr() == out.data_ptr() else handle.followed_by(lambda: out.copy_(mine), out)


class _Ordered:
    """All-to-all, then a sum in fp32 in the order of ranks.

    The order of a collective's sum depends on where an element lies and on the algorithm; this one depends on neither,
    so every layout that shards gives the same bits. The wire may be narrower than the sum.
    """

    def __init__(self, replica: Replica, grad_dtype: DType, communicator: Communicator, divide: int) -> None:
        self.dtype = torch_dtype(grad_dtype)
        self._predivisor = divide
        self._communicator = communicator
        self._op = reduce_op(replica.plan, grad_dtype)
        self._splits = replica.plan.shard_numels()
        self._mine = replica.plan.shard_numel(communicator.rank)

    def start(self, full: Tensor, out: Tensor) -> Handle:
        communicator = self._communicator
        received = full.new_empty(communicator.world * self._mine)
        handle = communicator.all_to_all(self._op, full, received, self._splits, (self._mine,) * communicator.world)

        def add_up() -> None:
            parts = torch.split(received, self._mine) if self._mine else ()
            for rank, part in enumerate(parts):
                out.add_(part) if rank else out.copy_(part)
            _divided(out, self._predivisor)  # fp32: there is no hurry

        return handle.followed_by(add_up, out)


def _divided(tensor: Tensor, divisor: int) -> Tensor:
    return tensor.div_(divisor) if divisor != 1 else tensor


def reduction_of(replica: Replica, grad_dtype: DType, communicator: Communicator, divide: int = 1) -> Reduction:
    """The reduction that a bucket's plan asks for. `divide` is the `predivisor` of all ranks that gradients are averaged
    over."""
    match replica.plan.reducer:
        case "reduce_scatter":
            return _Scattered(replica, grad_dtype, communicator, divide)
        case "all_reduce":
            return _Everywhere(replica, grad_dtype, communicator, divide)
        case "ordered":
            return _Ordered(replica, grad_dtype, communicator, divide)
        case "none":
            raise ValueError(f"{replica.plan.label} is not reduced: its params' own gradients are.")

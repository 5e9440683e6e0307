"""Networks that are as unkind as they may be, so that a mistake shows every time and not once in a thousand runs."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from layerwise.comm import collectives
from tests.regressions.cases import in_place_of


class LateWork:
    """A collective of which nothing arrives before it is waited for."""

    def __init__(self, work: Any, target: Tensor, arrived: Tensor) -> None:
        self._work, self._target, self._arrived = work, target, arrived

    def wait(self) -> None:
        self._work.wait()
        self.arrive()

    def arrive(self) -> None:
        self._target.copy_(self._arrived)

    def is_completed(self) -> bool:
        return False


@contextmanager
def late_gathers() -> Iterator[None]:
    """Params that are on their way are NaN until somebody waits for them."""

    def gathering(real: Callable[..., Any]) -> Callable[..., Any]:
        def gather(full: Tensor, shard: Tensor, **how: Any) -> Any:
            if not full.is_floating_point():  # hashes, not params
                return real(full, shard, **how)
            arrived, mine = full.clone(), shard.clone()
            work = real(arrived, mine, **how)
            full.fill_(math.nan)
            shard.copy_(mine)
            return LateWork(work, full, arrived)

        return gather

    def casting(real: Callable[..., Any]) -> Callable[..., Any]:
        def broadcast(piece: Tensor, source: int, *, async_op: bool = False, **how: Any) -> Any:
            if not (async_op and piece.is_floating_point()):
                return real(piece, source, async_op=async_op, **how)
            arrived = piece.clone()
            work = real(arrived, source, async_op=True, **how)
            if source != dist.get_rank():
                piece.fill_(math.nan)
            return LateWork(work, piece, arrived)

        return broadcast

    with in_place_of(collectives, "_all_gather", gathering), in_place_of(dist, "broadcast", casting):
        yield


class _LentWork:
    """A collective that reads its source until it is waited for, and has no reference to it."""

    def __init__(self, work: Any, receive: Tensor, arrived: Tensor, send: Tensor, complaints: list[str]) -> None:
        self._work, self._arrived, self._complaints = work, arrived, complaints
        self._receive, self._send = weakref.ref(receive), send.clone()
        self._memory = StorageWeakRef(send.untyped_storage())
        self._look = _looking_at(send)

    def wait(self) -> None:
        self._work.wait()
        if self._memory.expired():
            self._complaints.append("the source of an all-to-all was freed while it was in flight")
        elif not self._look().equal(self._send):
            self._complaints.append("the source of an all-to-all was overwritten while it was in flight")
        receive = self._receive()
        if receive is not None:
            receive.copy_(self._arrived)

    def is_completed(self) -> bool:
        return False


def _looking_at(tensor: Tensor) -> Callable[[], Tensor]:
    """The memory of a tensor, later on, without keeping it alive: only to be looked at while something else does."""
    pointer, numel, dtype = tensor.data_ptr(), tensor.numel(), tensor.dtype

    def look() -> Tensor:
        raw = ctypes.string_at(pointer, numel * dtype.itemsize) if numel else b""
        return torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)

    return look


@contextmanager
def lending_all_to_alls() -> Iterator[list[str]]:
    """All-to-alls that complain when what they send from does not stay as it was until they are waited for."""
    complaints: list[str] = []

    def lending(real: Callable[..., Any]) -> Callable[..., Any]:
        def all_to_all(receive: Tensor, send: Tensor, *splits: Any, async_op: bool = False, **how: Any) -> Any:
            if not async_op:
                return real(receive, send, *splits, **how)
            arrived = receive.clone()
            work = real(arrived, send.clone(), *splits, async_op=True, **how)
            return _LentWork(work, receive, arrived, send, complaints)

        return all_to_all

    with in_place_of(dist, "all_to_all_single", lending):
        yield complaints

"""Tables from which one launch works on many tensors: where they lie, how long they are, which block is whose.

A table is a function of the numbers in it, so it is kept for as long as it is asked for: a step in which nothing moved
sends nothing, and one with new gradients sends no more than where they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

Place = tuple[torch.device, int]
"""A device and the stream that is current there: a table is there for what comes after it on its own stream."""


def place_of(device: torch.device) -> Place:
    return device, stream_on(device) if device.type == "cuda" else 0


def stream_on(device: torch.device) -> int:
    """The stream that is current on a CUDA device. As a number: torch's own object for it takes as long as a launch."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: have it be this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; on a CPU, where they are interpreted, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """From memory that the device reads by itself: the host waits for nothing."""
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _numbers(numbers: Iterable[int]) -> Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def as_integers(numbers: Iterable[float]) -> array[int]:
    """The bits of numbers in fp64."""
    return array("q", array("d", numbers).tobytes())


@lru_cache(maxsize=1024)
def address_table(addresses: tuple[int, ...], place: Place) -> Tensor:
    """Where tensors lie, entry by entry."""
    return _sent(_numbers(addresses), place[0])


def row_table(rows: Iterable[Iterable[int]], place: Place) -> Tensor:
    """Rows of int64 numbers, one after the other."""
    return _sent(_numbers(chain.from_iterable(rows)), place[0])


def block_table(counts: Sequence[int], place: Place) -> Tensor:
    """For every block, its tensor's number and its own number in it, as number * 2^32 + block; tensors in order."""
    count = torch.tensor(counts, dtype=torch.int64, device="cpu")
    starts = count.cumsum(0) - count
    owner = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), count)
    return _sent((owner << 32) + torch.arange(len(owner), device="cpu") - starts[owner], place[0])


class Blocks(NamedTuple):
    """How tensors of some lengths are cut into blocks."""

    total: int
    of: Tensor  # for every block, whose it is
    numels: Tensor  # of the tensors
    starts: Tensor  # the number of every tensor's first block, and of the end


@lru_cache(maxsize=256)
def cut(numels: tuple[int, ...], block: int, place: Place) -> Blocks:
    """Tensors of these lengths in blocks of `block` elements; the last of each may have fewer."""
    counts = [-(-numel // block) for numel in numels]
    starts = list(accumulate(counts, initial=0))
    return Blocks(starts[-1], block_table(counts, place), row_table([numels], place), row_table([starts], place))

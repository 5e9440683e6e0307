"""Tables from which one launch works on many tensors: where they lie, how long they are, which block is whose.

A table is a function of the numbers in it, so it is kept for as long as it is asked for: a step in which nothing moved
sends nothing, and one with new gradients sends no more than where they are.
"""

from __future__ import annotations

from array import array
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

Place = tuple[torch.device, int]
"""A device and the stream that is current there: a table is there for what comes after it on its own stream."""


def place_of(device: torch.device) -> Place:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """From memory that the device reads by itself: the host waits for nothing."""
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=1024)
def int_table(numbers: tuple[int, ...], place: Place) -> Tensor:
    """These int64 numbers on the device."""
    return _sent(torch.frombuffer(array("q", numbers), dtype=torch.int64), place[0])


@lru_cache(maxsize=1024)
def row_table(rows: tuple[tuple[int, ...], ...], place: Place) -> Tensor:
    """Rows of int64 numbers on the device, one after the other."""
    return int_table.__wrapped__(tuple(chain.from_iterable(rows)), place)


@lru_cache(maxsize=256)
def block_table(counts: tuple[int, ...], place: Place) -> Tensor:
    """For every block, its tensor's number and its own number in it, as number * 2^32 + block; tensors in order."""
    count = torch.tensor(counts)
    starts = count.cumsum(0) - count
    owner = torch.repeat_interleave(torch.arange(len(counts)), count)
    return _sent((owner << 32) + torch.arange(len(owner)) - starts[owner], place[0])


@lru_cache(maxsize=256)
def start_table(counts: tuple[int, ...], place: Place) -> Tensor:
    """The number of every tensor's first block, and of the end."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return int_table.__wrapped__(tuple(starts), place)

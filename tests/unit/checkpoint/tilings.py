"""Tensors cut into boxes in every way, and boxes that are no tiling of anything."""

from __future__ import annotations

import math
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from layerwise.checkpoint.manifest import ITEMSIZES, Chunk, Entry, FileFacts
from layerwise.routing.geometry import Box

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
randoms = st.integers(0, 2**32).map(Random)
DTYPES = tuple(sorted(ITEMSIZES))


def whole_box(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def tiling(shape: Shape, rng: Random, most: int = 12) -> list[Box]:
    """The whole, cut in two again and again, in any order."""
    boxes = [whole_box(shape)]
    for _ in range(rng.randrange(most)):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = rng.choice(dims)
        cut = rng.randrange(box.starts[dim] + 1, box.stops[dim])
        boxes.append(Box(box.starts, (*box.stops[:dim], cut, *box.stops[dim + 1 :])))
        boxes.append(Box((*box.starts[:dim], cut, *box.starts[dim + 1 :]), box.stops))
    rng.shuffle(boxes)
    return boxes


def sub_box(shape: Shape, rng: Random) -> Box:
    """Any box of a tensor, empty ones too."""
    bounds = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
    return Box(tuple(start for start, _ in bounds), tuple(stop for _, stop in bounds))


def spoiled(boxes: list[Box], shape: Shape, rng: Random) -> list[Box]:
    """One thing about the boxes changed: mostly they are no tiling any more."""
    boxes = list(boxes)
    number = rng.randrange(len(boxes))
    box = boxes[number]
    change = rng.choice(["drop", "twice", "move", "grow", "shrink", "swap", "nothing"])
    if change == "drop":
        del boxes[number]
    elif change == "twice":
        boxes.append(box)
    elif change == "swap":  # one in the place of another: as many elements, if they are alike
        boxes[number] = rng.choice(boxes)
    elif shape and change != "nothing":
        dim, by = rng.randrange(len(shape)), rng.choice([-1, 1])
        starts, stops = list(box.starts), list(box.stops)
        if change == "move":
            starts[dim], stops[dim] = starts[dim] + by, stops[dim] + by
        elif change == "grow":
            stops[dim] += 1
        elif stops[dim] > starts[dim]:
            stops[dim] -= 1
        if starts[dim] >= 0:
            boxes[number] = Box(tuple(starts), tuple(stops))
    return boxes


def covers_once(boxes: list[Box], shape: Shape) -> bool:
    """Whether every element is in one box, counted one by one."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        if any(stop > size for stop, size in zip(box.stops, shape, strict=True)):
            return False
        count[tuple(map(slice, box.starts, box.stops))] += 1
    return bool((count == 1).all())


def entry_of(shape: Shape, dtype: str, boxes: list[Box], name: str = "a.distcp") -> tuple[Entry, FileFacts]:
    """A tensor whose chunks lie one behind the other in a file."""
    chunks, at = [], 0
    for box in boxes:
        nbytes = max(0, math.prod(box.shape)) * ITEMSIZES[dtype]
        chunks.append(Chunk(box, name, at, nbytes + 10, at + 10))
        at += nbytes + 10
    return Entry(shape, dtype, tuple(chunks)), FileFacts(at, "0" * 8 if at else "")


def values(shape: Shape, dtype: str, rng: Random) -> Tensor:
    """Any bits that are a value of the dtype."""
    numel = math.prod(shape)
    if dtype == "bool":
        return torch.tensor([rng.random() < 0.5 for _ in range(numel)], dtype=torch.bool).reshape(shape)
    raw = bytearray(rng.randbytes(numel * ITEMSIZES[dtype]))
    if not raw:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(raw, dtype=getattr(torch, dtype)).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    """The elements as they lie in memory."""
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""

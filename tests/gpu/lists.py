"""Lists of tensors of many lengths, in many places of memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from itertools import cycle, islice

import pytest
import torch
from torch import Tensor

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if not IS_INTERPRETED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
LENGTHS = [1025, 1, 7, 0, 1023, 2048] if IS_INTERPRETED else [4097, 1, 7, 0, 4095, 4096, 16385, 1_000_003, 81920]
COUNTS = [6] if IS_INTERPRETED else [1, 2, 9, 300]
PLACES = ["apart", "odd"]


def lengths(count: int) -> list[int]:
    return list(islice(cycle(LENGTHS), count))


def numbers(shape: int | tuple[int, ...], seed: int) -> Tensor:
    """Of many sizes and both signs."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    powers = torch.randint(-20, 4, shape if isinstance(shape, tuple) else (shape,), generator=generator, device=DEVICE)
    return torch.randn(powers.shape, generator=generator, device=DEVICE) * 2.0**powers


class Guarded:
    """Tensors each with an allocation of its own, or at odd offsets of a common one, with memory around them that must
    stay as it is."""

    def __init__(self, values: Sequence[Tensor], place: str, around: float = 77.0) -> None:
        self._around = around
        self._all: list[Tensor] = []
        self.views: list[Tensor] = []
        if place == "apart":
            for value in values:
                self._all.append(torch.full((value.numel() + 8,), around, dtype=value.dtype, device=DEVICE))
                self.views.append(self._all[-1][: value.numel()])
        else:
            gap = 3
            whole = torch.full(
                (sum(value.numel() + gap for value in values) + gap,), around, dtype=values[0].dtype, device=DEVICE
            )
            self._all.append(whole)
            offset = gap
            for value in values:
                self.views.append(whole[offset : offset + value.numel()])
                offset += value.numel() + gap
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value.flatten())

    def check_around(self) -> None:
        """Uses up the views."""
        for view in self.views:
            view.fill_(self._around)
        assert all(bool((whole == self._around).all()) for whole in self._all)


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once (but for a tie in float64, which no number here comes to)."""
    if isinstance(a, float):
        a = torch.tensor(a, dtype=torch.float32, device=DEVICE)
    return (a.double() * b.double() + c.double()).float()


def times(a: float, b: Tensor) -> Tensor:
    return torch.tensor(a, dtype=torch.float32, device=DEVICE) * b


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)

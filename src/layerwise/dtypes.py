"""Element types by name, without torch, so that plans can count bytes on a machine that has none."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """An element type; the value is how it is written in configs and plans."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def itemsize(self) -> int:
        return _ITEMSIZE[self]


_ITEMSIZE = {DType.FP64: 8, DType.FP32: 4, DType.BF16: 2, DType.FP16: 2}

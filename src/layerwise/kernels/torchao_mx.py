"""torchao's MX tensors as params: their codes by rows, and torchao's own rules and forward product.

Nothing of torchao is imported: all of it is asked of the tensor.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class MXStorage:
    """An MX tensor, rewritten in place.

    torchao has it for inference: there are codes by rows only, and its own gradient of the input fails. So the input's
    gradient is the bf16 product with what the codes stand for.
    """

    def __init__(self, tensor: Any) -> None:
        """The tensor does not say how its scales were rounded: as those of its activations are, or it is seen in its codes."""
        if tensor.elem_dtype not in _ELEMENTS:
            raise ValueError(
                f"its elements are {tensor.elem_dtype}, expected {' or '.join(str(dtype) for dtype in _ELEMENTS)}"
            )
        if tensor.act_quant_kwargs is None:
            raise ValueError(
                "it has no act_quant_kwargs, without which torchao multiplies it with nothing: pass them to MXTensor.to_mx()"
            )
        if not tensor.qdata.is_contiguous():
            raise ValueError("it is transposed, and its blocks do not lie along rows: expected it as nn.Linear has it")
        self.given: Tensor | None = None
        self.tensor = tensor

    @property
    def name(self) -> str:
        tensor = self.tensor
        scales = str(tensor.act_quant_kwargs.scaling_mode.value) + (" swizzled" if tensor.is_swizzled_scales else "")
        return f"torchao mx {_ELEMENTS[tensor.elem_dtype]} of {tensor.block_size}, {scales} scales"

    @property
    def shape(self) -> torch.Size:
        found: torch.Size = self.tensor.shape
        return found

    @property
    def codes(self) -> tuple[Tensor, ...]:
        return self.tensor.qdata, self.tensor.scale

    def settle(self, values: Tensor) -> None:
        old = self.tensor
        new = type(old).to_mx(
            values,
            old.elem_dtype,
            block_size=old.block_size,
            scaling_mode=old.act_quant_kwargs.scaling_mode,
            kernel_preference=old.kernel_preference,
            act_quant_kwargs=old.act_quant_kwargs,
            is_swizzled_scales=old.is_swizzled_scales,
        )
        old.qdata.copy_(new.qdata)
        old.scale.copy_(new.scale)

    def read(self) -> Tensor:
        found: Tensor = self.tensor.dequantize(torch.bfloat16)
        return found

    def product(self, x: Tensor, *, by_rows: bool) -> Tensor:
        return F.linear(x, self.tensor) if by_rows else x @ self.read()

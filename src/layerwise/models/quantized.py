"""Params that are kept as codes, ours or those of others: to whoever reads one it is a bf16 tensor, with the values that its
codes stand for.

Products read the codes of the direction that they sum over, where there are two: forward those by rows, the input's gradient
those by columns.
Whatever else is done with such a param is done with its values, by rows. A gradient is a plain tensor, of full precision.
None of it is traced by torch.compile: a graph would keep what it saw of codes, and read that for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, SupportsIndex

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from layerwise.errors import StateError
from layerwise.kernels.stored import ParamStorage
from layerwise.models.tracing import never_traced

_aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """One logical bf16 tensor over whatever keeps its codes."""

    stored: ParamStorage

    @staticmethod
    def __new__(cls, stored: ParamStorage, device: torch.device) -> QuantizedTensor:
        made: QuantizedTensor = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.bfloat16, device=device)
        made.stored = stored
        return made

    def __init__(self, stored: ParamStorage, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, recipe={self.stored.name!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = _base(self.stored.copy(), self.device)
        copied: Any = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        memo[id(self)] = copied
        copied.__dict__.update(
            {name: deepcopy(value, memo) for name, value in self.__dict__.items() if name != "stored"}
        )
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """What is pickled is a plain tensor: codes are nobody's format but ours."""
        values = self.stored.read()
        if isinstance(self, nn.Parameter):
            return nn.Parameter, (values, self.requires_grad)
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        known = _PRODUCTS.get(func)
        if known is not None:
            found = known(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return _with_values(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (_aten.detach.default, _aten.alias.default):
            return _base(args[0].stored, args[0].device)
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if isinstance(value, QuantizedTensor) and argument.alias_info is not None and argument.alias_info.is_write
        ]
        if not written:
            plain = tree_map(_plain, (tuple(args), dict(kwargs or {})))
            return func(*plain[0], **plain[1])
        (target,) = written
        if func is _aten.copy_.default:
            target.stored.write(_plain(args[1]))
            return target
        values = target.stored.read()
        rest = tree_map(_plain, (tuple(args[1:]), dict(kwargs or {})))
        func(values, *rest[0], **rest[1])
        target.stored.write(values)
        return target


@never_traced
def _with_values(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Whatever is no product, as torch does it."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _base(stored: ParamStorage, device: torch.device) -> QuantizedTensor:
    return QuantizedTensor(stored, device)


def _plain(value: Any) -> Any:
    return value.stored.read() if isinstance(value, QuantizedTensor) else value


# ------------------------------------------------------------------------------------------------ what reads codes


class _Product(torch.autograd.Function):
    """`x @ w.mT`, or `x @ w` where the weight's rows are what is summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, by_rows: bool) -> Tensor:
        stored = weight.stored
        ctx.save_for_backward(x, weight)
        ctx.by_rows, ctx.writes = by_rows, stored.writes
        return stored.product(x, by_rows=by_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        stored = weight.stored
        if stored.writes != ctx.writes:
            raise StateError(
                "a quantised weight was updated between forward and backward: the gradient would be that of another model. Call "
                "backward() before step()."
            )
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = stored.product(grad, by_rows=not ctx.by_rows)
        if ctx.needs_input_grad[1]:
            left, right = (grad, x) if ctx.by_rows else (x, grad)
            if weight.dim() == 2:
                left, right = left.flatten(0, -2), right.flatten(0, -2)
            of_weight = left.mT @ right
        return of_x, of_weight, None


class _Unbind(torch.autograd.Function):
    """The entries of a stack, as codes."""

    @staticmethod
    def forward(ctx: Any, stack: QuantizedTensor) -> tuple[QuantizedTensor, ...]:
        ctx.shape = stack.shape
        return tuple(_base(stack.stored.entry(number), stack.device) for number in range(stack.shape[0]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.stack(grads)


class _Select(torch.autograd.Function):
    """One entry of a stack, as codes."""

    @staticmethod
    def forward(ctx: Any, stack: QuantizedTensor, number: int) -> QuantizedTensor:
        ctx.shape, ctx.number = stack.shape, number
        return _base(stack.stored.entry(number), stack.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].new_zeros(ctx.shape)
        whole[ctx.number] = grads[0]
        return whole, None


def _compute(x: Tensor, weight: QuantizedTensor, *, by_rows: bool) -> Tensor:
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(kind))
    if x.dtype is not torch.bfloat16:
        raise TypeError(
            f"an input of dtype {x.dtype} meets a quantised weight: expected bf16. Convert the model's inputs, or run it under "
            "torch.autocast with dtype=torch.bfloat16."
        )
    found: Tensor = _Product.apply(x, weight, by_rows)  # type: ignore[no-untyped-call]
    return found


@never_traced
def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Any:
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor) or weight.dim() != 2:
        return NotImplemented
    out = _compute(x, weight, by_rows=True)
    return out if bias is None else out + bias.to(out.dtype)


@never_traced
def _matmul(x: Any, weight: Any) -> Any:
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor):
        return NotImplemented
    if weight.dim() == 3 and (x.dim() != 3 or x.shape[0] != weight.shape[0]):
        return NotImplemented
    if x.dim() < 2:
        return NotImplemented
    return _compute(x, weight, by_rows=False)


@never_traced
def _unbind(stack: Any, dim: int = 0) -> Any:
    if dim != 0 or stack.dim() != 3:
        return NotImplemented
    return _Unbind.apply(stack)  # type: ignore[no-untyped-call]


@never_traced
def _getitem(stack: Any, number: Any) -> Any:
    if not isinstance(number, int) or isinstance(number, bool) or stack.dim() != 3:
        return NotImplemented
    if not -stack.shape[0] <= number < stack.shape[0]:
        raise IndexError(f"index {number} is out of bounds for {stack.shape[0]} entries.")
    return _Select.apply(stack, number % stack.shape[0])  # type: ignore[no-untyped-call]


_PRODUCTS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm), _matmul),
    **dict.fromkeys((torch.unbind, Tensor.unbind), _unbind),
    Tensor.__getitem__: _getitem,
}

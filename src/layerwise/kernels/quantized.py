"""Params that are kept as codes of eight bits: to whoever reads one it is a bf16 tensor, with the values that its codes stand
for.

Products read the codes of the direction that they sum over: forward those by rows, the input's gradient those by columns.
Whatever else is done with such a param is done with its values, by rows. A gradient is a plain tensor, of full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, SupportsIndex, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from layerwise.errors import StateError
from layerwise.kernels.codec import Codes, decode, encode, encode_both_into
from layerwise.kernels.quantized_products import product
from layerwise.layout.recipes import Recipe

_aten = torch.ops.aten
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _in_eager(function: _Function) -> _Function:
    """A function that torch.compile does not trace: a graph would keep what it saw of codes, and read that for ever."""
    return cast(_Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Stored:
    """What a quantised param holds: codes of both directions, or values in memory of a replica, of which codes are made
    whenever they are used.

    Values that were given are kept beside the codes until a master was taken from them: what codes stand for is no
    beginning for it.
    """

    def __init__(self, recipe: Recipe, values: Tensor) -> None:
        self.recipe = recipe
        self.shape = values.shape
        self.given: Tensor | None = values
        self._codes: tuple[Codes, Codes] | None = None
        self._counted = [0]  # one list for a param and for entries of it
        self.settle(values)

    @property
    def writes(self) -> int:
        """How often values came here: once per step, and whenever somebody writes into the param."""
        return self._counted[0]

    @property
    def is_by_codes(self) -> bool:
        """Whether codes are what is kept."""
        return self._codes is not None

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """All tensors of codes that are kept."""
        if self._codes is None:
            return ()
        rows, cols = self._codes
        return (rows.values, rows.scales, *((cols.values, cols.scales) if self.recipe.both_directions else ()))

    def rows(self) -> Codes:
        """Codes in blocks along rows."""
        return self._codes[0] if self._codes is not None else encode(self._values(), self.recipe.weights)

    def cols(self) -> Codes:
        """Codes of the transposed values."""
        if self._codes is not None:
            return self._codes[1]
        if not self.recipe.both_directions:
            return _transposed(self.rows())
        return encode(self._values().mT.contiguous(), self.recipe.weights)

    def _values(self) -> Tensor:
        if self.given is None:
            raise StateError("a quantised param has neither codes nor values.")
        return self.given

    def read(self) -> Tensor:
        """The values that the codes stand for."""
        return decode(self.rows(), torch.bfloat16)

    def settle(self, values: Tensor) -> None:
        """Take values over as codes, of both directions."""
        if self._codes is None:
            rows = Codes.empty(tuple(self.shape), self.recipe.weights, values.device)
            cols = (
                Codes.empty((*self.shape[:-2], self.shape[-1], self.shape[-2]), self.recipe.weights, values.device)
                if self.recipe.both_directions
                else _transposed(rows)
            )
            self._codes = rows, cols
        rows, cols = self._codes
        if self.recipe.both_directions:
            encode_both_into(values, rows, cols)
        else:
            encoded = encode(values, self.recipe.weights)
            rows.values.copy_(encoded.values)
            rows.scales.copy_(encoded.scales)
        self._counted[0] += 1

    def keep_in(self, place: Tensor) -> None:
        """From now on values are kept, in this place; codes are made of them whenever they are used."""
        if self.given is None:
            raise StateError("a quantised param has no values to keep.")
        place.copy_(self.given)
        self.given, self._codes = place, None

    def take_given(self, fqn: str) -> Tensor:
        """The values that were given, which are not needed here any more."""
        given, self.given = self.given, None
        if given is None:
            raise StateError(
                f"param {fqn!r} has codes and no values: a master must not begin with what codes stand for. Copy weights into it "
                "first, as load_state_dict() does, or call layerwise.quantize() on the module that it was made of."
            )
        return given

    def release(self) -> None:
        """Have codes, and the values in memory of their own."""
        if self.given is not None:
            self.given = self.given.clone()
            self.settle(self.given)

    def write(self, values: Tensor) -> None:
        """Somebody else writes into the param."""
        if self._codes is None:
            self._values().copy_(values)
            self._counted[0] += 1
        else:
            self.given = values.to(torch.bfloat16).expand(self.shape).clone()
            self.settle(self.given)

    def copy(self) -> Stored:
        """The same in memory of its own."""
        made = object.__new__(Stored)
        made.recipe, made.shape, made._counted = self.recipe, self.shape, list(self._counted)
        made.given = None if self.given is None else self.given.clone()
        made._codes = None if self._codes is None else (_cloned(self._codes[0]), _cloned(self._codes[1]))
        if made._codes is not None and not self.recipe.both_directions:
            made._codes = made._codes[0], _transposed(made._codes[0])
        return made

    def entry(self, number: int) -> Stored:
        """One entry of a stack, in the same memory."""
        made = object.__new__(Stored)
        made.recipe, made.shape, made._counted = self.recipe, self.shape[1:], self._counted
        made.given = None if self.given is None else self.given[number]
        made._codes = None if self._codes is None else (_entry(self._codes[0], number), _entry(self._codes[1], number))
        return made


def _transposed(codes: Codes) -> Codes:
    """Codes whose blocks are as high as they are wide, of the transposed values: the same memory."""
    return Codes(codes.values.mT, codes.scales.mT, codes.format)


def _cloned(codes: Codes) -> Codes:
    return Codes(codes.values.clone(), codes.scales.clone(), codes.format)


def _entry(codes: Codes, number: int) -> Codes:
    return Codes(codes.values[number], codes.scales[number], codes.format)


class QuantizedTensor(Tensor):
    """One logical bf16 tensor over `Stored`."""

    stored: Stored

    @staticmethod
    def __new__(cls, stored: Stored, device: torch.device) -> QuantizedTensor:
        made: QuantizedTensor = Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.bfloat16, device=device)
        made.stored = stored
        return made

    def __init__(self, stored: Stored, device: torch.device) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, recipe={self.stored.recipe.name!r})"

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


@_in_eager
def _with_values(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Whatever is no product, as torch does it."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _base(stored: Stored, device: torch.device) -> QuantizedTensor:
    return QuantizedTensor(stored, device)


def _plain(value: Any) -> Any:
    return value.stored.read() if isinstance(value, QuantizedTensor) else value


def stored_of(param: Tensor) -> Stored | None:
    """What a param holds, if that is not a plain tensor."""
    return param.stored if isinstance(param, QuantizedTensor) else None


def recipe_of(param: Tensor) -> str:
    """The name of the recipe that a param is quantised by, if it is."""
    return param.stored.recipe.name if isinstance(param, QuantizedTensor) else ""


# ------------------------------------------------------------------------------------------------ what reads codes


class _Product(torch.autograd.Function):
    """`x @ w.mT`, or `x @ w` where the weight's rows are what is summed over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedTensor, by_rows: bool) -> Tensor:
        stored = weight.stored
        ctx.save_for_backward(x, weight)
        ctx.by_rows, ctx.writes = by_rows, stored.writes
        return product(x, stored.rows() if by_rows else stored.cols(), stored.recipe)

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
            of_x = product(grad, stored.cols() if ctx.by_rows else stored.rows(), stored.recipe)
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
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(
            f"an input of dtype {x.dtype} meets a quantised weight: expected bf16. Convert the model's inputs, or run it under "
            "torch.autocast."
        )
    found: Tensor = _Product.apply(x, weight, by_rows)  # type: ignore[no-untyped-call]
    return found


@_in_eager
def _linear(x: Any, weight: Any, bias: Tensor | None = None) -> Any:
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor) or weight.dim() != 2:
        return NotImplemented
    out = _compute(x, weight, by_rows=True)
    return out if bias is None else out + bias.to(out.dtype)


@_in_eager
def _matmul(x: Any, weight: Any) -> Any:
    if isinstance(x, QuantizedTensor) or not isinstance(weight, QuantizedTensor):
        return NotImplemented
    if weight.dim() == 3 and (x.dim() != 3 or x.shape[0] != weight.shape[0]):
        return NotImplemented
    if x.dim() < 2:
        return NotImplemented
    return _compute(x, weight, by_rows=False)


@_in_eager
def _unbind(stack: Any, dim: int = 0) -> Any:
    if dim != 0 or stack.dim() != 3:
        return NotImplemented
    return _Unbind.apply(stack)  # type: ignore[no-untyped-call]


@_in_eager
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

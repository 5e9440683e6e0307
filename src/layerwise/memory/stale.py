"""Params that must not be read yet: while its replica is stale, a param is of a class that brings it up to date first.

Whatever reads a param's values goes through `__torch_function__` then: another module that shares it, `state_dict()`, an
optimizer of the user's own, a reference that was kept from before. Once fresh, a param has its own class again, and
nothing is left in the way.

A few functions read tensors without asking their class: `torch.tensor(param)` and its like, transforms of `torch.func`
whose argument is a param itself, TorchScript and C++ extensions. Views that were taken before a step do not ask either.
Whoever uses them outside a module's forward calls `model.ensure()` first; docs/overlap.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from layerwise.models.tracing import never_traced

_ATTRIBUTES = (
    *("grad", "grad_fn", "requires_grad", "is_leaf", "_version", "shape", "ndim", "itemsize", "nbytes"),
    *("dtype", "device", "layout", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous", "__len__"),
    *("is_floating_point", "is_complex", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
)
_HARMLESS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(Tensor, name) for name in _METHODS),
        getattr(Tensor, "grad").__set__,  # noqa: B009  (torch declares the class's own descriptor as a value)
        getattr(Tensor, "grad").__delete__,  # noqa: B009
        Tensor.__hash__,
    }
)
"""What tells of a param without its values."""


def outside_transforms(action: Callable[[], None]) -> None:
    """Do something that no transform of `torch.func` knows of: they wrap whatever is touched under them, also memory that
    is none of theirs."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        action()
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        action()


class StaleParam:
    """Mixed into the class of a param whose values are old."""

    bring_up_to_date: Callable[[], None]
    traced: Callable[[], None]
    """Brings the param up to date for code that is being compiled."""
    fresh: type
    """The class that the param has when its values are new."""

    def __getattr__(self, name: str) -> Any:
        # Before dynamo takes down the class of a param, it asks the param for marks of its own, which no param has. This is
        # the moment to be fresh: a class that changes while a frame is traced ends the trace in an error.
        if not torch.compiler.is_compiling():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        type(self).traced()
        return getattr(self, name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _HARMLESS:
            for param in _stale_inside((args, kwargs)):  # one by one: the first may do for all
                type(param).bring_up_to_date()
            if next(_stale_inside((args, kwargs)), None) is None:
                return func(*args, **(kwargs or {}))  # other classes among the arguments have their say
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # Both look at the class before they read anything.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        type(self).bring_up_to_date()
        return deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        type(self).bring_up_to_date()
        return self.__reduce_ex__(protocol)


def _stale_inside(found: Any) -> Iterator[StaleParam]:
    """Every stale param among arguments, however deep it is."""
    if isinstance(found, StaleParam):
        yield found
    elif isinstance(found, Mapping):
        yield from _stale_inside(tuple(found.values()))
    elif isinstance(found, tuple | list):
        for one in found:
            yield from _stale_inside(one)


class StaleGuard:
    """The params of one bucket, guarded while they are stale."""

    def __init__(
        self, params: Sequence[nn.Parameter], ensure: Callable[[], None], traced: Callable[[], None] | None = None
    ) -> None:
        """`ensure` brings the params up to date, for any reader; `traced` does so for code that is being compiled."""

        @never_traced
        def bring_up_to_date() -> None:
            outside_transforms(ensure)

        self._params = tuple(params)
        self._readers = {
            "bring_up_to_date": staticmethod(bring_up_to_date),
            "traced": staticmethod(ensure if traced is None else traced),
        }
        self._stand_ins: dict[type, type] = {}

    def arm(self) -> None:
        """From now on, reading the params brings them up to date."""
        for param in self._params:
            kind = type(param)
            if issubclass(kind, StaleParam):
                continue
            if kind not in self._stand_ins:
                self._stand_ins[kind] = type(
                    f"Stale{kind.__name__}",
                    (StaleParam, kind),
                    {**self._readers, "fresh": kind},
                )
            param.__class__ = self._stand_ins[kind]

    def disarm(self) -> None:
        """They are fresh: nothing is in the way of reading them."""
        for param in self._params:
            if isinstance(param, StaleParam):
                param.__class__ = param.fresh

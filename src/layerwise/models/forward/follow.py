"""A dispatch mode that sees every operation of a forward on meta tensors, and keeps account of params and of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.models.forward import moving, multiplying
from layerwise.models.forward import operations as ops
from layerwise.models.forward.books import Books, Call
from layerwise.models.forward.weights import storage_of

Handler = Callable[[Books, Call], None]


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a forward, and writes down in its books what it sees."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        inputs: Iterable[Tensor],
        about_to: Callable[[Any, Sequence[Any], Mapping[str, Any]], None],
    ) -> None:
        """`about_to` is told of every operation before it runs."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._about_to = about_to
        self.books = Books(params, inputs)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        is_answered, answer = self.books.answers.to(name, args, kwargs)
        if is_answered:
            self._ask(name, args)
            return answer
        args = self.books.answers.fitted(name, args)
        args, kwargs = self._all_meta(name, args, kwargs)
        self._about_to(func, args, kwargs)
        out = func(*args, **kwargs)
        self.books.step += 1
        outs = [found for found in tree_leaves(out) if isinstance(found, Tensor)]
        ins = [found for found in tree_leaves((args, kwargs)) if isinstance(found, Tensor)]
        if outs and ins and name not in ops.NEITHER:
            self._follow(Call(func, name, args, kwargs, ins, outs))
        return out

    def _all_meta(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Real tensors beside meta ones lose their values: nothing computes with both."""
        tensors = [found for found in tree_leaves((args, kwargs)) if isinstance(found, Tensor)]
        if not any(found.is_meta for found in tensors) or all(found.is_meta for found in tensors):
            return args, kwargs

        def bare(found: object) -> object:
            if not isinstance(found, Tensor) or found.is_meta or (found.dim() == 0 and name != "embedding"):
                return found
            made = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta")
            self.books.real[storage_of(made)] = found
            self.books.kept.append(made)
            for mark in (self.books.live, self.books.raw):
                if storage_of(found) in mark:
                    mark.add(storage_of(made))
            return made

        if name == "copy_" and not args[0].is_meta:  # a real tensor is overwritten with something unknown
            return [args[0], torch.zeros_like(args[0]), *args[2:]], kwargs
        args, kwargs = tree_map(bare, (args, kwargs))
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("meta")
        return args, kwargs

    def _follow(self, call: Call) -> None:
        held = {storage_of(tensor) for tensor in call.ins}
        self.books.compete(call.ins)
        is_view = not call.name.endswith("_") and all(storage_of(out) in held for out in call.outs)
        if is_view:
            return
        is_product = call.name in ops.PRODUCTS or call.name in ops.GROUPED_PRODUCTS or "convolution" in call.name
        self.books.pass_on(call.ins, call.outs, is_product=is_product or call.name in ops.LOOKUPS)
        handler = _handler(call.func, call.name)
        if handler is not None:
            handler(self.books, call)
            return
        for tensor in call.ins:
            self.books.used(tensor, call.name)
        labelled = [(place, found) for place, tensor in enumerate(call.ins) if (found := self.books.labels.of(tensor))]
        for place, found in labelled:
            self.books.lose(found, call.name, place)

    def _ask(self, name: str, args: Sequence[Any]) -> None:
        """Values that a forward asks for end there, as far as anybody can see."""
        for place, tensor in enumerate(found for found in tree_leaves(args) if isinstance(found, Tensor)):
            self.books.end(self.books.labels.of(tensor), (name, place))
            self.books.used(tensor, name)


def _handler(func: Any, name: str) -> Handler | None:
    if name in ops.PRODUCTS:
        return multiplying.product
    if name in ops.GROUPED_PRODUCTS:
        return multiplying.grouped_product
    if name in ("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution"):
        return multiplying.convolution
    if name in ops.LOOKUPS:
        return multiplying.look_up
    if ops.is_attention(name) or name in ops.ENDS:
        return multiplying.read
    if name in _BY_NAME:
        return _BY_NAME[name]
    if ops.is_upsampling(name):
        return moving.per_channel
    if torch.Tag.pointwise in func.tags or name.removesuffix("_") in ops.IN_PLACE_ORDER:
        return moving.elementwise
    return None


_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(ops.NORMS, moving.norm),
    **dict.fromkeys(ops.COPIES, moving.copy),
    **dict.fromkeys(ops.MOVES, moving.move),
    **dict.fromkeys(ops.REDUCTIONS, moving.reduce),
    **dict.fromkeys(ops.PER_CHANNEL, moving.per_channel),
    **dict.fromkeys(ops.WRITES, moving.put),
    **dict.fromkeys(ops.CHOICES, moving.choose),
    **dict.fromkeys(("cat", "stack"), moving.join),
    **dict.fromkeys(("copy_", "fill_", "zero_"), moving.write),
    **dict.fromkeys(("index", "gather"), moving.index),
    "constant_pad_nd": moving.pad,
    "glu": moving.halves,
}

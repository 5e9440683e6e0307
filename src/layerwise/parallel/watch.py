"""Forward hooks: a module's params are brought up to date just before it runs.

The hook sits on the modules that own params directly and costs two attribute reads per bucket once that is fresh. It is
what makes gathers early and cheap; what makes them certain is `memory.stale`, which catches every other read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from layerwise.comm.scopes import scope
from layerwise.engine.publisher import Publisher
from layerwise.memory.stale import outside_transforms
from layerwise.memory.storage import Bucket
from layerwise.models.names import named_modules

Buckets = tuple[Bucket, ...]

_READ_CHILDREN = (nn.MultiheadAttention,)
"""Modules of torch that read their children's params without calling them, and take a slower path, with other bits, when
they find those stale. (nn.TransformerEncoderLayer does so whenever anything in it has hooks.)"""


def refuse_scripted(chunks: Sequence[nn.Module]) -> None:
    """Raise if a module with params cannot have hooks."""
    for chunk in chunks:
        for name, module in named_modules(chunk):
            if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
                raise TypeError(
                    f"module {name!r} is a torch.jit.ScriptModule, which cannot have the hooks of overlap_param_gather: expected "
                    "plain modules. Pass overlap_param_gather=False."
                )


def watch_forward(
    chunks: Sequence[nn.Module],
    bucket_of: Mapping[nn.Parameter, Bucket],
    publisher: Publisher,
    when_released: Callable[[Callable[[], object]], None],
) -> None:
    """Hook every module that holds params of these buckets directly, and every compiled one for all that is in it; until
    released."""
    modules = {id(child): child for chunk in chunks for child in chunk.modules()}.values()
    entries = [(module, _buckets(module.parameters(), bucket_of)) for module in modules]

    def watch_entries() -> None:
        for module, inside in entries:
            _watch_entry(module, inside, publisher)

    for module, inside in entries:
        own = inside if isinstance(module, _READ_CHILDREN) else _buckets(module.parameters(recurse=False), bucket_of)
        if own:
            asking = module.register_forward_pre_hook(_Asking(own, publisher))
            publisher.when_learned(asking.remove)
            when_released(asking.remove)
            when_released(module.register_forward_pre_hook(_Ensuring(own, publisher, watch_entries)).remove)
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):  # torch.compile(module)
            when_released(module.register_forward_pre_hook(_Ensuring(inside, publisher, watch_entries)).remove)
    watch_entries()

    def leave_entries() -> None:
        for module, _ in entries:
            _leave_entry(module)

    when_released(leave_entries)


def _buckets(params: Iterator[nn.Parameter], bucket_of: Mapping[nn.Parameter, Bucket]) -> Buckets:
    return tuple(dict.fromkeys(bucket_of[param] for param in params if param in bucket_of))


def _ensure(buckets: Buckets, publisher: Publisher) -> None:
    """Bring what is stale up to date; two attribute reads for what is not."""
    for bucket in buckets:
        if bucket.replica_version != bucket.master_version:
            with scope(f"forward hook for {bucket.plan.label}"):
                outside_transforms(partial(publisher.ensure, bucket))


def _nothing(*args: object) -> None:
    """What a hook becomes in a copy of its module, whose params are nobody's replicas."""


def _copied() -> Callable[..., None]:
    return _nothing


class _Hook:
    """A forward pre-hook that stays behind when its module is copied or pickled."""

    def __init__(self, buckets: Buckets, publisher: Publisher) -> None:
        self._buckets, self._publisher = buckets, publisher

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied, ()


class _Ensuring(_Hook):
    """Brings buckets up to date."""

    def __init__(self, buckets: Buckets, publisher: Publisher, when_traced: Callable[[], None]) -> None:
        super().__init__(buckets, publisher)

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def trace() -> int:
            publisher.note_compiled(buckets)
            when_traced()
            return 0

        self._trace = trace

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            self._trace()
            return
        _ensure(self._buckets, self._publisher)


class _Asking(_Hook):
    """Tells in which order modules run, until that is known."""

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling():
            self._publisher.ask(self._buckets)


class _Entry:
    """Where a compiled module is entered. Compiled code runs no hooks, so everything that it may read is brought up to
    date here."""

    def __init__(self, compiled: Callable[..., Any], buckets: Buckets, publisher: Publisher) -> None:
        self.compiled, self._buckets, self._publisher = compiled, buckets, publisher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # or else it is part of something larger, which has an entry of its own
            _ensure(self._buckets, self._publisher)
        return self.compiled(*args, **kwargs)


def _watch_entry(module: nn.Module, buckets: Buckets, publisher: Publisher) -> None:
    """Stand in the way into `module.compile()`, which may have been called after wrapping."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if callable(compiled) and not isinstance(compiled, _Entry):
        module._compiled_call_impl = _Entry(compiled, buckets, publisher)


def _leave_entry(module: nn.Module) -> None:
    """Stand in nobody's way any more."""
    entry = getattr(module, "_compiled_call_impl", None)
    if isinstance(entry, _Entry):
        module._compiled_call_impl = entry.compiled

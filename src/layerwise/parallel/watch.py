"""Forward hooks: a module's params are brought up to date just before it runs.

The hook sits on the modules that own params directly and costs three attribute reads per bucket once that is fresh. It is
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
from layerwise.memory.replicas import Replica
from layerwise.memory.stale import outside_transforms
from layerwise.models.names import named_modules
from layerwise.models.tracing import never_traced

Replicas = tuple[Replica, ...]

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
    replica_of: Mapping[nn.Parameter, Replica],
    publisher: Publisher,
    when_released: Callable[[Callable[[], object]], None],
) -> None:
    """Hook every module that holds params of these buckets directly, and every compiled one for all that is in it; until
    released."""
    modules = {id(child): child for chunk in chunks for child in chunk.modules()}.values()
    entries = [(module, _replicas(module.parameters(), replica_of)) for module in modules]

    def watch_entries() -> None:
        for module, inside in entries:
            _watch_entry(module, inside, publisher)

    for module, inside in entries:
        own = inside if isinstance(module, _READ_CHILDREN) else _replicas(module.parameters(recurse=False), replica_of)
        if own:
            asking = module.register_forward_pre_hook(_Asking(own, publisher))
            publisher.order.when_learned(asking.remove)
            when_released(asking.remove)
            when_released(module.register_forward_pre_hook(_Ensuring(own, publisher, watch_entries)).remove)
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):  # torch.compile(module)
            when_released(module.register_forward_pre_hook(_Ensuring(inside, publisher, watch_entries)).remove)
    watch_entries()

    def leave_entries() -> None:
        for module, _ in entries:
            _leave_entry(module)

    when_released(leave_entries)


def _replicas(params: Iterator[nn.Parameter], replica_of: Mapping[nn.Parameter, Replica]) -> Replicas:
    return tuple(dict.fromkeys(replica_of[param] for param in params if param in replica_of))


def _ensure(replicas: Replicas, publisher: Publisher) -> None:
    """Bring what is stale up to date; three attribute reads for what is not."""
    for replica in replicas:
        if replica.version != replica.shard.version:
            with scope(f"forward hook for {replica.plan.label}"):
                outside_transforms(partial(publisher.ensure, replica))
        elif replica.written is not None:
            replica.written.wait()


@never_traced
def ensure_compiled(publisher: Publisher) -> None:
    """Bring up to date whatever compiled code may read."""
    for replica in publisher.compiled:
        publisher.ensure(replica)


def _nothing(*args: object) -> None:
    """What a hook becomes in a copy of its module, whose params are nobody's replicas."""


def _copied() -> Callable[..., None]:
    return _nothing


class _Hook:
    """A forward pre-hook that stays behind when its module is copied or pickled."""

    def __init__(self, replicas: Replicas, publisher: Publisher) -> None:
        self._replicas, self._publisher = replicas, publisher

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _copied, ()


class _Ensuring(_Hook):
    """Brings buckets up to date."""

    def __init__(self, replicas: Replicas, publisher: Publisher, when_traced: Callable[[], None]) -> None:
        super().__init__(replicas, publisher)

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def trace() -> int:
            publisher.trace(replicas)
            when_traced()
            return 0

        self._trace = trace

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if torch.compiler.is_compiling():
            self._trace()
            return
        _ensure(self._replicas, self._publisher)


class _Asking(_Hook):
    """Tells in which order modules run, until that is known."""

    def __call__(self, module: nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling():
            self._publisher.order.ask(self._replicas)


class _Entry:
    """Where a compiled module is entered. Compiled code runs no hooks, so everything that it may read is brought up to
    date here."""

    def __init__(self, compiled: Callable[..., Any], replicas: Replicas, publisher: Publisher) -> None:
        self.compiled, self._replicas, self._publisher = compiled, replicas, publisher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # or else it is part of something larger, which has an entry of its own
            _ensure(self._replicas, self._publisher)
        return self.compiled(*args, **kwargs)


def _watch_entry(module: nn.Module, replicas: Replicas, publisher: Publisher) -> None:
    """Stand in the way into `module.compile()`, which may have been called after wrapping."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if callable(compiled) and not isinstance(compiled, _Entry):
        module._compiled_call_impl = _Entry(compiled, replicas, publisher)


def _leave_entry(module: nn.Module) -> None:
    """Stand in nobody's way any more."""
    entry = getattr(module, "_compiled_call_impl", None)
    if isinstance(entry, _Entry):
        module._compiled_call_impl = entry.compiled

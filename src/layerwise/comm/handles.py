"""A launched collective as a value: it keeps its tensors alive, and waiting is the only way to the result."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from layerwise.errors import StateError


class Work(Protocol):
    """What torch.distributed returns for an asynchronous call."""

    def wait(self) -> object: ...


class Handle:
    """A collective in flight."""

    def __init__(
        self, label: str, result: Tensor, keep_alive: tuple[Tensor, ...] = (), work: Work | None = None
    ) -> None:
        self.label = label
        self._result = result
        # An asynchronous collective reads its source until it is done: dropping the last reference would hand the
        # memory to somebody else.
        self._keep_alive = keep_alive
        self._work = work
        self._done = False

    def wait(self) -> Tensor:
        """The result, once it is there. A second wait is an error: it means that two places think they own the
        result."""
        if self._done:
            raise StateError(f"{self.label} was waited for already: a handle gives its result once.")
        if self._work is not None:
            self._work.wait()
        self._done = True
        self._keep_alive = ()
        return self._result

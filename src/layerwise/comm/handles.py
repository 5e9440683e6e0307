"""A launched collective as a value: it keeps its tensors alive, and waiting is the only way to the result."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor

from layerwise.comm.leaving import lend, take_back
from layerwise.comm.scopes import note_flight, scope
from layerwise.errors import StateError


class Work(Protocol):
    """What torch.distributed returns for an asynchronous call."""

    def wait(self, timeout: timedelta = ...) -> object: ...

    def is_completed(self) -> bool: ...


class Handle:
    """A collective in flight, or several that are one: they are complete together. `keep_alive` are the aliases that it got."""

    def __init__(
        self,
        label: str,
        result: Tensor,
        keep_alive: tuple[Tensor, ...] = (),
        works: Sequence[Work] = (),
    ) -> None:
        self.label = label
        self._result = result
        # An asynchronous collective reads its source until it is done: dropping the last reference would hand the
        # memory to somebody else.
        self._keep_alive = keep_alive
        self._works = tuple(works)
        self._flight = note_flight(label, result, self._works)
        self._then: Callable[[], object] | None = None
        self._done = False

    def followed_by(self, then: Callable[[], object], result: Tensor) -> Handle:
        """The same collective with something to do on what arrived, which makes it another result."""
        self._then, self._result = then, result
        return self

    @property
    def is_ready(self) -> bool:
        """Whether waiting would not take time. Some backends only know once they were waited for, and say no."""
        return all(work.is_completed() for work in self._works)

    def settle(self, patience_s: float) -> None:
        """Wait, but not for ever and not for the result; raises if it did not arrive."""
        for work in self._works:
            work.wait(timedelta(seconds=max(patience_s, 0.001)))

    def wait(self) -> Tensor:
        """The result, once it is there. A second wait is an error: it means that two places think they own the
        result."""
        if self._done:
            raise StateError(f"{self.label} was waited for already: a handle gives its result once.")
        with scope(f"wait for {self.label}"):
            for work in self._works:
                work.wait()
        if self._flight is not None and not self._flight.is_exact:
            self._flight.land()
        self._done = True
        if self._then is not None:
            self._then()
        self._let_go()
        return self._result

    def _let_go(self) -> None:
        """The backend's threads may be the last to let go of the aliases from now on."""
        lend(self._keep_alive)
        self._keep_alive, self._works, self._then = (), (), None
        take_back()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._works and not is_finalizing():  # dropped on its way, or when it failed
            self._let_go()

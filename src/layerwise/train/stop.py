"""Ctrl-C: the first finishes the step and ends the run properly, the second ends it now."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """While entered, the first SIGINT or SIGTERM only sets `requested`; the next one does what it always did."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: whoever runs us there has their own way of stopping
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous.clear()

"""Ctrl-C: the first finishes the step and ends the run properly, the second ends it now."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

from layerwise.config.schema import LoopConfig, stop_signals_of

ECHO_S = 3.0
"""A signal that soon after another is the same request: torchrun passes each on twice, within a millisecond, and a cluster's
manager signals ranks beside it. To such a second one a rank would die without its checkpoint."""


class StopRequest:
    """While entered, the first of these signals only sets `requested`; one that is no echo of it does what it always did."""

    def __init__(self, names: Sequence[str] = stop_signals_of(LoopConfig())) -> None:
        self._numbers = stop_numbers(names)
        self._since_s: float | None = None
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        """Whether somebody asked."""
        return self._since_s is not None

    def __enter__(self) -> StopRequest:
        for number in self._numbers:
            try:
                self._previous[number] = signal.signal(number, self._on_signal)
            except ValueError:  # not the main thread: whoever runs us there has their own way of stopping
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s > ECHO_S:
            self.__exit__(None, None, None)
            signal.raise_signal(number)


def stop_numbers(names: Sequence[str]) -> list[signal.Signals]:
    """The signals of these names that this system has. Under nohup SIGHUP is ignored from the start and stays so."""
    numbers = [signal.Signals[name] for name in names if hasattr(signal, name)]
    return [one for one in numbers if one.name != "SIGHUP" or signal.getsignal(one) is not signal.SIG_IGN]

"""CUDA streams: what was written on one of them is read on another only behind it."""

from __future__ import annotations

import torch

from layerwise.kernels.tables import stream_on


class Written:
    """What the current stream of a device was told to write so far. Readers on other streams wait for it on the device;
    the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._device = device
        self._event = stream.record_event()
        # By number, which costs a tenth of a stream as an object: every forward hook asks.
        self._behind = {stream.cuda_stream}

    def wait(self) -> None:
        """Have the current stream read behind it."""
        number = stream_on(self._device)
        if number in self._behind:
            return
        # A graph that is being captured can wait for nothing outside of it; torch.cuda.graph() waits for all beforehand.
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._behind.add(number)


class InTurn:
    """Memory that several streams of a device write into: each goes on behind the one before, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._number = -1

    def go_on(self) -> None:
        """The current stream is next."""
        number = stream_on(self._device)
        if number == self._number or torch.cuda.is_current_stream_capturing():  # as in `Written`
            return
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None:
            stream.wait_stream(self._last)
        self._last, self._number = stream, number

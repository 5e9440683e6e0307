"""CUDA streams: what was written on one of them is read on another only behind it."""

from __future__ import annotations

import torch


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
        number = torch._C._cuda_getCurrentRawStream(self._device.index)
        if number in self._behind:
            return
        # A graph that is being captured can wait for nothing outside of it; torch.cuda.graph() waits for all beforehand.
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._behind.add(number)

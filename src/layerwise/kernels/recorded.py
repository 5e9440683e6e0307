"""Newton-Schulz recorded as a CUDA graph and replayed.

A batch takes some twenty launches, and each takes the host longer than a small product takes the card. What is recorded are
the same kernels, so the bits are the same.

[Note: Recordings hold no memory]
A recording is for the addresses that it was made at. Memory is asked for anew in every step, as anywhere; in a training
loop the allocator gives the same again, and then what was recorded there is replayed. Elsewhere kernels are launched one by
one, and recorded when they come there again.

[Note: Side by side]
A product of a small batch ends with processors that have nothing left to do, and every product waits for the one before.
Two halves of a batch do not wait for each other, so in a recording one fills what the other leaves.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layerwise.config.coefficients import Coefficient
from layerwise.kernels.facts import products_for
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.layout.cost import resolve_method

SIDE_BY_SIDE = 2
"""Parts of a batch that are worked on at a time."""
_MOST = 256
"""Recordings that are kept: the latest. What is noted of addresses that came once is bounded likewise."""
_WARM = 2
"""Calls before a batch is recorded: kernels are compiled by then, and what comes once only is not worth it."""


class _Streams(NamedTuple):
    """What is recorded on: nothing ever runs there."""

    first: torch.cuda.Stream
    others: tuple[torch.cuda.Stream, ...]


class Recorder:
    """Orthogonalises as `orthogonalize` does; what comes again and again, by replaying it. One user at a time."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._graphs: OrderedDict[tuple[object, ...], torch.cuda.CUDAGraph] = OrderedDict()
        self._streams: dict[torch.device, _Streams] = {}

    def orthogonalize(
        self, update_BMN: Tensor, *, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype
    ) -> Tensor:
        """As `orthogonalize`, but for the memory of `update`, which is used up: the result may lie there."""
        device = update_BMN.device
        if not update_BMN.numel() or products_for(device, update_BMN.dtype, dtype).backend != "triton":
            return orthogonalize(update_BMN, schedule=schedule, method=method, dtype=dtype)
        from layerwise.kernels.fused_newton_schulz import orthogonalize_into, with_rows, workspace_nbytes
        from layerwise.kernels.triton_products import as_batch

        form = resolve_method(method, *update_BMN.shape[1:])
        update_BMN = with_rows(update_BMN)
        out_BMN = as_batch(update_BMN, dtype)
        parts = _parts(len(out_BMN))
        sizes = [workspace_nbytes((part.stop - part.start, *out_BMN.shape[1:]), form) for part in parts]
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        key = (
            *(update_BMN.data_ptr(), out_BMN.data_ptr(), memory.data_ptr(), torch.cuda.current_stream(device).cuda_stream),
            *(update_BMN.shape, update_BMN.stride(), update_BMN.dtype, device, tuple(schedule), form, dtype),
        )  # fmt: skip
        graph = self._graphs.get(key)
        if graph is None and self._is_due(key):

            def launch(number: int) -> None:
                part, own = parts[number], memory[sum(sizes[:number]) :][: sizes[number]]
                orthogonalize_into(out_BMN[part], update_BMN[part], own, schedule, form)

            graph = self._graphs[key] = self._record(device, launch, len(parts))
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
        if graph is None:
            orthogonalize_into(out_BMN, update_BMN, memory, schedule, form)
        else:
            graph.replay()
        return out_BMN.contiguous()

    def free(self) -> None:
        """Let go of all that was recorded."""
        self._graphs.clear()
        self._calls.clear()

    def _is_due(self, key: tuple[object, ...]) -> bool:
        """Whether this came often enough to be recorded now."""
        if torch.cuda.is_current_stream_capturing():
            return False
        if len(self._calls) > _MOST:
            self._calls.clear()
        self._calls[key] += 1
        return self._calls[key] > _WARM

    def _record(self, device: torch.device, launch: Callable[[int], None], parts: int) -> torch.cuda.CUDAGraph:
        streams = self._streams.get(device)
        if streams is None:
            first, *others = (torch.cuda.Stream(device) for _ in range(SIDE_BY_SIDE))  # type: ignore[no-untyped-call]
            streams = self._streams[device] = _Streams(first, tuple(others))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(streams.first):
            # Other threads of this process (gloo's, NCCL's watchdog, the user's own) may do what they do meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number, stream in enumerate(streams.others[: parts - 1], start=1):
                    stream.wait_stream(streams.first)
                    with torch.cuda.stream(stream):
                        launch(number)
                launch(0)
                for stream in streams.others[: parts - 1]:
                    streams.first.wait_stream(stream)
            finally:
                graph.capture_end()
        return graph


def _parts(batch: int) -> list[slice]:
    """A batch in as many equal parts as are worked on side by side."""
    length = -(-batch // SIDE_BY_SIDE)
    return [slice(first, min(first + length, batch)) for first in range(0, batch, length)]

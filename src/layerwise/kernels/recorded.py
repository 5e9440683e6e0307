"""Newton-Schulz recorded as a CUDA graph and replayed.

A batch takes some twenty launches, and each takes the host longer than a small product takes the card. What is recorded are
the same kernels, so the bits are the same.

[Note: Recordings hold no memory]
A recording is for the addresses that it was made at. Memory is asked for anew in every step, as anywhere; in a training
loop the allocator gives the same again, and then what was recorded there is replayed. Elsewhere kernels are launched one by
one, and recorded when they come there again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from layerwise.config.coefficients import Coefficient
from layerwise.kernels.facts import products_for
from layerwise.kernels.newton_schulz import orthogonalize
from layerwise.kernels.tables import stream_on
from layerwise.layout.cost import resolve_method

_MOST = 256
"""Recordings that are kept: the latest. What is noted of addresses that came once is bounded likewise."""
_WARM = 2
"""Calls before a batch is recorded: kernels are compiled by then, and what comes once only is not worth it."""


class Recorder:
    """Orthogonalises as `orthogonalize` does; what comes again and again, by replaying it. One user at a time."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._graphs: OrderedDict[tuple[object, ...], torch.cuda.CUDAGraph] = OrderedDict()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def orthogonalize(
        self, update_BMN: Tensor, *, schedule: Sequence[Coefficient], method: str = "auto", dtype: torch.dtype
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
        memory = torch.empty(workspace_nbytes(out_BMN.shape, form, len(schedule)), dtype=torch.uint8, device=device)
        key = (
            *(update_BMN.data_ptr(), out_BMN.data_ptr(), memory.data_ptr(), stream_on(device)),
            *(update_BMN.shape, update_BMN.stride(), update_BMN.dtype, device, tuple(schedule), form, dtype),
        )  # fmt: skip

        def launch() -> None:
            orthogonalize_into(out_BMN, update_BMN, memory, schedule, form)

        if torch.cuda.is_current_stream_capturing():  # somebody records all of it
            launch()
            return out_BMN.contiguous()
        graph = self._graphs.get(key)
        if graph is None and self._is_due(key):
            graph = self._graphs[key] = self._record(device, launch)
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
        if graph is None:
            launch()
        else:
            graph.replay()
        return out_BMN.contiguous()

    def free(self) -> None:
        """Let go of all that was recorded."""
        self._graphs.clear()
        self._calls.clear()

    def _is_due(self, key: tuple[object, ...]) -> bool:
        """Whether this came often enough to be recorded now."""
        if len(self._calls) > _MOST:
            self._calls.clear()
        self._calls[key] += 1
        return self._calls[key] > _WARM

    def _record(self, device: torch.device, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if device not in self._streams:  # to record on: nothing ever runs there
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._streams[device]):
            # Other threads of this process (gloo's, NCCL's watchdog, the user's own) may do what they do meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()
        return graph

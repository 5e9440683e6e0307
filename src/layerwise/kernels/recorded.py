"""Newton-Schulz of small batches, recorded once as a CUDA graph and replayed.

A batch takes some twenty launches, and a launch takes the host longer than a small product takes the card: on many ranks,
where each has few matrices, a step would wait for the host. What is recorded are the same kernels, so the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise.config.coefficients import Coefficient
from layerwise.kernels.facts import products_for
from layerwise.kernels.newton_schulz import orthogonalize

RECORDED_NUMEL = 16 * 1024 * 1024
"""Elements of the largest batch that is recorded: what is larger keeps the card busy for longer than the host needs."""
RECORDED_TOTAL = 4 * RECORDED_NUMEL
"""Elements of all batches that are recorded: what they are read from and written to stays allocated."""
_WARM = 2
"""Calls before a batch is recorded: kernels are compiled by then, and what comes once only is not worth it."""


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    read: Tensor
    written: Tensor


class Recorder:
    """Orthogonalises as `orthogonalize` does; what comes again and again, by replaying it. One user at a time."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[object, ...]] = Counter()
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        self._numel = 0
        self._pool: Any = None

    def orthogonalize(
        self, update_BMN: Tensor, *, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype
    ) -> Tensor:
        """A new tensor, as if nothing was recorded."""
        key = self._key(update_BMN, schedule, method, dtype)
        if key is None:
            return orthogonalize(update_BMN, schedule=schedule, method=method, dtype=dtype)
        found = self._recorded.get(key)
        if found is None:
            self._calls[key] += 1
            if self._calls[key] <= _WARM:
                return orthogonalize(update_BMN, schedule=schedule, method=method, dtype=dtype)
            found = self._recorded[key] = self._record(update_BMN, schedule, method, dtype)
            self._numel += update_BMN.numel()
        found.read.copy_(update_BMN)
        found.graph.replay()
        return found.written.clone()

    def free(self) -> None:
        """Let go of all memory that recordings hold."""
        self._recorded.clear()
        self._calls.clear()
        self._numel, self._pool = 0, None

    def _key(
        self, update_BMN: Tensor, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype
    ) -> tuple[object, ...] | None:
        """What a recording is for; None for what is not recorded."""
        if not update_BMN.is_cuda or not 0 < update_BMN.numel() <= RECORDED_NUMEL:
            return None
        if products_for(update_BMN.device, update_BMN.dtype, dtype).backend != "triton":
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        # Strides too: a transposed batch takes other kernels.
        own = (update_BMN.shape, update_BMN.stride(), update_BMN.dtype, update_BMN.device)
        stream = torch.cuda.current_stream(update_BMN.device).cuda_stream
        key = (*own, stream, tuple(schedule), method, dtype)
        if key not in self._recorded and self._numel + update_BMN.numel() > RECORDED_TOTAL:
            return None
        return key

    def _record(
        self, update_BMN: Tensor, schedule: Sequence[Coefficient], method: str, dtype: torch.dtype
    ) -> _Recorded:
        read = torch.empty_strided(
            update_BMN.shape, update_BMN.stride(), dtype=update_BMN.dtype, device=update_BMN.device
        )
        read.copy_(update_BMN)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads of this process (gloo's, NCCL's watchdog, the user's own) may do what they do meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            written = orthogonalize(read, schedule=schedule, method=method, dtype=dtype)
        return _Recorded(graph, read, written)

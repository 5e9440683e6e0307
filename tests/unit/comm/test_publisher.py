"""Flights that fail, and readers that come at once. World 1 takes the same path; only what is under way is made up."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from torch import nn

import layerwise
from layerwise.buffers.storage import Bucket
from layerwise.comm.handles import Handle
from layerwise.comm.publisher import Publisher


class Work:
    """A gather that arrives when it is told to, or fails as often as it is waited for."""

    def __init__(self, bucket: Bucket, error: Exception | None = None) -> None:
        self.bucket, self.error = bucket, error
        self.arrived = threading.Event()
        self.is_waited_for = threading.Event()

    def wait(self) -> None:
        self.is_waited_for.set()
        if self.error is not None:
            raise self.error
        assert self.arrived.wait(timeout=10)
        self.bucket.replica.fill_(7.0)

    def is_completed(self) -> bool:
        return self.arrived.is_set()


def stale(error: Exception | None = None) -> tuple[layerwise.DataParallel, Work]:
    """A model whose one bucket is under way."""
    model = layerwise.DataParallel(nn.Linear(4, 4, bias=False))
    (bucket,) = model.engine.storage.buckets
    work = Work(bucket, error)
    bucket.advance()
    with mock.patch.object(Publisher, "_start", return_value=Handle("a gather", bucket.replica, (), (work,))):
        model.engine.publisher.begin()
    return model, work


def test_a_gather_that_failed_leaves_no_weight_that_counts_as_new() -> None:
    model, _ = stale(RuntimeError("connection closed"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            model(torch.ones(1, 4))


def test_a_second_thread_does_not_read_what_the_first_still_waits_for() -> None:
    model, work = stale()
    found: list[float] = []
    readers = [
        threading.Thread(target=lambda: found.append(float(model.module.weight.detach().sum()))) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
        assert work.is_waited_for.wait(timeout=10)
    readers[1].join(timeout=0.2)
    assert readers[1].is_alive()
    assert not found
    work.arrived.set()
    for reader in readers:
        reader.join(timeout=10)
    assert found == [7.0 * 16] * 2


class Half(nn.Module):
    """Has a layer that no forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_aligned_gathers_are_those_of_one_chunk_also_with_layers_that_nobody_runs() -> None:
    model = layerwise.DataParallel([Half(), Half()], prefetch=1, align_param_gather=True, bucket_mib=0.0001)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    first, second = model.engine.chunks
    for _ in range(2):
        second(first(torch.ones(1, 8))).sum().backward()
        optimizer.step()
    first(torch.ones(1, 8))
    state_of: dict[int, set[str]] = {0: set(), 1: set()}
    for bucket in model.engine.storage.buckets:
        state_of[model.plan.buffers[bucket.plan.buffer].key.chunk].add(bucket.replica_state.value)
    assert "stale" not in state_of[0]
    assert state_of[1] == {"stale"}

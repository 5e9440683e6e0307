"""Readers of a fresh bucket wait for whoever landed it, on CUDA. Here what they would wait for is made up, since a CPU has
no streams; tests/gpu/test_streams.py has the real ones."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

import layerwise
from layerwise.memory.streams import Written


def test_a_cpu_has_nothing_to_wait_for() -> None:
    model = layerwise.DataParallel(nn.Linear(4, 4, bias=False))
    (replica,) = model.engine.storage.replicas
    model.engine.publisher.begin()
    model.ensure()
    assert replica.written is None


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model(torch.ones(1, 4)),
        lambda model: model.module(torch.ones(1, 4)),
        lambda model: model.ensure(),
    ],
    ids=["forward", "module", "ensure"],
)
def test_whoever_reads_a_fresh_bucket_waits_for_what_was_written(
    read: Callable[[layerwise.DataParallel], object],
) -> None:
    model = layerwise.DataParallel(nn.Linear(4, 4, bias=False))
    (replica,) = model.engine.storage.replicas
    replica.written = mock.Mock(spec=Written)
    read(model)
    replica.written.wait.assert_called_once_with()


def test_who_lands_a_bucket_waits_for_who_launched_it() -> None:
    model = layerwise.DataParallel(nn.Linear(4, 4, bias=False))
    (replica,) = model.engine.storage.replicas
    model.engine.publisher.begin()
    replica.written = mock.Mock(spec=Written)
    versions: list[int] = []
    replica.written.wait.side_effect = lambda: versions.append(replica.version)
    model.ensure()
    assert versions[0] == 0, "it waited before the bucket counted as fresh"
    assert replica.version == 1

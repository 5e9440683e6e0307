"""Flights that fail, and readers that come at once. World 1 takes the same path; only what is under way is made up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import nn

import layerwise
from layerwise.comm import waiting
from layerwise.comm.handles import Handle
from layerwise.engine.publisher import Publisher
from layerwise.errors import StateError
from layerwise.memory.replicas import Replica
from tests import seams
from tests.ranks import raised, run_ranks


class Work:
    """A gather that arrives when it is told to, or fails as often as it is waited for."""

    def __init__(self, replica: Replica, error: Exception | None = None) -> None:
        self.replica, self.error = replica, error
        self.arrived = threading.Event()
        self.is_waited_for = threading.Event()

    def wait(self, timeout: object = None) -> None:
        self.is_waited_for.set()
        if self.error is not None:
            raise self.error
        assert self.arrived.wait(timeout=60)
        self.replica.weights.fill_(7.0)

    def is_completed(self) -> bool:
        return self.arrived.is_set()


def stale(error: Exception | None = None, prefetch: int | None = None) -> tuple[layerwise.DataParallel, Work]:
    """A model whose one bucket is under way."""
    model = seams.data_parallel(nn.Linear(4, 4, bias=False), prefetch=prefetch)
    (replica,) = model.engine.storage.replicas
    work = Work(replica, error)
    with mock.patch.object(Publisher, "_start", return_value=Handle("a gather", replica.weights, (), (work,))):
        model.engine.publisher.begin()
    return model, work


def test_a_gather_that_failed_leaves_no_weight_that_counts_as_new() -> None:
    model, _ = stale(RuntimeError("connection closed"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection closed"):
            model(torch.ones(1, 4))


@pytest.mark.parametrize(
    "read",
    [
        lambda model: model(torch.ones(1, 4)),
        lambda model: model.module.weight.detach(),
        lambda model: model.ensure(),
    ],
    ids=["forward", "read", "ensure"],
)
def test_a_rank_that_reads_alone_is_told_what_it_waits_for(
    read: Callable[[layerwise.DataParallel], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = r"'weight' is read on this rank, which waits for the other ranks .* overlap_param_gather=True"
    model, _ = stale(RuntimeError("timed out"), prefetch=1)
    with pytest.raises(StateError, match=hint):
        read(model)
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.01)
    model, work = stale(prefetch=1)
    say = waiting.warn

    def arrive_once_it_was_said(text: str) -> None:
        say(text)
        work.arrived.set()

    monkeypatch.setattr(waiting, "warn", arrive_once_it_was_said)
    anyway = threading.Timer(60.0, work.arrived.set)  # nobody waits for ever if it never is
    anyway.start()
    with pytest.warns(UserWarning, match=hint):
        read(model)
    anyway.cancel()


def test_a_launch_that_failed_is_made_again() -> None:
    model, work = stale(prefetch=0)
    (replica,) = model.engine.storage.replicas
    with (
        mock.patch.object(Publisher, "_start", side_effect=RuntimeError("no tracing in here")),
        mock.patch.object(model.engine.publisher, "_ops", [object()]),
        pytest.raises(RuntimeError, match="no tracing in here"),
    ):
        model(torch.ones(1, 4))
    work.arrived.set()
    handle = Handle("a gather", replica.weights, (), (work,))
    with (
        mock.patch.object(Publisher, "_start", return_value=handle),
        mock.patch.object(model.engine.publisher, "_ops", [object()]),
    ):
        assert model(torch.ones(1, 4)).tolist() == [[28.0] * 4]


def read_in_a_fork(rank: int, world: int, ensured: bool) -> str:
    """What a forked process gets when it reads weights after a step."""
    torch.manual_seed(1)
    model = layerwise.DataParallel(nn.Linear(4, 4, bias=False))
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if ensured:
        model.ensure()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        text = raised(lambda: (model.ensure(), model.module.weight.detach().clone()))
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_a_forked_process_is_told_to_ensure_before_the_fork() -> None:
    expected = "StateError: weights are read in a forked process while they are still on their way"
    assert all(text.startswith(expected) for text in run_ranks(2, read_in_a_fork, False))
    assert run_ranks(2, read_in_a_fork, True) == ["nothing was raised"] * 2


def test_a_second_thread_does_not_read_what_the_first_still_waits_for() -> None:
    model, work = stale()
    found: list[float] = []
    readers = [
        threading.Thread(target=lambda: found.append(float(model.module.weight.detach().sum()))) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
        assert work.is_waited_for.wait(timeout=60)
    readers[1].join(timeout=0.2)
    assert readers[1].is_alive()
    assert not found
    work.arrived.set()
    for reader in readers:
        reader.join(timeout=60)
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
    model = seams.data_parallel([Half(), Half()], prefetch=1, overlap_param_gather="by chunk", bucket_mib=0.0001)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    first, second = model.engine.chunks
    for _ in range(2):
        second(first(torch.ones(1, 8))).sum().backward()
        optimizer.step()
    first(torch.ones(1, 8))
    state_of: dict[int, set[str]] = {0: set(), 1: set()}
    for replica in model.engine.storage.replicas:
        state_of[model.plan.buffers[replica.plan.buffer].key.chunk].add(replica.state.value)
    assert "stale" not in state_of[0]
    assert state_of[1] == {"stale"}

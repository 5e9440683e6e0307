"""Weights that were brought up to date on one CUDA stream and are read on another, and gradients that several of them write. Needs
CUDA; CI has none."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.handles import Handle
from layerwise.engine.publisher import Publisher
from tests import seams
from tests.ranks import run_ranks
from tests.worlds import Hyper, rules

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")

SLEEP = 400_000_000
"""Cycles of the card: about a fifth of a second, in which any other stream is done."""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The first product on a card takes longer than the gathers here."""
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            nn.Linear(4, 4).cuda()(torch.ones(1, 4, device="cuda"))
    torch.cuda.synchronize()


class SlowWork:
    """A gather that arrives long after it was waited for, as NCCL's do: the stream that waits goes on when it is there."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def wait(self) -> None:
        torch.cuda._sleep(SLEEP)
        self.weights.fill_(7.0)

    def is_completed(self) -> bool:
        return False


def under_way() -> layerwise.DataParallel:
    """A model of ones whose one bucket is on its way, and will be all sevens."""
    module = nn.Linear(4, 4, bias=False).cuda()
    nn.init.ones_(module.weight)
    model = layerwise.DataParallel(module)
    (replica,) = model.engine.storage.replicas
    handle = Handle("a gather", replica.weights, (), (SlowWork(replica.weights),))
    with mock.patch.object(Publisher, "_start", return_value=handle):
        model.engine.publisher.begin()
    torch.cuda.synchronize()
    return model


X = torch.ones(1, 4)
READS: dict[str, Callable[[layerwise.DataParallel, Tensor], Tensor]] = {
    "forward": lambda model, x: model(x),
    "module": lambda model, x: model.module(x),
    "ensure": lambda model, x: (model.ensure(), x @ model.module.weight.detach().T)[1],
}


def first_by_itself(model: layerwise.DataParallel, x: Tensor) -> Tensor:
    return x @ model.module.weight.detach().T


@torch.no_grad()
@pytest.mark.parametrize("second", READS)
@pytest.mark.parametrize("first", [*READS, "read"])
def test_a_second_stream_reads_what_the_first_one_waited_for(first: str, second: str) -> None:
    model, x = under_way(), X.cuda()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        seen = {**READS, "read": first_by_itself}[first](model, x)
        assert not one.query(), "in the scene the gather is still under way"
    with torch.cuda.stream(other):
        seen_too = READS[second](model, x)
        again = READS[second](model, x)
        assert not other.query(), "the device waits and not the host"
    torch.cuda.synchronize()
    assert seen.tolist() == seen_too.tolist() == again.tolist() == [[28.0] * 4]


@torch.no_grad()
def test_the_scene_shows_a_reader_that_does_not_wait() -> None:
    model, x = under_way(), X.cuda()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        model(x)
    with torch.cuda.stream(other):
        seen = x @ model.module.weight.detach().T  # nobody is asked
    torch.cuda.synchronize()
    assert seen.tolist() == [[4.0] * 4]


@torch.no_grad()
@pytest.mark.parametrize("layout", ["flat", "replicated"])
def test_a_bucket_is_landed_on_another_stream_than_it_was_launched_on(layout: str) -> None:
    """The reader of one bucket rounds the next one's master, on its own stream."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).cuda().to(torch.bfloat16)
    model = seams.data_parallel(module, layout=layout, bucket_mib=1e-5, prefetch=1)
    assert len(model.engine.storage.replicas) == 2
    x = X.cuda().to(torch.bfloat16)
    for shard in model.engine.storage.shards:
        shard.master.fill_(7.0)
    model.engine.publisher.begin()  # launches the first alone
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(SLEEP)
        module[0](x)
    with torch.cuda.stream(other):
        seen = module[1](x)
    torch.cuda.synchronize()
    assert seen.tolist() == [[28.0] * 4]


def test_a_forward_can_be_captured_once_weights_are_there() -> None:
    module = nn.Linear(4, 4).cuda()
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    x = X.cuda()
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = model(x)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(seen, expected)


class SlowBackward(torch.autograd.Function):
    """The identity, whose gradient takes a while, on the stream of its forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        torch.cuda._sleep(SLEEP)
        return grad.clone()


def half_on_the_side(rank: int, world: int, aside: bool) -> list[Tensor]:
    """Weights of two layers in one bucket, of which the one whose gradient comes first runs on another stream."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(2)).cuda()
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, **rules(Hyper()))
    side = torch.cuda.Stream() if aside else torch.cuda.current_stream()
    x = X.cuda() * (rank + 1)
    for _ in range(3):  # from the second on, buckets are reduced while backward runs
        last = module[1](x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first = SlowBackward.apply(module[0](x))
        torch.cuda.current_stream().wait_stream(side)
        (first.square().sum() + last.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().cpu() for param in module.parameters()]


def test_a_bucket_is_reduced_behind_all_streams_that_wrote_into_it() -> None:
    for found, expected in zip(
        run_ranks(2, half_on_the_side, True), run_ranks(2, half_on_the_side, False), strict=True
    ):
        assert all(map(torch.equal, found, expected))

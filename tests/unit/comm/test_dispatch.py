"""Rows to their ranks and back, forward and backward, on real ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm import dispatch
from layerwise.comm.dispatch import ALL_EXPERTS_HERE, ExpertRanks, exchange_counts, exchange_rows
from tests.ranks import raised, run_ranks

SENT = {  # SENT[world][source][target] rows; rank 1 of 3 sends nothing, rank 0 of 3 receives nothing
    1: [[4]],
    2: [[1, 3], [2, 0]],
    3: [[0, 2, 1], [0, 0, 0], [0, 4, 1]],
}


def _all_ranks(rank: int, world: int) -> ExpertRanks:
    return ExpertRanks(dist.group.WORLD, rank, world)


def _rows(rank: int, world: int) -> Tensor:
    """A row is (source, target, number): where it comes from and where it belongs is written in it."""
    rows = [(rank, target, number) for target, count in enumerate(SENT[world][rank]) for number in range(1, count + 1)]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 3)


def _send_all(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    ranks = _all_ranks(rank, world)
    sent = SENT[world][rank]
    counted = exchange_counts(torch.tensor(sent).view(world, 1), ranks).flatten()
    rows = _rows(rank, world).requires_grad_()
    arrived = exchange_rows(rows, sent, counted.tolist(), ranks)
    (arrived * torch.tensor(float(rank + 1))).sum().backward()
    assert rows.grad is not None
    return counted, arrived.detach(), rows.grad


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_arrive_in_rank_order_and_gradients_go_home(world: int) -> None:
    for rank, (counted, arrived, grad) in enumerate(run_ranks(world, _send_all)):
        assert counted.tolist() == [SENT[world][source][rank] for source in range(world)]
        expected = [
            [source, rank, number] for source in range(world) for number in range(1, SENT[world][source][rank] + 1)
        ]
        assert arrived.tolist() == expected
        # every rank multiplies what arrives by its number, so a row's gradient says where it has been
        assert grad.tolist() == [[target + 1.0] * 3 for _, target, _ in _rows(rank, world).tolist()]


def _there_and_back(rank: int, world: int, backward_is_wrong: bool) -> tuple[Tensor, Tensor]:
    ranks = _all_ranks(rank, world)
    sent = SENT[world][rank]
    received = [SENT[world][source][rank] for source in range(world)]
    weights = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank))
    source = torch.randn(sum(sent), 5, generator=torch.Generator().manual_seed(10 + rank)).requires_grad_()

    def forgetful(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ones(sum(ctx.sent), *grads[0].shape[1:]), None, None, None

    patched = mock.patch.object(dispatch._Exchange, "backward", staticmethod(forgetful))
    with patched if backward_is_wrong else nullcontext():
        there = exchange_rows(source @ weights, sent, received, ranks)
        back = exchange_rows(there.tanh(), received, sent, ranks)
        # the gradient of an expanded sum is not contiguous: one element stands for all
        back.sum().backward()
    alone = source.detach().clone().requires_grad_()
    (alone @ weights).tanh().sum().backward()
    assert source.grad is not None
    assert alone.grad is not None
    return source.grad, alone.grad


@pytest.mark.parametrize("world", [2, 3])
def test_what_comes_back_has_the_gradient_of_never_having_left(world: int) -> None:
    for found, expected in run_ranks(world, _there_and_back, False):
        assert torch.equal(found, expected)
    wrong = run_ranks(world, _there_and_back, True)
    assert any(not torch.equal(found, expected) for found, expected in wrong), "the control must fail"


def _non_contiguous(rank: int, world: int) -> Tensor:
    columns = torch.arange(6.0).view(3, 2).t() + 10 * rank  # (2, 3), strided
    return exchange_rows(columns, [1, 1], [1, 1], _all_ranks(rank, world))


def test_strided_rows_are_sent_as_they_read() -> None:
    found = run_ranks(2, _non_contiguous)
    assert found[0].tolist() == [[0, 2, 4], [10, 12, 14]]
    assert found[1].tolist() == [[1, 3, 5], [11, 13, 15]]


def test_one_rank_exchanges_nothing() -> None:
    rows, counts = torch.randn(3, 2), torch.tensor([[1, 2]])
    assert exchange_rows(rows, [3], [3], ALL_EXPERTS_HERE) is rows
    assert exchange_counts(counts, ALL_EXPERTS_HERE) is counts


def test_counts_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match=r"3 rows do not split into \[2\] for 1 ranks"):
        exchange_rows(torch.randn(3, 2), [2], [2], ALL_EXPERTS_HERE)
    with pytest.raises(ValueError, match="one row for each of 1 ranks"):
        exchange_counts(torch.zeros(2, 2, dtype=torch.int64), ALL_EXPERTS_HERE)


def _over_a_group_that_is_gone(rank: int, world: int) -> list[str]:
    group = dist.new_group([0, 1])
    ranks = ExpertRanks(group, rank, world)
    rows = torch.ones(2, 3, requires_grad=True)
    arrived = exchange_rows(rows, [1, 1], [1, 1], ranks)
    dist.barrier()  # the other rank may still be receiving
    dist.destroy_process_group(group)
    return [
        raised(lambda: exchange_counts(torch.ones(2, 1, dtype=torch.int64), ranks)),
        raised(lambda: exchange_rows(rows, [1, 1], [1, 1], ranks)),
        raised(lambda: arrived.sum().backward()),
    ]


def test_a_group_that_the_user_left_is_named_forward_and_backward() -> None:
    for found in run_ranks(2, _over_a_group_that_is_gone):
        for said in found:
            assert said.startswith("StateError: the model belongs to a process group that is gone, and rows to experts")

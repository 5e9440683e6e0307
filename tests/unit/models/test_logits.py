"""Logits of watched modules: whatever way their forward runs, the maximum since the last reset is known."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import layerwise
from layerwise.models.logits import MaxLogits, record_logits, watch


class Attention(nn.Module):
    def __init__(self, n_heads: int = 2) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(8, 24)
        self.fails = False

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.fused("qkv", n_heads=self.n_heads, head_dim=8 // self.n_heads)

    def heads(self, x: Tensor) -> Any:
        return self.qkv(x).view(*x.shape[:2], 3 * self.n_heads, -1).transpose(1, 2).chunk(3, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.fails:
            raise FloatingPointError("injected")
        return mixed.transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, checkpointing: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.attention = Attention()
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.checkpointing:
            return checkpoint(self.attention, x, use_reentrant=self.checkpointing == "reentrant").sum()
        return self.attention(x).sum()


def expected(attention: Attention, x: Tensor) -> Tensor:
    with torch.no_grad():
        q, k, _ = attention.heads(x)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        late = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return logits.masked_fill(late, -math.inf).amax(dim=(0, 2, 3))


def watched(net: Net) -> MaxLogits:
    return watch(net.attention, "attention", 2, torch.device("cpu"), hooked=True)


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Any:
    yield
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("checkpointing", ["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("compiled", ["", "eager", "aot_eager"])
def test_a_forward_and_a_backward_leave_the_largest_logits(checkpointing: str, compiled: str) -> None:
    torch.manual_seed(0)
    net = Net(checkpointing)
    found = watched(net)
    torch._dynamo.reset()
    model = torch.compile(net, backend=compiled, fullgraph=not checkpointing) if compiled else net
    for _ in range(2):
        found.reset()
        xs = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(2)]
        for x in xs:
            model(x).backward()
        inner = [torch.tanh(net.first(x)) for x in xs]
        assert found.is_seen
        torch.testing.assert_close(found.values, torch.maximum(*(expected(net.attention, x) for x in inner)))


def test_only_training_counts_and_memory_stays() -> None:
    net, x = Net(), torch.randn(2, 5, 8)
    found = watched(net)
    where = found.values.data_ptr()
    net.eval()(x)
    record_logits(net.attention, torch.ones(2))
    assert not found.is_seen
    net.train()
    with torch.no_grad():
        net(x)
    assert found.is_seen
    found.reset()
    assert found.values.tolist() == [-math.inf, -math.inf]
    assert found.values.data_ptr() == where


def test_a_copy_of_a_module_does_not_count_for_it() -> None:
    net = Net()
    found = watched(net)
    copy.deepcopy(net)(torch.randn(2, 5, 8))
    assert not found.is_seen


def test_a_forward_that_raises_is_seen_no_longer_than_it_runs() -> None:
    net, x = Net(), torch.randn(2, 5, 8)
    found = watched(net)
    net.attention.fails = True
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            net(x)
    assert _get_current_function_mode_stack() == []
    net.attention.fails = False
    found.reset()
    net(x)
    F.scaled_dot_product_attention(*(torch.full((1, 7, 2, 4), 100.0) for _ in range(3)))  # nobody's
    torch.testing.assert_close(found.values, expected(net.attention, torch.tanh(net.first(x))))


def test_a_forward_that_an_interrupt_ended_sees_nothing_after_the_next_reset() -> None:
    attention, other = Attention(), Attention()
    found = watch(attention, "attention", 2, torch.device("cpu"), hooked=True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = attention.register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            attention(torch.ones(1, 3, 8))
        hook.remove()
        found.reset()
        other(torch.ones(1, 3, 8))
        assert not found.is_seen
    finally:
        for mode in reversed(_get_current_function_mode_stack()):  # other tests have it empty
            mode.__exit__(None, None, None)


def test_watching_again_starts_anew_and_sees_once() -> None:
    net = Net()
    watched(net)
    found = watched(net)
    assert len(net.attention._forward_hooks) == len(net.attention._forward_pre_hooks) == 1
    net(torch.randn(2, 5, 8))
    assert found.is_seen


def test_recorded_logits_and_seen_ones_make_one_maximum() -> None:
    net, x = Net(), torch.randn(2, 5, 8)
    found = watched(net)
    record_logits(net.attention, torch.tensor([1e6, -1e6], dtype=torch.bfloat16))
    net(x)
    assert found.values[0] == torch.tensor(1e6, dtype=torch.bfloat16).float()
    torch.testing.assert_close(found.values[1], expected(net.attention, torch.tanh(net.first(x)))[1])
    record_logits(net.attention, torch.tensor([math.nan, 0.0]))
    record_logits(net.attention, torch.tensor([2.0, 0.0]))
    assert math.isnan(found.values[0])


def test_another_number_of_heads_is_named() -> None:
    net = Net()
    watched(net)
    net.attention.n_heads = 4
    with pytest.raises(
        ValueError, match=r"module 'attention' has largest logits of shape \(4,\): expected one for each"
    ):
        net(torch.randn(2, 5, 8))
    with pytest.raises(TypeError, match="Linear, which has no method attention_heads"):
        record_logits(nn.Linear(2, 2), torch.ones(2))


def test_a_module_that_nobody_watches_may_record() -> None:
    record_logits(Attention(), torch.ones(2))

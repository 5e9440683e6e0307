"""QK-clip on real attention: logits come down to the threshold, and nothing else moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import ModelConfig, OptimConfig, TrainConfig
from layerwise.config.validate import validate
from layerwise.errors import StateError
from layerwise.train.model import build_gpt, rotary_angles

TOKENS = torch.arange(24).view(2, 12) * 7 % 256


class Latent(nn.Module):
    """Multi-head latent attention without positions: each head has two plain and two shared dims."""

    def __init__(self) -> None:
        super().__init__()
        self.q_b = nn.Linear(8, 3 * 4)
        self.kv_a = nn.Linear(8, 6 + 2)
        self.kv_b = nn.Linear(6, 3 * 5)

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.mla(
            query="q_b", key_value="kv_b", n_heads=3, nope_dim=2, rope_dim=2, value_dim=3
        )

    def forward(self, x: Tensor) -> Tensor:
        query = self.q_b(x).unflatten(-1, (3, 4)).transpose(1, 2)
        latent, shared = self.kv_a(x).split((6, 2), dim=-1)
        key, value = self.kv_b(latent).unflatten(-1, (3, 5)).transpose(1, 2).split((2, 3), dim=-1)
        key = torch.cat((key, shared[:, None].expand(-1, 3, -1, -1)), dim=-1)
        return nn.functional.scaled_dot_product_attention(query, key, value)


def gpt(n_kv_heads: int = 2) -> nn.Module:
    shape = resolve_model(
        ModelConfig(d_model=32, n_layers=2, n_heads=4, n_kv_heads=n_kv_heads, seq_len=12, init_std=0.3)
    )
    return build_gpt(shape, seed=3)


def still(model: nn.Module, **options: Any) -> layerwise.Optimizer:
    """An optimizer whose steps change nothing but by QK-clip."""
    return layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.0), other=layerwise.AdamW(lr=0.0), **options)


def maxima(model: nn.Module) -> dict[str, Tensor]:
    return {name: module._layerwise_logits.values.clone() for name, module in model.named_modules() if hasattr(module, "_layerwise_logits")}  # fmt: skip


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_logits_of_a_gpt_come_down_to_the_threshold(n_kv_heads: int) -> None:
    model = gpt(n_kv_heads)
    optimizer = still(model, qk_clip=layerwise.QKClip(threshold=math.inf))
    model(TOKENS).sum().backward()
    before = maxima(model)
    optimizer.step()
    assert optimizer.stats.max_logit == max(float(values.max()) for values in before.values())
    assert optimizer.stats.clipped_heads == 0
    groups = torch.cat([values.view(n_kv_heads, -1) for values in before.values()]).amax(dim=1)
    threshold = float(groups.median())
    optimizer = still(model, qk_clip=layerwise.QKClip(threshold=threshold))
    model(TOKENS).sum().backward()
    weights = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    optimizer.step()
    assert optimizer.stats.clipped_heads == int((groups > threshold).sum()) * 4 // n_kv_heads > 0
    changed = {fqn for fqn, param in model.named_parameters() if not torch.equal(param, weights[fqn])}
    assert changed <= {"blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"}
    rows = (4 + n_kv_heads) * 8
    assert all(torch.equal(p[rows:], weights[f][rows:]) for f, p in model.named_parameters() if f in changed)
    model(TOKENS)
    # Later layers see other values now that earlier attention differs; the first sees the same input.
    first = "blocks.0.attn"
    after, was = maxima(model)[first].view(n_kv_heads, -1), before[first].view(n_kv_heads, -1)
    eta = (threshold / was.amax(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(after, was * eta)


def test_logits_of_latent_attention_with_biases_come_down_without_moving_the_shared_key() -> None:
    torch.manual_seed(0)
    model, x = Latent(), torch.randn(2, 7, 8) * 4
    threshold = 1.0
    optimizer = still(model, qk_clip=layerwise.QKClip(threshold=threshold))
    model(x).sum().backward()
    before, shared = maxima(model)[""], model.kv_a.weight.detach().clone()
    optimizer.step()
    model(x)
    torch.testing.assert_close(maxima(model)[""], before.clamp(max=threshold))
    assert optimizer.stats.clipped_heads == int((before > threshold).sum()) >= 2
    assert torch.equal(model.kv_a.weight, shared)


def test_zero_grad_between_forward_and_backward_forgets_no_logits() -> None:
    model = gpt()
    optimizer = still(model, qk_clip=layerwise.QKClip(threshold=1.0))
    loss = model(TOKENS).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert optimizer.stats.clipped_heads > 0
    assert all(bool((values == -math.inf).all()) for values in maxima(model).values())


def test_without_qk_clip_nothing_is_seen() -> None:
    model = gpt()
    optimizer = still(model)
    model(TOKENS).sum().backward()
    optimizer.step()
    assert (optimizer.stats.max_logit, optimizer.stats.clipped_heads) == (None, 0)
    assert maxima(model) == {}


def test_training_without_training_mode_is_an_error_not_silence() -> None:
    model = gpt()
    optimizer = still(model, qk_clip=layerwise.QKClip())
    model.eval()
    model(TOKENS).sum().backward()
    with pytest.raises(
        StateError, match=r"no attention logits of 'blocks\.0\.attn', 'blocks\.1\.attn' since the last step"
    ):
        optimizer.step()


def test_a_module_that_does_not_run_is_named_in_the_stats() -> None:
    model = gpt()
    optimizer = still(model, qk_clip=layerwise.QKClip())
    model.blocks[0](torch.ones(1, 12, 32), *rotary_angles(12, 8, 1e4, torch.device("cpu"))).sum().backward()
    optimizer.step()
    assert optimizer.stats.unseen_logits == ("blocks.1.attn",)
    assert optimizer.stats.max_logit is not None


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Latent()
        self.attention_heads = self.inner.attention_heads


def test_attention_within_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="module 'inner' lies in module '' and both have attention_heads"):
        still(Nested(), qk_clip=layerwise.QKClip())
    odd = Latent()
    odd.attention_heads = lambda: {"q_b": 3}  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(
        TypeError, match=r"Latent\.attention_heads\(\) returned dict: expected a layerwise.AttentionHeads"
    ):
        still(odd, qk_clip=layerwise.QKClip())


def test_a_threshold_that_makes_no_sense_is_a_problem_of_the_config() -> None:
    (problem,) = validate(TrainConfig(optim=OptimConfig(qk_clip=-1.0)))
    assert str(problem) == "optim.qk_clip: expected a number above 0, or none, got -1.0."

"""Largest logits on a GPU, where 16-bit products have a kernel of their own. Needs CUDA; CI has none."""

from __future__ import annotations

import pytest
import torch

import layerwise
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import ModelConfig
from layerwise.kernels.logits import max_logits
from layerwise.train.model import build_gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run on a machine with one")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gpu_finds_what_the_cpu_finds(dtype: torch.dtype, is_causal: bool) -> None:
    query, key = torch.randint(-3, 4, (2, 4, 300, 16)).to(dtype), torch.randint(-3, 4, (2, 2, 300, 16)).to(dtype)
    found = max_logits(query.cuda(), key.cuda(), is_causal=is_causal).cpu()
    assert torch.equal(found, max_logits(query, key, is_causal=is_causal))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpt_on_the_gpu_is_clipped(compiled: bool) -> None:
    shape = resolve_model(ModelConfig(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, seq_len=32, init_std=0.3))
    module = build_gpt(shape, seed=0, device=torch.device("cuda"), dtype=torch.bfloat16)
    optimizer = layerwise.Optimizer(
        module,
        matrix=layerwise.Muon(lr=0.0),
        other=layerwise.AdamW(lr=0.0),
        qk_clip=layerwise.QKClip(threshold=0.5),
    )
    model = torch.compile(module) if compiled else module
    tokens = torch.randint(0, 256, (2, 32), device="cuda")
    largest = []
    for _ in range(2):
        model(tokens).sum().backward()
        optimizer.step()
        largest.append(optimizer.stats.max_logit or 0.0)
    assert largest[0] > 0.6
    assert largest[1] < largest[0]

"""Weights that were trained here go back to transformers: `layerwise ckpt export`, and from_pretrained() of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import layerwise
from layerwise.cli.exits import OK
from layerwise.cli.main import main
from tests.hf.models import build


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_was_trained_is_loaded_by_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """gpt2 reads one weight under two names, of which one is in the file."""
    module = build(name, "cpu").to(dtype)
    before = {fqn: param.detach().clone() for fqn, param in module.named_parameters()}
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.02))
    tokens = torch.arange(32).reshape(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    layerwise.save(tmp_path / "checkpoint", model, optimizer)
    exported = tmp_path / "exported"
    exported.mkdir()
    module.config.save_pretrained(exported)
    assert main(["ckpt", "export", str(tmp_path / "checkpoint"), "--to", str(exported / "model.safetensors")]) == OK
    found, said = type(module).from_pretrained(exported, dtype=dtype, output_loading_info=True)
    assert not any(said.values()), said
    weights = dict(found.named_parameters())
    assert weights.keys() == before.keys()
    for fqn, param in module.named_parameters():
        assert weights[fqn].dtype == dtype
        assert torch.equal(weights[fqn].view(torch.uint8), param.detach().view(torch.uint8)), fqn
        assert not torch.equal(param, before[fqn]), f"{fqn} was not trained: the test shows nothing of it"

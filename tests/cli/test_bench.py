"""`layerwise bench` on a machine of any kind: every row is there, and floors are what they say."""

from __future__ import annotations

import json

import pytest
import torch

from layerwise.cli.main import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes are those of a GPU there, which takes longer")
Captured = pytest.CaptureFixture[str]


def test_newton_schulz_beside_its_floor(capsys: Captured) -> None:
    assert main(["bench", "ns", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ceilings"]["tflops"] > 0
    assert [row["form"] for row in report["rows"]] == ["standard", "gram"]
    square = report["rows"][0]
    assert square["matrices"] == "4 of 64 x 64"
    # Five steps of the standard form on a square, symmetric products at half their size.
    assert square["floor_ms"] == pytest.approx(4 * 20 * 64**3 / report["ceilings"]["tflops"] / 1e9, abs=6e-4)
    assert all(row["ms"] > row["floor_ms"] for row in report["rows"])


def test_steps_of_ours_and_of_torch_over_the_same_matrices(capsys: Captured) -> None:
    assert main(["bench", "step", "--width", "16", "--layers", "1"]) == 0
    out = capsys.readouterr().out
    for name in ("layerwise Muon", "layerwise AdamW", "torch AdamW, fused", "1 layers of width 16", "TFLOP/s"):
        assert name in out


def test_sizes_must_be_sizes(capsys: Captured) -> None:
    assert main(["bench", "step", "--width", "0"]) == 2
    assert "--width must be 1 or more, got 0" in capsys.readouterr().err
    assert main(["bench", "ns", "--layers", "1"]) == 2
    assert "bench ns takes no --layers: its matrices are given." in capsys.readouterr().err

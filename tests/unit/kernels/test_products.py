"""Which back end multiplies, and our own kernels on the CPU through Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from layerwise.kernels.facts import products_for
from layerwise.kernels.products import Products, choose_products
from tests.marks import sampled

ROOT = Path(__file__).parents[3]
INTERPRETED = ("products", "elementwise", "stats", "codec")
HOPPER: dict[str, object] = {
    "device": "cuda",
    "capability": (9, 0),
    "triton": "3.6.0",
    "input_dtype": "bf16",
    "dtype": "bf16",
}


def choose(**facts: object) -> Products:
    return choose_products(**{**HOPPER, **facts})  # type: ignore[arg-type]


def test_on_hopper_with_triton_16_bit_products_are_our_own() -> None:
    assert choose() == Products("triton", "symmetric products through Triton 3.6.0")
    assert choose(input_dtype="fp32", dtype="fp16").backend == "triton"


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        ({"device": "cpu"}, "cpu"),
        ({"device": "mps"}, "mps"),
        ({"capability": (8, 0)}, "8.0"),
        ({"capability": (10, 0)}, "10.0"),
        ({"capability": None}, "unknown"),
        ({"triton": None}, "pip install triton"),
        ({"dtype": "fp32"}, "fp32"),
        ({"input_dtype": "torch.float64"}, "float64"),
    ],
)
def test_elsewhere_torch_multiplies_and_the_reason_says_why(facts: dict[str, object], word: str) -> None:
    chosen = choose(**facts)
    assert chosen.backend == "torch"
    assert word in chosen.reason


def test_on_the_cpu_products_are_those_of_torch() -> None:
    assert products_for(torch.device("cpu"), torch.float32, torch.bfloat16).backend == "torch"


def test_importing_newton_schulz_does_not_import_triton() -> None:
    code = "import sys, layerwise.kernels.newton_schulz; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def interprets() -> bool:
    """Whether Triton is here, and new enough: the interpreter of 3.6 does not know numpy 2."""
    if importlib.util.find_spec("triton") is None:
        return False
    major, minor = (int(part) for part in metadata.version("triton").split(".")[:2])
    return (major, minor) >= (3, 9)


@pytest.mark.skipif(not interprets(), reason="needs Triton 3.9 or later")
@pytest.mark.parametrize("name", sampled(INTERPRETED))
def test_the_kernels_are_right_in_tritons_interpreter(name: str) -> None:
    """In a process of its own: Triton decides at its first import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"tests/gpu/test_{name}.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "passed" in ran.stdout

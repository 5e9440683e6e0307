"""The examples with fully_shard: what changes between two of them is counted, and all are run as torchrun would run them."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from benchmarks.tables import ROOT, difference
from tests.examples.test_nanogpt import free_port
from tests.marks import sampled
from tests.ranks import run_ranks

FOLDER = ROOT / "examples" / "fsdp2"


def run_scripts(rank: int, world: int, script: str, runs: list[tuple[str, list[str]]]) -> list[list[float]]:
    """What `main()` returns for each (port, words), in an environment as torchrun leaves it."""
    sys.path.insert(0, str(FOLDER))
    found = []
    for port, words in runs:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **where})
        found.append(importlib.import_module(script).main(words))
    return found


def losses(world: int, script: str, *words: str) -> list[list[float]]:
    """Of every rank."""
    return [found[0] for found in run_ranks(world, run_scripts, script, [(free_port(), list(words))], meet=False)]


def test_one_line_changes() -> None:
    changed = difference("examples/fsdp2/train_adamw.py", "examples/fsdp2/train.py", context=0)
    code = [line for line in changed if not re.match(r'@@|[-+]"""|\+$', line)]
    assert [line.replace(" ", "")[:20] for line in code] == [
        "+importlayerwise",
        "-optimizer=torch.opt",
        "+optimizer=layerwise",
    ]


@pytest.mark.parametrize("script", sampled(["train_adamw", "train_tp", "train_hf"], "train_hf"))
def test_the_loss_goes_down(script: str) -> None:
    for history in losses(2, script, "--steps", "8"):
        assert history[-1] < history[0] - 0.3


@pytest.mark.slow
def test_tensor_parallelism_beside_data_parallelism() -> None:
    for history in losses(4, "train_tp", "--steps", "8"):
        assert history[-1] < history[0] - 0.3


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_losses_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    runs = [
        (free_port(), ["--lr", "0.01", "--steps", "8"]),
        (free_port(), ["--lr", "0.01", "--steps", "5", "--out", f"{tmp_path}/saved"]),
        (free_port(), ["--lr", "0.01", "--steps", "8", "--out", f"{tmp_path}/saved"]),
    ]
    for whole, begun, resumed in run_ranks(2, run_scripts, "train", runs, meet=False):
        assert whole[-1] < whole[0] - 0.3
        assert begun + resumed == whole

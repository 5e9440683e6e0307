"""The example trainers: what changes between them is counted, and both are run as torchrun would run them."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import layerwise
from benchmarks.tables import ROOT, difference
from tests.ranks import run_ranks

FOLDER = ROOT / "examples" / "nanogpt"
SCRIPTS = ("train_ddp", "train")
TEXT = argparse.__file__
SMALL = ("--data", TEXT, "--batch-size", "4", "--warmup", "10", "--eval-every", "3")
"""More warm-up than steps: the learning rate of a step does not depend on how many there will be."""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_scripts(rank: int, world: int, runs: list[tuple[str, str, list[str]]]) -> list[Any]:
    """What `main()` returns for each (script, port, words), in an environment as torchrun leaves it."""
    sys.path.insert(0, str(FOLDER))
    found = []
    for script, port, words in runs:
        if world > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), **where})
        with mock.patch.object(dist, "destroy_process_group", leave_in_peace(dist.destroy_process_group)):
            found.append(importlib.import_module(script).main(words))
    return found


def leave_in_peace(destroy: Callable[[], None]) -> Callable[[], None]:
    """Leaving a process group a moment later. A DistributedDataParallel that goes out of scope waits for gloo's threads without
    letting go of the interpreter, and one of them may still need that for the collective that it has just ended: torch then
    hangs, once in some hundred runs."""

    def later() -> None:
        time.sleep(0.3)
        destroy()

    return later


def val_loss(checkpoint: str) -> float:
    """The loss of the saved weights in a model that was never wrapped."""
    from data import Text
    from model import GPT, GPTConfig

    module = GPT(GPTConfig()).eval()
    if Path(checkpoint).is_dir():
        layerwise.load(checkpoint, module)
    else:
        module.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    with torch.no_grad():
        return float(module(*Text(TEXT, GPTConfig().block_size).val_batch(32)))


def val_loss_of(rank: int, world: int, checkpoints: list[str]) -> list[float]:
    sys.path.insert(0, str(FOLDER))
    return [val_loss(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nanogpt")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, list[Any]]:
    """For each script what its ranks saw, on two of them: six steps; three steps, and three more in a run that goes on."""
    words = {
        script: [
            [*SMALL, "--steps", "6", "--out", f"{folder}/{script}/whole"],
            [*SMALL, "--steps", "3", "--out", f"{folder}/{script}/parts"],
            [*SMALL, "--steps", "6", "--out", f"{folder}/{script}/parts", "--resume"],
        ]
        for script in SCRIPTS
    }
    runs = [(script, free_port(), line) for script in SCRIPTS for line in words[script]]
    ranks = run_ranks(2, run_scripts, runs, meet=False)
    return {"train_ddp": [rank[:3] for rank in ranks], "train": [rank[3:] for rank in ranks]}


def test_the_page_says_how_many_lines_change() -> None:
    changed = difference("examples/nanogpt/train_ddp.py", "examples/nanogpt/train.py", context=0)
    gone, come = (sum(line.startswith(sign) for line in changed) for sign in "-+")
    said = re.search(r"\*\*(\d+) lines go and (\d+) come\*\*", (ROOT / "docs" / "from_ddp.md").read_text())
    assert said is not None
    assert said.groups() == (str(gone), str(come))


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_loss_goes_down_and_ranks_read_different_text(script: str, runs: dict[str, Any]) -> None:
    first, second = (rank[0] for rank in runs[script])
    for history in (first, second):
        assert history["train"][-1] < history["train"][0] - 0.3
    assert first["train"] != second["train"]
    assert first["norm"] == second["norm"]
    assert len(first["val"]) == 2
    assert first["val"][1] < first["val"][0]
    assert second["val"] == []  # validation is the first rank's alone


def test_both_scripts_start_from_the_same_losses_and_the_same_gradient_norm(runs: dict[str, Any]) -> None:
    # The first step has the same weights and samples in both: accumulation, averaging and the norm must mean the same.
    for theirs, ours in zip(runs["train_ddp"], runs["train"], strict=True):
        assert ours[0]["train"][0] == pytest.approx(theirs[0]["train"][0], rel=1e-6)
        assert ours[0]["norm"][0] == pytest.approx(theirs[0]["norm"][0], rel=1e-5)
        assert ours[0]["train"][1:] != theirs[0]["train"][1:]  # from then on one is Muon


@pytest.mark.parametrize("script", SCRIPTS)
def test_validation_is_that_of_the_saved_weights(script: str, runs: dict[str, Any], folder: Path) -> None:
    file = {"train_ddp": "checkpoint.pt", "train": "step_00000006"}[script]
    checkpoints = [f"{folder}/{script}/{name}/{file}" for name in ("whole", "parts")]
    (losses,) = run_ranks(1, val_loss_of, checkpoints)
    whole, _, resumed = runs[script][0]
    assert losses[0] == pytest.approx(whole["val"][-1], rel=1e-6)
    assert losses[1] == pytest.approx(resumed["val"][-1], rel=1e-6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_goes_on_has_the_losses_of_one_that_was_not_stopped(script: str, runs: dict[str, Any]) -> None:
    for whole, begun, resumed in runs[script]:
        assert begun["train"] + resumed["train"] == whole["train"]
        assert begun["norm"] + resumed["norm"] == whole["norm"]


def test_both_scripts_run_alone_and_see_the_same_gradient_in_fp16_with_either_way_of_scaling(tmp_path: Path) -> None:
    alone = [*SMALL, "--steps", "3", "--out", str(tmp_path)]
    fp16 = ["--data", TEXT, "--batch-size", "1", "--accumulation", "1", "--steps", "1", "--dtype", "fp16"]
    runs = [(script, "", words) for script in SCRIPTS for words in (alone, fp16)]
    (found,) = run_ranks(1, run_scripts, runs, meet=False)
    for history in found[::2]:
        assert history["train"][-1] < history["train"][0]
    theirs, ours = (history["norm"][0] for history in found[1::2])
    assert ours == pytest.approx(theirs, rel=0.01)  # fp16 has 11 bits
    assert ours > 1.0

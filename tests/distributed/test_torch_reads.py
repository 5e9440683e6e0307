"""torch's own distributed checkpoints read ours, in a process that has no layerwise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.crossings import Crossing, Ranks, constants_in, oracle_of, save_all
from tests.ranks import run_ranks

BF16, FP32 = torch.bfloat16, torch.float32
READER = Path(__file__).parent.parent / "torch_reader.py"
KEPT = {"normuon": "row_moment", "adamuon": "second_moment"}


def expected_of(crossing: Crossing) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, by the key that it has in it, from the oracle."""
    oracle = oracle_of(crossing)
    found = {f"model.{name}": tensor for name, tensor in {**oracle.weights(), **constants_in(crossing)}.items()}
    for name, state in oracle.state.items():
        kinds = {kind.replace("second.", f"{KEPT.get(crossing.rule)}."): tensor for kind, tensor in state.items()}
        if crossing.dtype != FP32:
            kinds["master"] = oracle.masters[name]
        found |= {f"optimizer.state.{name}.{kind}": tensor for kind, tensor in kinds.items()}
    return found


@pytest.mark.parametrize(
    ("saved", "rule", "dtype"),
    [
        pytest.param(Ranks("flat", 3), "normuon", BF16, marks=pytest.mark.slow),
        pytest.param(Ranks("ep x fsdp", 4), "adamuon", BF16, marks=pytest.mark.slow),
        pytest.param(Ranks("chunks", 2), "normuon", FP32, marks=pytest.mark.slow),
        pytest.param(Ranks("fsdp+tp", 4), "muon", FP32, marks=pytest.mark.slow),
    ],
    ids=["flat", "ep x fsdp", "chunks", "fsdp+tp"],
)
def test_torch_alone_reads_weights_and_state(tmp_path: Path, saved: Ranks, rule: str, dtype: torch.dtype) -> None:
    crossing = Crossing(saved, saved, rule, dtype, dtype)
    assert run_ranks(saved.world, save_all, str(tmp_path), [crossing]) == [[]] * saved.world
    expected = expected_of(crossing)
    assert read(tmp_path, crossing, expected) == [f"{len(expected)} tensors in 4 ways"] * 2


@pytest.mark.slow
def test_an_element_that_is_not_what_torch_reads_is_seen(tmp_path: Path) -> None:
    crossing = Crossing(Ranks("compact", 2), Ranks("compact", 2), "muon", FP32, FP32)
    run_ranks(2, save_all, str(tmp_path), [crossing])
    expected, key = expected_of(crossing), "optimizer.state.blocks.0.up.weight.momentum"
    last = expected[key].view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, float("inf"))))
    assert read(tmp_path, crossing, expected) == [f"{key} as None is not what was saved"] * 2


def read(folder: Path, crossing: Crossing, expected: dict[str, Tensor]) -> list[str]:
    """What two processes say last that read a checkpoint and compare it."""
    torch.save(expected, folder / "expected.pt")
    places = [str(folder / name) for name in ("meet", crossing.file, "expected.pt")]
    jobs = [
        subprocess.Popen(
            [sys.executable, str(READER), str(rank), "2", *places],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={},
        )
        for rank in range(2)
    ]
    return [job.communicate(timeout=300)[0].splitlines()[-1] for job in jobs]
